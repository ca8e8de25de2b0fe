"""Names of several files by braces, as in ``"train-{000..146}.tar"`` and ``"{train,test}.tar"``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from daskdist.errors import ArgumentError
from daskdist.storage.filesystem import Paths, local

_BRACES: Final = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
# A typing error in a range must not exhaust memory.
_MOST_NAMES: Final = 1_000_000


def expand_braces(paths: Paths) -> Paths:
    """Return paths with the braces of each expanded, unless a local file has that name.

    >>> expand_braces("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']

    Raises
    ------
    ArgumentError
        Braces stand for too many files.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    # Paths of other types raise when they are expanded.
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        return paths
    names: list[str] = []
    for path in map(os.fspath, paths):
        names.extend([path] if os.path.exists(local(path)) else _without_braces(path))
    return names


def _without_braces(path: str) -> Iterator[str]:
    # A shell expands braces in the same way.
    match = _BRACES.search(path)
    if match is None:
        yield path
        return
    first, last, words = match.groups()
    if words is None:
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) and len(first) + len(last) > 2 else 0
        start, stop = int(first), int(last)
        numbers = range(start, stop + 1) if start <= stop else range(start, stop - 1, -1)
        if len(numbers) > _MOST_NAMES:
            raise ArgumentError(f"{path!r} stands for {len(numbers):,} files; the limit is {_MOST_NAMES:,}")
        choices: Iterator[str] = (str(number).zfill(width) for number in numbers)
    else:
        choices = iter(words.split(","))
    for choice in choices:
        yield from _without_braces(path[: match.start()] + choice + path[match.end() :])
