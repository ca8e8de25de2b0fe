"""Where bytes are, and which files of a directory are a dataset."""
