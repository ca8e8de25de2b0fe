"""Functions that make datasets of files, a file for each format.

All take paths as `read_files` does: a path, a glob, a directory or an fsspec URL (``s3://``, ``gs://``, ``http://``,
``memory://``, ``zip://*.csv::archive.zip``), or a list of such. What one pattern matches is sorted. What a split
is, and so what is read at a time and dealt to workers, differs by format: see `daskdist.formats`.
"""
