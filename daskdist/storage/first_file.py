"""The first readable file of several, whose spec the elements of the others must have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from daskdist.core.spec import ElementSpec
from daskdist.errors import DamagedFileError, FileError

logger: Final = logging.getLogger("daskdist")
# The number of unreadable files after which the cause is not a few damaged files.
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
    schema
        The Arrow schema, for formats of tables.
    """

    path: str
    spec: ElementSpec
    schema: Any = None


def readable_files(paths: Sequence[str], learn: Callable[[str], T]) -> Iterator[tuple[str, T]]:
    """Yield each readable file with the result of ``learn``; at least one.

    Raises
    ------
    FileError
        No file is readable; this is the error of the first.

    Notes
    -----
    Damaged files before the first readable one are logged. Reading them later raises, or skips them if errors are
    skipped, as for any file. Any other reason why a file cannot be read is raised at once.
    """
    failed: list[DamagedFileError] = []
    has_readable = False
    for path in paths:
        try:
            learned = learn(path)
        except DamagedFileError as error:
            failed.append(error)
            if len(failed) >= _MOST_UNREADABLE and not has_readable:
                break
            continue
        if failed and not has_readable:
            logger.warning("%s; the spec of the elements is taken from %s instead", failed[0], path)
        has_readable = True
        yield path, learned
    if not has_readable:
        raise failed[0]


def differs_from_first(path: str, spec: ElementSpec, first: FirstFile) -> FileError:
    """Return the error for a file whose elements differ from those of the first."""
    return FileError(
        f"{path}: its elements are {spec.packed}, but those of the first file, {first.path}, are {first.spec.packed}"
    )
