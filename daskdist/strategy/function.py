"""``daskdist.function``: steps that are sent to a cluster together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, overload

import numpy as np
import optree

from daskdist.core.spec import PerReplicaSpec, TensorSpec
from daskdist.core.structure import describe_nesting
from daskdist.devices import dtype_of, is_on_device
from daskdist.errors import ArgumentError
from daskdist.strategy.steps.captures import Capture, capturing
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.extract import Extract
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.wiring import Wiring, filled


@overload
def function(fn: Callable[..., Any]) -> Function: ...
@overload
def function(
    fn: None = None, *, input_signature: Sequence[Any] | None = None
) -> Callable[[Callable[..., Any]], Function]: ...
def function(fn: Any = None, *, input_signature: Sequence[Any] | None = None) -> Any:
    """Make a function of one or many steps, which go to a cluster together.

    Parameters
    ----------
    fn
        The function. Its calls of ``run``, ``reduce`` and ``gather`` of a strategy are sent together, when it is over,
        when it looks at a result, or when some dozens of them wait.
    input_signature
        For each positional argument its spec, such as ``dist_dataset.element_spec``; not checked if None.

    Returns
    -------
    Function
        Called as the function is. `Function.explain` tells what its last call sent.

    Raises
    ------
    ArgumentError
        When called: an argument is not of its spec.

    Notes
    -----
    The function itself is called each time, here: it may loop, branch, and call other such functions, which become part
    of it. What `run` and `reduce` give in it is asynchronous, and arithmetic on that is sent along. Where a value is
    looked at, by ``if loss < 1`` say, the calls so far are sent and waited for. A function that `run` calls for the
    first time is waited for too, to learn what it returns.

    Embedded strategies have nobody to send anything to: there it is called as it is.

    >>> import daskdist
    >>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> @daskdist.function
    ... def total(steps):
    ...     return sum(strategy.reduce("SUM", strategy.run(len, args=(step,)), axis=None) for step in steps)
    >>> int(total(strategy.distribute_dataset(daskdist.Dataset.range(10).batch(4))))
    10
    """
    if fn is None:
        return lambda fn: Function(fn, input_signature)
    return Function(fn, input_signature)


class Function:
    """What `function` makes of a function."""

    def __init__(self, fn: Callable[..., Any], input_signature: Sequence[Any] | None = None) -> None:
        if not callable(fn):
            raise ArgumentError(f"function: {type(fn).__name__} is no function")
        functools.update_wrapper(self, fn)
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self._fn = fn
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._last: Capture | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with capturing() as current:
            if self.input_signature is not None:
                _check(args, self.input_signature, self._name, current)
            result = self._fn(*args, **kwargs)
            # Also what is done to values is done there.
            settle(result)
        self._last = current
        return result

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def explain(self) -> str:
        """Return what the last call sent, and every place where it waited.

        Returns
        -------
        str
            A line for the calls, and one for each wait.
        """
        last = self._last
        if last is None:
            return f"{self._name}: not called yet"
        if not last.num_steps and not last.num_other_calls:
            return f"{self._name}: nothing was sent to a cluster"
        line = f"{self._name}: {_counted(last.num_steps, 'step')}"
        if last.num_other_calls:
            line += f" and {_counted(last.num_other_calls, 'other call')}"
        waits = [f"  waited because {each}" for each in last.waits] or ["  waited nowhere"]
        return "\n".join([line, *waits])


def settle(nest: Any) -> None:
    """Have what was done to the asynchronous values in a nest sent along."""
    for leaf in optree.tree_leaves(nest):
        if isinstance(leaf, AsyncValue):
            leaf.settle()
        elif isinstance(leaf, PerReplica) and leaf.spread is None:
            settle(leaf.values)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _check(args: tuple[Any, ...], signature: tuple[Any, ...], name: str, current: Capture) -> None:
    if len(args) != len(signature):
        raise ArgumentError(
            f"{name}: called with {_counted(len(args), 'positional argument')}; input_signature has {len(signature)}"
        )
    specs, treespec = optree.tree_flatten(signature, none_is_leaf=True)
    try:
        values = treespec.flatten_up_to(args)
    except ValueError as error:
        given = optree.tree_structure(args, none_is_leaf=True)
        raise ArgumentError(
            f"{name}: the arguments are {describe_nesting(given)}; input_signature has {describe_nesting(treespec)}: "
            f"{error}"
        ) from None
    for path, spec, value in zip(treespec.paths(), specs, values, strict=True):
        pairs = [(spec, value)]
        if isinstance(spec, PerReplicaSpec):
            if not isinstance(value, PerReplica) or value.number() != len(spec.specs):
                given = f"{value.number()} values" if isinstance(value, PerReplica) else type(value).__name__
                raise ArgumentError(f"{name}: argument {path} is {given}; input_signature has {spec}")
            spread = value.spread
            known = None if spread is None else spread.spec
            if all(_is_known(each, known, f"{name}: argument {path}") for each in spec.specs):
                continue
            pairs = list(zip(spec.specs, value.values, strict=True))
        for each, part in pairs:
            if isinstance(each, TensorSpec):
                _check_part(each, part, f"{name}: argument {path}", current)


def _check_part(spec: TensorSpec, part: Any, what: str, current: Capture) -> None:
    if not isinstance(part, AsyncValue) or part.is_here:
        check_spec([], [], part, spec, what)
        return
    if _is_known(spec, part.spec, what):
        return
    # The rest is seen where the value is, which is waited for when the function is over.
    wiring = Wiring()
    wired = wiring.wire_leaf(part)
    if wiring.caller is not None:
        seen = wiring.caller.call(
            check_spec, wiring.handles, wiring.picks, wired, spec, what, worker=wiring.worker, name="check"
        )
        caller = wiring.caller
        current.wait_for(lambda: caller.result(seen))


def _is_known(spec: Any, known: TensorSpec | None, what: str) -> bool:
    # Whether what is known of a value tells that it is of a spec.
    if known is None or not isinstance(spec, TensorSpec):
        return not isinstance(spec, TensorSpec)
    if not spec.is_compatible_with(known):
        raise ArgumentError(f"{what} is {known}; input_signature has {spec}")
    return all(length is None or there is not None for length, there in zip(spec.shape, known.shape, strict=True))


def check_spec(
    results: Sequence[Any], picks: Sequence[tuple[int, Extract]], nest: Any, spec: TensorSpec, what: str
) -> None:
    """See that a wired value is of a spec."""
    value = filled(results, picks, nest)
    if is_on_device(value):
        value = TensorSpec(tuple(value.shape), dtype_of(value))
    if not spec.is_compatible_with(value):
        given = value if isinstance(value, TensorSpec) else TensorSpec.of(np.asarray(value))
        raise ArgumentError(f"{what} has shape {given.shape} and dtype {given.dtype}; input_signature has {spec}")
