"""Calls on replicas, on the workers that make them, and what the scheduler does for them."""
