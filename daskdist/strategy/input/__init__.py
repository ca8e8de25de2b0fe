"""Inputs: distributed datasets, and their iterators in the program and on replicas."""
