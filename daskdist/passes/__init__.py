"""Rewrites of a pipeline from the form the user built to the form that runs; each pass is a function."""
