"""Running a pipeline: one interpreter, and callers that make its calls here, in threads, or on a cluster."""
