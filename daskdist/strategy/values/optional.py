"""`Optional`: the next value of an iterator, or none at its end."""

from __future__ import annotations

from typing import Any

import optree

from daskdist.core.spec import ElementSpec, PerReplicaSpec, TensorSpec
from daskdist.errors import ArgumentError
from daskdist.strategy.values.per_replica import PerReplica


class Optional:
    """A value that may be missing.

    Parameters
    ----------
    value
        The value; None where there is none.
    element_spec
        The spec of each leaf that the value has, or would have.
    has_value
        Whether there is a value.

    >>> Optional.from_value((1.5, 2)).get_value()
    (1.5, 2)
    >>> Optional.empty(TensorSpec((None,), "int64")).has_value()
    False
    """

    def __init__(self, value: Any, element_spec: Any, *, has_value: bool = False) -> None:
        self._value = value
        self._has_value = has_value
        self.element_spec = element_spec

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """Return an optional that has a value: a nest of arrays and numbers, or of `PerReplica`."""
        leaves, treespec = optree.tree_flatten(value, none_is_leaf=True)
        return cls(value, optree.tree_unflatten(treespec, map(_spec_of, leaves)), has_value=True)

    @classmethod
    def empty(cls, element_spec: Any) -> Optional:
        """Return an optional without a value, for a spec."""
        return cls(None, element_spec)

    def has_value(self) -> bool:
        """Return whether there is a value."""
        return self._has_value

    def get_value(self, name: str | None = None) -> Any:
        """Return the value.

        Parameters
        ----------
        name
            Accepted for compatibility and ignored.

        Raises
        ------
        ArgumentError
            There is none.
        """
        if not self._has_value:
            raise ArgumentError("this optional has no value: the iterator is at its end; ask has_value() first")
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self._has_value else "Optional()"


def _spec_of(leaf: Any) -> PerReplicaSpec | TensorSpec:
    if isinstance(leaf, PerReplica):
        return PerReplicaSpec(*[ElementSpec.of(value).leaves[0] for value in leaf.values])
    return ElementSpec.of(leaf).leaves[0]
