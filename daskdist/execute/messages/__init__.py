"""Functions, values and errors as they travel between processes."""
