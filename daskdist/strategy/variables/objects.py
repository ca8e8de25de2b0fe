"""Objects as variables: each replica has a copy, and assigned objects are aggregated if their type allows it."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import optree

from daskdist.checkpoint.checkpoint import HasState
from daskdist.checkpoint.nests import PLAIN, as_numpy, like
from daskdist.core.functions.reach import cells_of, content_of
from daskdist.devices import named
from daskdist.errors import ArgumentError
from daskdist.strategy.collectives.operations import Agreed, First
from daskdist.strategy.reduce.reductions import ReduceOp
from daskdist.strategy.replica.context import ReplicaContext, meet
from daskdist.strategy.values.device_arrays import placed_nest
from daskdist.strategy.variables.aggregation import VariableAggregation

ADVICE: Final = (
    "aggregation is NONE, which requires equal values; give SUM, MEAN or ONLY_FIRST_REPLICA, or "
    "synchronization ON_READ if each replica is to have its own value"
)


# Types of immutable parts of objects.
_FOR_GOOD: Final = (*PLAIN, type(None), type, FunctionType, BuiltinFunctionType, np.generic)


def parts_of(value: Any) -> set[int]:
    """Return the identities of a mutable object, or of the mutable objects in a nest."""
    parts = (value, *optree.tree_leaves(value))
    return {id(part) for part in parts if not isinstance(part, _FOR_GOOD)}


def copied(value: Any, operation: str) -> Any:
    """Return a deep copy of an object for one replica.

    Raises
    ------
    ArgumentError
        The object cannot be copied.
    """
    try:
        return copy.deepcopy(value)
    # Objects may raise any error.
    except Exception as error:
        raise ArgumentError(
            f"{operation}: each replica needs a copy, and {type(value).__name__} cannot be copied: {error}; create it "
            "on each replica, and assign it there"
        ) from error


def aggregated(operation: str, aggregation: VariableAggregation, replica: ReplicaContext, value: Any) -> Any:
    """Aggregate the objects that all replicas assign; each replica calls this and gets its own result.

    Raises
    ------
    CollectiveError
        Aggregation is NONE, and replicas assign different values.
    ArgumentError
        The objects cannot be copied, compared or added.
    """
    if aggregation is VariableAggregation.NONE:
        box = _Box(value, _digest(value, operation))
        meet(replica, AgreedObjects(operation, ADVICE), box)
        return box.value
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        is_first = replica.replica_id_in_sync_group == 0
        # Copy now, as the first replica may change its object as soon as all replicas have arrived.
        contents = meet(replica, First(operation), [copied(value, operation)] if is_first else None)
        return value if is_first else placed_nest(copied(contents[0], operation), named(replica.devices[0]))
    try:
        nest = as_numpy(value, copied=False)
    except ArgumentError as error:
        raise ArgumentError(f"{operation}: aggregation {aggregation.name} is for nests of arrays: {error}") from None
    contents = replica.all_reduce(ReduceOp(aggregation.value), nest)
    for leaf, reduced_leaf in zip(optree.tree_leaves(nest), optree.tree_leaves(contents), strict=True):
        before, after = np.asarray(leaf).dtype, np.asarray(reduced_leaf).dtype
        if not np.can_cast(after, before, "same_kind"):
            raise ArgumentError(
                f"{operation}: aggregation {aggregation.name} of {before} results in {after}; give arrays of that dtype"
            )
    return like(value, contents)


@dataclass
class _Box:
    """An object that a replica assigns, and its digest."""

    value: Any
    digest: bytes


@dataclass(frozen=True)
class AgreedObjects(Agreed):
    """The check that all replicas contribute equal objects; an object that several share is copied for each."""

    def shapes(self, contribution: Any) -> Any:
        return None

    def partial(self, contributions: Mapping[int, Any]) -> Any:
        seen: set[int] = set()
        for box in contributions.values():
            # All replicas wait here, so the objects do not change.
            if seen & parts_of(box.value):
                box.value = copied(box.value, self.name)
            seen |= parts_of(box.value)
        return [(number, box.digest) for number, box in contributions.items()]


def _digest(value: Any, operation: str) -> bytes:
    kind = type(value)
    has_state = isinstance(value, HasState) and not isinstance(value, type)
    try:
        state = as_numpy(value.state_dict() if has_state else value, copied=False)
    except ArgumentError:
        state = value
    try:
        return _digest_of((kind.__module__, kind.__qualname__, state))
    # Objects may raise any error.
    except Exception as error:
        raise ArgumentError(
            f"{operation}: {kind.__name__} cannot be compared between replicas, as it cannot be pickled ({error}); "
            f"{ADVICE}"
        ) from error


def _digest_of(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return hashlib.sha256(file.getbuffer()).digest()


class _Pickler(pickle.Pickler):
    # Pickles equal objects equally: equal text may be one object or several, the order of sets depends on the process,
    # and arrays differ in memory layout.
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, str):
            return obj.encode("utf-8", "surrogatepass")
        if isinstance(obj, type) or (isinstance(obj, BuiltinFunctionType) and _is_of_a_module(obj)):
            return (obj.__module__, obj.__qualname__)
        if isinstance(obj, CodeType):
            return ("code", obj.co_code, obj.co_names, obj.co_consts)
        if type(obj) in (set, frozenset):
            return (type(obj).__name__, *sorted(map(_digest_of, obj)))
        if isinstance(obj, np.ndarray) or hasattr(type(obj), "__dlpack__"):
            return _of_array(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType):
            return NotImplemented
        name = (obj.__module__, obj.__qualname__)
        if _is_found(obj):
            return tuple, (name,)
        # Redefined functions may have the same name, so compare the contents. They are a state, which pickle saves
        # after it has noted the function, as a function may contain itself.
        held = [content_of(cell) for _, cell in cells_of(obj)]
        return tuple, (name,), (obj.__code__, obj.__defaults__, obj.__kwdefaults__, held)


def _is_of_a_module(function: BuiltinFunctionType) -> bool:
    return function.__self__ is None or isinstance(function.__self__, ModuleType)


def _is_found(function: FunctionType) -> bool:
    # True if the function can be looked up by its qualified name.
    target: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is function


def _of_array(array: Any) -> Any:
    try:
        host_array = as_numpy(array, copied=False)
    except ArgumentError:
        return None
    if host_array.dtype.kind == "T":
        return (host_array.shape, host_array.tolist())
    data = np.ascontiguousarray(host_array).reshape(-1)
    return (
        str(host_array.dtype),
        host_array.shape,
        hashlib.sha256(data.view(np.uint8).data if data.size else b"").digest(),
    )
