"""A check that the elements of all files have the spec of the first file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from daskdist.core.spec import ElementSpec
from daskdist.errors import FileError

logger: Final = logging.getLogger("daskdist")
# Where so many files cannot be read, before one that can, it is not the files that are wrong.
_MOST_UNREADABLE: Final = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FirstFile:
    """The first file, whose spec the others must match.

    Parameters
    ----------
    path
        Its path.
    spec
        The spec of its elements.
    """

    path: str
    spec: ElementSpec


def readable(paths: Sequence[str], learn: Callable[[str], T]) -> Iterator[tuple[str, T]]:
    """Yield the files that something can be learned from, and what was learned; at least one.

    Parameters
    ----------
    paths
        The files.
    learn
        Finds out about one file what elements are.

    Raises
    ------
    FileError
        There is none: what is wrong with the first.

    Notes
    -----
    Files before the first that can be read are logged. Reading them is an error, or they are left out where errors are
    skipped, as with any other file.
    """
    failed: list[FileError] = []
    has_readable = False
    for path in paths:
        try:
            learned = learn(path)
        except FileError as error:
            failed.append(error)
            if len(failed) >= _MOST_UNREADABLE and not has_readable:
                break
            continue
        if failed and not has_readable:
            logger.warning("%s; what elements are is learned from %s instead", failed[0], path)
        has_readable = True
        yield path, learned
    if not has_readable:
        raise failed[0]


def unlike(path: str, spec: ElementSpec, first: FirstFile) -> FileError:
    """Return the error for a file whose elements differ from those of the first."""
    return FileError(
        f"{path}: its elements are {spec.packed}, those of {first.path}, the first file, {first.spec.packed}"
    )
