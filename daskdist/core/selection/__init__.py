"""Selections: ordered rows of blocks, from which chunks are assembled."""
