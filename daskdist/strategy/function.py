"""``daskdist.function``: a step as one unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import optree

from daskdist.core.spec import PerReplicaSpec, TensorSpec
from daskdist.errors import ArgumentError
from daskdist.strategy.values import PerReplica

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def function(fn: _F) -> _F: ...
@overload
def function(fn: None = None, *, input_signature: Sequence[Any] | None = None) -> Callable[[_F], _F]: ...
def function(fn: Any = None, *, input_signature: Sequence[Any] | None = None) -> Any:
    """Mark a function as a step, and check what it is called with.

    Parameters
    ----------
    fn
        The function.
    input_signature
        For each argument its spec, such as ``dist_dataset.element_spec``; not checked if None.

    Raises
    ------
    ArgumentError
        When called: an argument is not of its spec.

    Notes
    -----
    The function is called as it is, each time: nothing is traced or put off.
    """
    if fn is None:
        return lambda fn: function(fn, input_signature=input_signature)

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if input_signature is not None:
            _check(args, tuple(input_signature), fn.__qualname__)
        return fn(*args, **kwargs)

    return checked


def _check(args: tuple[Any, ...], signature: tuple[Any, ...], name: str) -> None:
    specs, treespec = optree.tree_flatten(signature, none_is_leaf=True)
    try:
        values = treespec.flatten_up_to(args)
    except ValueError as error:
        raise ArgumentError(f"{name}: the arguments are not of the structure of input_signature: {error}") from None
    for path, spec, value in zip(treespec.paths(), specs, values, strict=True):
        pairs = [(spec, value)]
        if isinstance(spec, PerReplicaSpec):
            if not isinstance(value, PerReplica) or len(value.values) != len(spec.specs):
                raise ArgumentError(f"{name}: argument {path} is {type(value).__name__}; input_signature has {spec}")
            pairs = list(zip(spec.specs, value.values, strict=True))
        for each, part in pairs:
            if isinstance(each, TensorSpec) and not each.is_compatible_with(part):
                raise ArgumentError(
                    f"{name}: argument {path} has shape {part.shape} and dtype {part.dtype}; input_signature has {each}"
                )
