"""The base of objects with a value for each replica."""

from __future__ import annotations

from typing import Any, Final, NoReturn

# The error of a value for each replica among the operands of an operation.
ONE_OF_EACH: Final = "a PerReplica was given where a single value is needed; pass it to run or reduce"


class DistributedValues:
    """The base of objects with a value for each replica.

    They raise an error when used as an array or a number, and say how to get one.
    """

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The value of each replica, in replica order."""
        raise NotImplementedError

    def _refuse(self, operation: str) -> NoReturn:
        raise TypeError(
            f"{operation}: a {type(self).__name__} has one value for each replica. Combine them into one with "
            "strategy.reduce(...) or strategy.gather(...), or get all of them with strategy.local_results(...)"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._refuse("numpy.asarray")

    def __float__(self) -> float:
        self._refuse("float")

    def __int__(self) -> int:
        self._refuse("int")

    def __complex__(self) -> complex:
        self._refuse("complex")

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse(f"format with {spec!r}")
        return str(self)
