"""Strategies: synchronous replicas on this machine or on a Dask cluster."""
