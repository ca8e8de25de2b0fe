"""The data service: pipelines that run on a cluster's workers and are read from anywhere."""
