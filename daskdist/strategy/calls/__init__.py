"""Calls on replicas: in threads of this process, or in ordered streams to the workers of a cluster."""
