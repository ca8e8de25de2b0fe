"""The options for when and how the replicas' copies of a variable are combined."""

from __future__ import annotations

import enum
from typing import Self

from daskdist.errors import ArgumentError


class _Named(enum.Enum):
    @classmethod
    def of(cls, value: object) -> Self:
        """Return the member of a name, in any case, or the given member itself."""
        if isinstance(value, cls):
            return value
        member = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if member is None:
            raise ArgumentError(f"{value!r:.80} is not a {cls.__name__}; give one of {', '.join(cls.__members__)}")
        return member


class VariableAggregation(_Named):
    """The aggregation of the values that replicas assign to a variable.

    NONE: the values must be equal. SUM, MEAN: the variable is assigned their sum or mean. ONLY_FIRST_REPLICA: it is
    assigned the value of replica 0.

    >>> VariableAggregation.of("mean")
    <VariableAggregation.MEAN: 'MEAN'>
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class VariableSynchronization(_Named):
    """The time at which the replicas' copies of a variable are combined.

    ON_WRITE and AUTO: at each assignment, so that the copies are always equal. ON_READ: each replica has its own value,
    and they are aggregated when the variable is read outside of replicas.
    """

    AUTO = "AUTO"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"
