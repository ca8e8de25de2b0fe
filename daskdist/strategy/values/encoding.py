"""The arguments of calls as they are sent: a pickle of what is in this process, and references to the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.errors import ArgumentError
from daskdist.execute.messages.pickling import describe_unpicklable, dumps_on_host, load_sent, type_name
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.distributed_values import ONE_OF_EACH, DistributedValues
from daskdist.strategy.values.flat import flattened_call, loaded_structure, pickled_structure
from daskdist.strategy.values.refs import REFERENCE_LEAVES, FlatResult, Pending, Pick, Ref, ResultLeaf, whole

# Types of numbers and arrays.
NUMBERS: Final = frozenset({np.ndarray, int, float, bool, complex, np.float32, np.float64, np.int32, np.int64})
# Arrays of at most this many bytes are combined in a fraction of a millisecond.
SMALL_BYTES: Final = 2**16
# The same for arrays that are broadcast against each other.
TINY_BYTES: Final = 2**10


class Encoded(NamedTuple):
    """A nest, without the values in it that are not in this process.

    Parameters
    ----------
    structure
        The structure, as `pickled_structure` returns it.
    leaves
        The pickle of the list of leaves, with None in the place of what is not in this process; empty if all is not.
    inputs
        For each result that is needed, the number of its leaf, and what extracts the leaf from it.
    """

    structure: bytes
    leaves: bytes
    inputs: Sequence[tuple[int, Pick]] = ()

    def leaves_with(self, results: Sequence[Any]) -> list[Any]:
        """Return the leaves, given the results that are needed, in the order of the inputs."""
        leaves: list[Any] = load_sent(self.leaves) if self.leaves else [None] * len(self.inputs)
        for (number, pick), result in zip(self.inputs, results, strict=True):
            leaves[number] = pick(result)
        return leaves

    @property
    def treespec(self) -> Any:
        """The structure."""
        return loaded_structure(self.structure)[0]

    def nest(self, results: Sequence[Any]) -> Any:
        """Return the nest, given the results that are needed."""
        return self.treespec.unflatten(self.leaves_with(results))


def encoded(
    args: tuple[Any, ...], kwargs: dict[str, Any], caller: ResultSource, name: str
) -> tuple[bytes, bytes, list[tuple[int, Ref]]]:
    """Return arguments as they are sent.

    Parameters
    ----------
    args, kwargs
        Nests of values; those that are unknown in this process are asynchronous values or references.
    caller
        The caller that sends them; values that it cannot use are waited for.
    name
        The name of the call, for the error if a value does not pickle.

    Returns
    -------
    tuple
        The structure and the leaves, as in `Encoded`, and the number and the reference of each other leaf.

    Raises
    ------
    ArgumentError
        A value does not pickle, or is one for each replica.
    """
    leaves, treespec = flattened_call(args, kwargs, REFERENCE_LEAVES)
    inputs: list[tuple[int, Ref]] = []
    for number, leaf in enumerate(leaves):
        ref: Ref | None = None
        if type(leaf) is Ref:
            ref = leaf
        elif isinstance(leaf, Pending):
            ref = caller.usable(leaf)
        elif isinstance(leaf, DistributedValues):
            raise ArgumentError(ONE_OF_EACH)
        if ref is not None:
            inputs.append((number, ref))
            leaves[number] = None
        elif isinstance(leaf, Pending):
            leaves[number] = leaf.result()
    pickled = pickled_value(leaves, lambda: f"{name}: a value") if len(inputs) < len(leaves) else b""
    return pickled_structure(treespec), pickled, inputs


def for_tasks(
    args: tuple[Any, ...], kwargs: dict[str, Any], caller: ResultSource, name: str
) -> tuple[Encoded, list[Any]]:
    """Return arguments for tasks, and the futures that they need; like `encoded`."""
    structure, leaves, inputs = encoded(args, kwargs, caller, name)
    futures = [ref.source.futures[ref.place] for _, ref in inputs]
    return Encoded(structure, leaves, [(number, ref.pick) for number, ref in inputs]), futures


def applied(results: Sequence[Any], arguments: Encoded) -> Any:
    """Call the first of some arguments with the others, given the results that are needed."""
    (function, *args), kwargs = arguments.nest(results)
    return function(*args, **kwargs)


class SteadyFunction:
    """The base of functions of this package that do not change: they are sent to a worker once."""

    def is_quick(self, results: Sequence[Any], picks: Sequence[Pick]) -> bool:
        """Return whether a call with parts of some results takes only microseconds and runs no code of the user."""
        raise NotImplementedError


def is_small(value: Any, most_bytes: int = SMALL_BYTES) -> bool:
    """Return whether a value is a number or a small array of NumPy, or a nest of those in a list or a tuple."""
    if type(value) is np.ndarray:
        return value.nbytes <= most_bytes and not value.dtype.hasobject
    if type(value) in (tuple, list):
        return all(is_small(item, most_bytes) for item in value)
    return type(value) in NUMBERS or isinstance(value, np.dtype)


def is_small_part(result: Any, pick: Pick, most_bytes: int = SMALL_BYTES) -> bool:
    """Return whether a part of a result of a function is a number or a small array of NumPy."""
    if type(result) is not FlatResult:
        return pick is whole and is_small(result, most_bytes)
    leaves = result.leaves
    return type(pick) is ResultLeaf and pick.leaf < len(leaves) and is_small(leaves[pick.leaf], most_bytes)


@dataclass(frozen=True)
class Operation(SteadyFunction):
    """An elementwise operation of NumPy on asynchronous values, and on other numbers and tiny arrays."""

    function: np.ufunc

    def __call__(self, *args: Any) -> Any:
        return called_on_host(self.function, *args)

    def is_quick(self, results: Sequence[Any], picks: Sequence[Pick]) -> bool:
        """Return whether all values are tiny; the result may have as many numbers as the product of theirs."""
        return all(is_small_part(result, pick, TINY_BYTES) for result, pick in zip(results, picks, strict=True))


# Cached, so that it is sent to a worker once.
operation = lru_cache(maxsize=128)(Operation)


def called_on_host(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of values: operations on asynchronous values use NumPy arrays on every machine."""
    return function(*map(host_array, args), **kwargs)


def look(*values: Any) -> tuple[Any, ...]:
    """Return values to the program."""
    return values


def pickled_value(value: Any, name: Callable[[], str]) -> bytes:
    """Return the pickle of a value, whose name is for the error if it does not pickle."""
    try:
        pickled = dumps_on_host(value)
        if b"__main__" not in pickled:
            return pickled
    except Exception:
        # Try again below, with functions by value.
        pass
    try:
        return dumps_on_host(value, by_value=True)
    except Exception as error:
        raise ArgumentError(
            f"{name()} ({type_name(value)}) does not pickle, and so cannot be sent to a worker"
            f"{describe_unpicklable(value)}: {error}"
        ) from error
