"""File systems, compression, byte ranges, and the choice of the files of a directory that are a dataset."""
