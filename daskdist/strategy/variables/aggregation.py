"""When and how the replicas' copies of a variable are made one."""

from __future__ import annotations

import enum
from typing import TypeVar

from daskdist.errors import ArgumentError

_E = TypeVar("_E", bound="_Named")


class _Named(enum.Enum):
    @classmethod
    def of(cls: type[_E], value: object) -> _E:
        """Return a member from itself or its name in any case."""
        if isinstance(value, cls):
            return value
        found = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if found is None:
            raise ArgumentError(f"{value!r:.80} is no {cls.__name__}; there are {', '.join(cls.__members__)}")
        return found


class VariableAggregation(_Named):
    """The aggregation of the values that replicas assign to a variable.

    NONE: they are to be the same. SUM, MEAN: the variable is assigned their sum or mean. ONLY_FIRST_REPLICA: it is
    assigned that of replica 0.

    >>> VariableAggregation.of("mean")
    <VariableAggregation.MEAN: 'MEAN'>
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class VariableSynchronization(_Named):
    """When the copies of a variable that replicas have are made one.

    ON_WRITE, which AUTO is too: whenever one is assigned to it, so that they are always the same. ON_READ: each replica
    has its own, and they are aggregated where the variable is read outside of replicas.
    """

    AUTO = "AUTO"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"
