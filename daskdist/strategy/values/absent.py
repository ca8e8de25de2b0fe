"""`ABSENT`: the value of a replica whose function was skipped, as it had no rows."""

from __future__ import annotations

from typing import Any, Final

from daskdist.errors import ArgumentError


class Absent:
    """The value that a replica without rows does not have; there is one object, `ABSENT`."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "ABSENT"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise ArgumentError(
            "a replica has no value here: it had no rows, so that its function was skipped, as the option "
            "last_batch='skip_empty' says. Reduce or gather the values of all replicas, or look at local_results, "
            "where it is None"
        )

    def __repr__(self) -> str:
        return "<skipped: no rows>"


ABSENT: Final = Absent()
# The message to other replicas that wait for one in a collective.
SKIPPED: Final = "had no rows, so that its function was skipped (the option last_batch='skip_empty')"
