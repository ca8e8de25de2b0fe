"""WebDataset: tar archives of samples."""
