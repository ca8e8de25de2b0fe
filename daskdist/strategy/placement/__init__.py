"""Placement: the workers and devices of replicas."""
