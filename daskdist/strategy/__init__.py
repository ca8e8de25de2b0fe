"""Strategies: replicas in step, on this machine or on a Dask cluster."""
