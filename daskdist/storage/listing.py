"""Files of a directory and of globs, with a log of what is left out."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from daskdist.errors import FileError
from daskdist.storage.hidden_files import is_hidden, is_hidden_from, is_spelled
from daskdist.url_secrets import without_secrets

logger: Final = logging.getLogger("daskdist")


def files_below(root: str, *, with_hidden: bool = False) -> Iterator[str]:
    """Yield the files of a local directory and of the directories below it, hidden ones only if asked for.

    Links to directories are followed, except to a directory that the link is in.
    """
    for folder, below, names in os.walk(root, followlinks=True):
        below[:] = [
            name
            for name in below
            if (with_hidden or not is_hidden(name)) and not _leads_back(os.path.join(folder, name))
        ]
        for name in names:
            yield os.path.join(folder, name)


def _leads_back(directory: str) -> bool:
    # Return whether a directory is a link to one that the link is in.
    if not os.path.islink(directory):
        return False
    target = os.path.realpath(directory)
    return any(os.path.commonpath([target, os.path.realpath(above)]) == target for above in Path(directory).parents)


def matches(pattern: str) -> list[str]:
    """Return the local files and directories that a glob matches, sorted; with two stars, only the files."""
    parts = pattern.split("/")
    if "**" not in parts:
        return sorted(name for name in glob.glob(pattern) if not is_hidden_from(name, pattern))
    # Python's glob would follow each link in a circle until the system refuses.
    num_fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    with_hidden = any(part[:1] in ("_", ".", "[") for part in parts[num_fixed:-1])
    below = files_below("/".join(parts[:num_fixed]) or "/", with_hidden=with_hidden)
    return sorted(name for name in below if is_spelled(name, pattern))


def as_text(names: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the names of files as an array of text.

    Raises
    ------
    FileError
        A name is not UTF-8, which text is.
    """
    try:
        return np.array(names, np.dtypes.StringDType())
    except UnicodeError:
        odd = next(name for name in names if name != os.fsencode(name).decode(errors="ignore"))
        raise FileError(
            f"{odd!r}: the name is not UTF-8, which text of elements is; rename it, or give its directory to a reader"
        ) from None


def with_suffix(names: Sequence[str], suffixes: tuple[str, ...], directory: str) -> list[str]:
    """Return the files of a directory whose names end in one of some suffixes in lower case; log the others."""
    kept = [name for name in names if name.lower().endswith(suffixes)]
    if len(kept) < len(names):
        logger.info(
            "%s: left out %d of %d files for the suffixes of their names, such as %s",
            without_secrets(directory),
            len(names) - len(kept),
            len(names),
            without_secrets(min(set(names).difference(kept))),
        )
    return kept


def without_directories(names: Sequence[str], is_directory: Callable[[str], bool], pattern: str) -> list[str]:
    """Return the files that a glob matches; log the directories, unless it matches all files in them too."""
    directories = set(filter(is_directory, names))
    files = [name for name in names if name not in directories]
    if directories and "**" not in pattern:
        logger.warning(
            "%s: left out %d directories that it matches, such as %s; give directories as a list of their paths",
            without_secrets(pattern),
            len(directories),
            without_secrets(min(directories)),
        )
    return files
