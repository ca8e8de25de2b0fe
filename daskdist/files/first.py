"""The first of several files, which the others are to be like."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.spec import ElementSpec
from daskdist.errors import FileError


@dataclass(frozen=True, slots=True)
class First:
    """The first file, which the others are to be like.

    Parameters
    ----------
    path
        Its path.
    spec
        The spec of its elements.
    """

    path: str
    spec: ElementSpec


def unlike(path: str, spec: ElementSpec, first: First) -> FileError:
    """What is raised for a file whose elements are others than those of the first."""
    return FileError(
        f"{path}: its elements are {spec.packed}, those of {first.path}, the first file, {first.spec.packed}"
    )
