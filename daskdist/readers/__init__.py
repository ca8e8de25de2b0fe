"""Functions that make datasets of files, a file for each format.

All take paths as `read_files` does: a path, a glob, a directory or an fsspec URL (``s3://``, ``gs://``, ``http://``,
``memory://``, ``zip://*.csv::archive.zip``), or a list of such. What one pattern matches is sorted. In
directories, and by the wildcards of globs, names that begin with ``_`` or ``.`` are skipped, as pandas and pyarrow skip
them; a path or a glob that spells them out (``_old/*.csv``) takes them. Of a directory that was written here, the files
are those of the last write that came to its end, and any that others put beside them.

What a split is, and so what is read at a time and dealt to workers, differs by format: see `daskdist.formats`. A line,
row or record of more than the setting ``daskdist.max-record-bytes`` (1 GiB) is an error.
"""
