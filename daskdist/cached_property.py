"""`cached_property` without a lock, as in Python 3.12.

That of Python 3.11 holds one lock for the properties of all objects of a class. A function of the user that is called
for a property, perhaps in another thread, may need that property of another object, and would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 - used like a function
        """A property that is computed once; threads that compute it at the same time get one of the values."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self._function = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self._name, self._function(instance))


__all__ = ["cached_property"]
