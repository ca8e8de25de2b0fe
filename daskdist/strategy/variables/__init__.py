"""Variables: values that replicas keep from call to call."""
