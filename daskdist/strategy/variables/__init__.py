"""Variables: values that replicas keep between calls."""
