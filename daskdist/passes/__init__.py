"""Rewrites: from the pipeline as it was built to the one that runs, each pass a function."""
