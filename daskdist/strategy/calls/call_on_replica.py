"""Calls of a user's function in a replica's context, on its device and in its stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import optree

from daskdist.core.functions.current_context import current_context
from daskdist.devices import are_loaded, named
from daskdist.devices.profiling import profiled
from daskdist.strategy.group import Replica
from daskdist.strategy.replica.context import ReplicaContext, finish_checkpoints
from daskdist.strategy.values.device_arrays import host_nest, in_stream_of, put_on
from daskdist.strategy.values.error_context import add_context
from daskdist.strategy.values.flat import LEAVES
from daskdist.strategy.variables.record import VariableRecord


def _without_variables(result: Any) -> Any:
    # Return the value of a variable on this replica, since it may differ elsewhere.
    if isinstance(result, VariableRecord):
        return result.read_value()
    if not any(isinstance(leaf, VariableRecord) for leaf in optree.tree_leaves(result)):
        return result
    return optree.tree_map(
        lambda leaf: leaf.read_value() if isinstance(leaf, VariableRecord) else leaf, result, none_is_leaf=True
    )


def call_on_replica(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], replica: Replica, context: ReplicaContext
) -> Any:
    """Call a user's function on a replica, in the replica's process."""
    before = current_context.get()
    device = named(replica.device)
    try:
        # An interrupt after this could lose a token of the variable.
        current_context.set(context)
        if device.is_host:
            if are_loaded():
                args, kwargs = host_nest((tuple(args), kwargs))
            result = fn(*args, **kwargs)
            if type(result) not in LEAVES:
                result = _without_variables(result)
        else:
            # Several devices of a process do not share a default stream.
            name = getattr(fn, "__qualname__", type(fn).__name__)
            with in_stream_of(device), profiled(f"step: {name}"):
                args, kwargs = optree.tree_map(partial(put_on, device), (tuple(args), kwargs), none_is_leaf=True)
                result = _without_variables(fn(*args, **kwargs))
        finish_checkpoints(context, is_failed=False)
        return result
    except BaseException as error:
        where = f" on {replica.worker}" if replica.worker else ""
        add_context(
            error,
            f"raised by replica {context.replica_id_in_sync_group}, {replica.device}{where}, in "
            f"{getattr(fn, '__qualname__', fn)}",
        )
        finish_checkpoints(context, is_failed=True)
        raise
    finally:
        current_context.set(before)
