"""The context of functions that run on replicas."""
