"""The page of daskdist on Dask's dashboard and its Prometheus metrics, from figures on the scheduler."""
