"""The callers, one a module: in this thread, on a thread pool, as a Dask graph, or on a Dask cluster."""
