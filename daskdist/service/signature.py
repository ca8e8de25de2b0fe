"""Functions that take the options of another function without repeating their names, types and defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
# Options of `Dataset.serve` in TensorFlow's order, in which ``data_transfer_protocol`` stands between them.
JOB_OPTIONS: Final = ("job_name", "consumer_index", "num_consumers", "max_outstanding_requests")
TRAINER_OPTIONS: Final = ("cross_trainer_cache", "target_workers")


def with_parameters(
    source: Callable[..., Any], *names: str
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator that gives a function these parameters, in this order.

    A parameter that the function does not have is one of ``source``, which the function takes in its ``**options``.
    Callers may give each by position or by name.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        known = {**inspect.signature(source).parameters, **inspect.signature(function).parameters}
        parameters = [known[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        signature = inspect.signature(function).replace(parameters=parameters)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Result:
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            bound.apply_defaults()
            return function(**bound.arguments)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
