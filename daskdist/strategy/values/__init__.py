"""Values that replicas have: one each, and perhaps not there yet."""
