"""Replicas: what a function that runs on one can do and see."""
