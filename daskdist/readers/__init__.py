"""The public functions that create datasets from files, one file for each format.

All accept paths as `read_files` does: a path, a glob, a directory or an fsspec URL (``s3://``, ``gs://``, ``http://``,
``memory://``, ``zip://*.csv::archive.zip``), or a list of these. The files that match one pattern are sorted. In
directories, and by the wildcards of globs, names that begin with ``_`` or ``.`` are skipped, as in pandas and pyarrow,
unless a path or a glob spells them out (``_old/*.csv``). In a directory, a reader takes the files whose names end in
a suffix of its format, in upper or lower case and also compressed (``a.csv``, ``B.CSV.GZ``); the others are logged at
the level INFO, and directories that a glob matches as a warning. Links to directories are followed. In a directory that
this package wrote, the files are those of the last complete write, and any that others added.

A split, the unit of reading and of distribution to workers, differs by format: see `daskdist.formats`. A line,
row or record of more than the setting ``daskdist.max-record-bytes`` (1 GiB) is an error.
"""
