"""Placement: the workers and devices that replicas are on."""
