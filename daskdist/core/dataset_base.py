"""The base class of `Dataset`, and accessors for its internals, which users do not see."""

from __future__ import annotations

from collections.abc import Iterator

from daskdist.core.block import Rows
from daskdist.core.node import Node
from daskdist.core.primitive import Primitive
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Nested


class DatasetBase(Nested):
    """A dataset as lower modules see it: an object for the functions of this module."""

    def _current_node(self) -> Node:
        raise NotImplementedError

    def _current_primitive(self) -> Primitive:
        raise NotImplementedError

    def _current_spec(self) -> ElementSpec:
        raise NotImplementedError

    def _computed_rows(self) -> Iterator[Rows]:
        raise NotImplementedError

    @property
    def _fingerprint(self) -> str:
        raise NotImplementedError

    def _with_own_arrays(self) -> DatasetBase:
        node, dataset = self._current_node(), self
        with_copies: Node = node.with_own_arrays()
        return dataset if with_copies is node else dataset.__replace__(node=with_copies)  # type: ignore[attr-defined]


def node_of(dataset: DatasetBase) -> Node:
    """Return the pipeline of a dataset."""
    return dataset._current_node()


def primitive_of(dataset: DatasetBase) -> Primitive:
    """Return the primitives of the pipeline of a dataset."""
    return dataset._current_primitive()


def element_spec_of(dataset: DatasetBase) -> ElementSpec:
    """Return the ``element_spec`` of a dataset as structure and leaves."""
    return dataset._current_spec()


def pipeline_fingerprint(dataset: DatasetBase) -> str:
    """Return the fingerprint of the pipeline of a dataset."""
    return dataset._fingerprint


def computed_rows(dataset: DatasetBase) -> Iterator[Rows]:
    """Compute the elements of a dataset in this thread, as rows."""
    return dataset._computed_rows()
