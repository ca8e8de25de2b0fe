"""``daskdist.function``: steps that are sent to a cluster together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, overload

import numpy as np
import optree

from daskdist.core.cardinality import counted
from daskdist.core.spec import PerReplicaSpec, TensorSpec
from daskdist.core.structure import describe_nesting
from daskdist.devices import dtype_of, is_on_device
from daskdist.display.missing_arguments import advises
from daskdist.display.missing_methods import Advised
from daskdist.display.plain_text import PlainText
from daskdist.errors import ArgumentError
from daskdist.strategy.calls.captures import Capture, capturing
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.per_replica import PerReplica, num_values, values_read_later


@overload
def function(fn: Callable[..., Any]) -> Function: ...
@overload
def function(
    fn: None = None, *, input_signature: Sequence[Any] | None = None
) -> Callable[[Callable[..., Any]], Function]: ...
@advises("function")
def function(fn: Any = None, *, input_signature: Sequence[Any] | None = None) -> Any:
    """Wrap a function of one or many steps, which are sent to a cluster together.

    Parameters
    ----------
    fn
        The function. Its calls of ``run``, ``reduce`` and ``gather`` of a strategy are sent together: when it returns,
        when it reads a result, or when some dozens of them are pending.
    input_signature
        The spec of each positional argument, such as ``dist_dataset.element_spec``; not checked if None.

    Returns
    -------
    Function
        A callable with the same arguments. `Function.explain` describes its last call.

    Raises
    ------
    ArgumentError
        At a call: an argument does not match its spec.

    Notes
    -----
    The function itself is called each time, in this process: it may loop, branch, and call other such functions, which
    become part of it. The results of `run` and `reduce` are asynchronous in it, and arithmetic on them is sent too.
    When a value is read, for example by ``if loss < 1``, the calls so far are sent and waited for. The first call of a
    function by `run` is also waited for, to learn the structure of its result.

    With strategies in this process the function is called unchanged.

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


class Function(Advised):
    """A function wrapped by `function`."""

    def __init__(self, fn: Callable[..., Any], input_signature: Sequence[Any] | None = None) -> None:
        if not callable(fn):
            raise ArgumentError(f"function: {type(fn).__name__} is not a function")
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
        self._last = current
        return result

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __repr__(self) -> str:
        return f"<daskdist.function {self._name}>"

    def explain(self) -> PlainText:
        """Describe the calls that the last call sent, and every place where it waited.

        Returns
        -------
        str
            One line for the calls, and one for each wait.
        """
        last = self._last
        if last is None:
            return PlainText(f"{self._name}: not called yet")
        if not last.num_steps and not last.num_other_calls:
            return PlainText(f"{self._name}: nothing was sent to a cluster")
        line = f"{self._name}: {counted(last.num_steps, 'step')}"
        if last.num_other_calls:
            line += f" and {counted(last.num_other_calls, 'other call')}"
        waits = [f"  waited because {wait}" for wait in last.waits] or ["  waited nowhere"]
        return PlainText("\n".join([line, *waits]))


def _check(args: tuple[Any, ...], signature: tuple[Any, ...], name: str, current: Capture) -> None:
    if len(args) != len(signature):
        raise ArgumentError(
            f"{name}: called with {counted(len(args), 'positional argument')}; input_signature has {len(signature)}"
        )
    specs, treespec = optree.tree_flatten(signature, none_is_leaf=True)
    try:
        values = treespec.flatten_up_to(args)
    except ValueError as error:
        structure = optree.tree_structure(args, none_is_leaf=True)
        raise ArgumentError(
            f"{name}: the arguments are {describe_nesting(structure)}; input_signature has "
            f"{describe_nesting(treespec)}: {error}"
        ) from None
    for path, spec, value in zip(treespec.paths(), specs, values, strict=True):
        pairs = [(spec, value)]
        if isinstance(spec, PerReplicaSpec):
            if not isinstance(value, PerReplica) or num_values(value) != len(spec.specs):
                actual = f"{num_values(value)} values" if isinstance(value, PerReplica) else type(value).__name__
                raise ArgumentError(f"{name}: argument {path} is {actual}; input_signature has {spec}")
            pairs = list(zip(spec.specs, values_read_later(value), strict=True))
        for part_spec, part in pairs:
            if isinstance(part_spec, TensorSpec):
                _check_part(part_spec, part, f"{name}: argument {path}", current)


def _check_part(spec: TensorSpec, part: Any, part_name: str, current: Capture) -> None:
    if not isinstance(part, AsyncValue) or part.ref is None:
        check_spec(part.known if isinstance(part, AsyncValue) else part, spec, part_name)
    elif not _is_known(spec, part.spec, part_name):
        # Check the rest on the value's worker; the wait is at the end of the function.
        checked = AsyncValue(part.caller, part.caller.applied(check_spec, (part, spec, part_name), {}))
        current.wait_for(checked.result)


def _is_known(spec: TensorSpec, known: TensorSpec | None, value_name: str) -> bool:
    # Return whether the known properties of a value show that it matches a spec.
    if known is None:
        return False
    if not spec.is_compatible_with(known):
        raise ArgumentError(f"{value_name} is {known}; input_signature has {spec}")
    return spec.shape is None or all(
        length is None or known_length is not None for length, known_length in zip(spec.shape, known.shape, strict=True)
    )


def check_spec(value: Any, spec: TensorSpec, value_name: str) -> None:
    """Check that a value matches a spec."""
    if is_on_device(value):
        value = TensorSpec(tuple(value.shape), dtype_of(value))
    if not spec.is_compatible_with(value):
        actual = value if isinstance(value, TensorSpec) else TensorSpec.of(np.asarray(value))
        raise ArgumentError(
            f"{value_name} has shape {actual.shape} and dtype {actual.dtype}; input_signature has {spec}"
        )
