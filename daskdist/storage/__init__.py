"""Where bytes are: file systems, compression, byte ranges, and which files of a directory are a dataset."""
