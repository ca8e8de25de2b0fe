"""Objects that replicas keep as variables: a copy for each, made one by aggregation, as far as objects can be."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import optree

from daskdist.checkpoint.nests import PLAIN, as_numpy, like
from daskdist.devices import named
from daskdist.errors import ArgumentError
from daskdist.strategy.collectives.operations import Agreed, First
from daskdist.strategy.reduce.reductions import ReduceOp
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.values.device_arrays import host_nest, in_stream_of, moved_nest
from daskdist.strategy.variables.aggregation import VariableAggregation

ADVICE: Final = (
    "aggregation is NONE, which is for values that are the same; give SUM, MEAN or ONLY_FIRST_REPLICA, or "
    "synchronization ON_READ where each is to have its own"
)


# Parts of objects that nobody can change.
_FOR_GOOD: Final = (*PLAIN, type(None), type, FunctionType, BuiltinFunctionType, np.generic)


def parts_of(value: Any) -> set[int]:
    """Return the identities of an object that can be changed in place, and of the objects in a nest."""
    parts = (value, *optree.tree_leaves(value))
    return {id(each) for each in parts if not isinstance(each, _FOR_GOOD)}


def copied(value: Any, what: str) -> Any:
    """Return a deep copy of an object, for one replica alone.

    Raises
    ------
    ArgumentError
        It cannot be copied.
    """
    try:
        return copy.deepcopy(value)
    # An object may raise anything.
    except Exception as error:
        raise ArgumentError(
            f"{what}: each replica has its own, and {type(value).__name__} cannot be copied: {error}; make it on each "
            "replica, and assign it there"
        ) from error


def aggregated(what: str, aggregation: VariableAggregation, replica: ReplicaContext, value: Any) -> Any:
    """Aggregate the objects that all replicas assign; each replica calls this, and gets its own result.

    Raises
    ------
    CollectiveError
        Aggregation is NONE, and another replica assigns another value.
    ArgumentError
        Objects cannot be copied, compared or added up.
    """
    if aggregation is VariableAggregation.NONE:
        box = _Box(value, _digest(value, what))
        replica.meet(AgreedObjects(what, ADVICE), box)
        return box.value
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        is_first = replica.replica_id_in_sync_group == 0
        # Copied now: the first may change its own as soon as all have come.
        found = replica.meet(First(what), [copied(value, what)] if is_first else None)
        return value if is_first else _on_device_of(replica, copied(found[0], what))
    try:
        nest = as_numpy(value, copied=False)
    except ArgumentError as error:
        raise ArgumentError(f"{what}: aggregation {aggregation.name} is for nests of arrays: {error}") from None
    found = replica.all_reduce(ReduceOp(aggregation.value), nest)
    for given, made in zip(optree.tree_leaves(nest), optree.tree_leaves(found), strict=True):
        before, after = np.asarray(given).dtype, np.asarray(made).dtype
        if not np.can_cast(after, before, "same_kind"):
            raise ArgumentError(
                f"{what}: aggregation {aggregation.name} of {before} gives {after}; give arrays of that"
            )
    return like(value, found)


def _on_device_of(replica: ReplicaContext, value: Any) -> Any:
    device = named(replica.devices[0])
    if device.is_host:
        return host_nest(value)
    with in_stream_of(device):
        return moved_nest(value, device)


@dataclass
class _Box:
    """The object that a replica assigns, and its digest."""

    value: Any
    digest: bytes


@dataclass(frozen=True)
class AgreedObjects(Agreed):
    """The check that all replicas give the same object; one that several share is copied for each."""

    def shapes(self, given: Any) -> Any:
        return None

    def partial(self, given: Mapping[int, Any]) -> Any:
        seen: set[int] = set()
        for box in given.values():
            # All of them wait, so that nobody changes it.
            if seen & parts_of(box.value):
                box.value = copied(box.value, self.name)
            seen |= parts_of(box.value)
        return [(number, box.digest) for number, box in given.items()]


def _digest(value: Any, what: str) -> bytes:
    kind = type(value)
    has_state = hasattr(value, "state_dict") and not isinstance(value, type)
    try:
        state = as_numpy(value.state_dict() if has_state else value, copied=False)
    except ArgumentError:
        state = value
    try:
        return _digest_of((kind.__module__, kind.__qualname__, state))
    # An object may raise anything.
    except Exception as error:
        raise ArgumentError(
            f"{what}: whether {kind.__name__} is the same on all replicas cannot be told, as it does not pickle "
            f"({error}); {ADVICE}"
        ) from error


def _digest_of(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return hashlib.sha256(file.getbuffer()).digest()


class _Pickler(pickle.Pickler):
    # Gives the same for what is equal: equal text may be one object or several, sets have an order of their own in each
    # process, and arrays one in memory.
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # By identity, their numbers, and they themselves, so that no other comes to be at the address of one.
        self._functions: dict[int, tuple[int, FunctionType]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, str):
            return obj.encode("utf-8", "surrogatepass")
        if isinstance(obj, type) or (isinstance(obj, BuiltinFunctionType) and _is_of_a_module(obj)):
            return (obj.__module__, obj.__qualname__)
        if isinstance(obj, FunctionType):
            return self._of_function(obj)
        if isinstance(obj, CodeType):
            return ("code", obj.co_code, obj.co_names, obj.co_consts)
        if type(obj) in (set, frozenset):
            return (type(obj).__name__, *sorted(map(_digest_of, obj)))
        if isinstance(obj, np.ndarray) or hasattr(type(obj), "__dlpack__"):
            return _of_array(obj)
        return None

    def _of_function(self, function: FunctionType) -> Any:
        known = self._functions.get(id(function))
        if known is not None:
            # Which one it is has been told, and it may be in itself.
            return ("function", known[0])
        self._functions[id(function)] = len(self._functions), function
        name = (function.__module__, function.__qualname__)
        if _is_found(function):
            return name
        # Made anew, so that others go by the same name.
        held = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        return (*name, function.__code__, function.__defaults__, function.__kwdefaults__, held)


def _is_of_a_module(function: BuiltinFunctionType) -> bool:
    return function.__self__ is None or isinstance(function.__self__, ModuleType)


def _is_found(function: FunctionType) -> bool:
    # True if its qualified name leads to it.
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _of_array(array: Any) -> Any:
    try:
        here = as_numpy(array, copied=False)
    except ArgumentError:
        return None
    if here.dtype.kind == "T":
        return (here.shape, here.tolist())
    data = np.ascontiguousarray(here).reshape(-1)
    return (str(here.dtype), here.shape, hashlib.sha256(data.view(np.uint8).data if data.size else b"").digest())
