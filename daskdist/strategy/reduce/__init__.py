"""Reductions and gathering of the values of replicas."""
