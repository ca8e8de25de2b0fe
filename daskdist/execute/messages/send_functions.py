"""Checks of functions before they are sent to other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskdist.core.functions.by_value import by_value
from daskdist.core.functions.code_fingerprint import fingerprint_of
from daskdist.core.functions.fixed_values import with_views
from daskdist.core.functions.user_function import functions_of, location
from daskdist.core.node import Node
from daskdist.errors import ArgumentError
from daskdist.execute.messages.pickling import describe_unpicklable, dumps_on_host, type_name


def check_functions(node: Node) -> None:
    """Check that the functions of a pipeline can be sent to other processes.

    Raises
    ------
    ArgumentError
        A function does not pickle, or draws from a random generator of which each process would have a copy.
    """
    for function in functions_of(node):
        if not function.stays_in_program:
            function.check_generators()
            sent = function.__getstate__()["function"]
            _check_pickles(sent, f"{function.operation}: the function {function.location}")


def check_recorded(node: Node) -> None:
    """Check the functions of a recorded pipeline if Dask is set to run graphs in other processes.

    Raises
    ------
    ArgumentError
        As `check_functions`.
    """
    from dask import local, threaded
    from dask.base import get_scheduler

    if get_scheduler() not in (None, local.get_sync, threaded.get):
        check_functions(node)


def sent_function(function: Callable[..., Any], operation: str, num_processes: int) -> Callable[..., Any]:
    """Return a function that creates datasets in the form in which it is sent to other processes.

    Raises
    ------
    ArgumentError
        The function does not pickle, or draws from a random generator of which each process would have a copy.
    """
    generators = fingerprint_of(function).generators if num_processes > 1 else ()
    if generators:
        raise ArgumentError(
            f"{operation}: {location(function)} draws from {generators[0]}, of which each worker would have a copy, "
            "so that all would draw the same numbers; create the generator inside the function, from the worker's "
            "number: np.random.default_rng([seed, context.input_pipeline_id])"
        )
    sent = by_value(with_views(function))
    _check_pickles(sent, f"{operation}: the function {location(function)}")
    return sent


def _check_pickles(function: Any, name: str) -> None:
    try:
        # The contents of arrays are irrelevant and not copied.
        dumps_on_host(function, by_value=True, buffer_callback=lambda _: False)
    except Exception as error:
        raise ArgumentError(
            f"{name} ({type_name(function)}) does not pickle, and so cannot be sent to a worker"
            f"{describe_unpicklable(function)}: {error}"
        ) from None
