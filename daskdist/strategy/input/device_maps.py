"""Functions that replicas call with what a distributed dataset gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optree

from daskdist.core.dataset_base import node_of
from daskdist.core.functions.current_context import current_context
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure
from daskdist.dataset import Dataset
from daskdist.devices import Device, is_on_device, name_of, named
from daskdist.errors import DaskdistError
from daskdist.ops.map import spec_after
from daskdist.passes.device_maps import without_device_maps
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.values.device_arrays import put_on


@dataclass(frozen=True)
class DeviceMaps:
    """The functions at the end of a pipeline that its replicas call, the first one first.

    Parameters
    ----------
    functions
        They.
    lines
        What plans call them.
    """

    functions: tuple[UserFunction, ...] = ()
    lines: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.functions)

    def __call__(self, element: Any, replica_id: int, device: Device) -> Any:
        """Call the functions with a replica's element, on its device, in its thread and stream."""
        for function in self.functions:
            if not device.is_host:
                element = optree.tree_map(partial(put_on, device), element, none_is_leaf=True)

            def where(given: Any = element) -> str:
                return f"what replica {replica_id} ({name_of(device)}) is given{_but_for(given, device)}"

            element = _as_element(function, function(element, where), where)
        return element

    def spec_after(self, spec: ElementSpec) -> ElementSpec:
        """Return the spec of elements after the functions.

        Raises
        ------
        SpecUnknown
            It cannot be told without real ones.
        """
        for function in self.functions:
            spec = spec_after(function, spec)
        return spec


def _but_for(element: Any, device: Device) -> str:
    # For messages: what a function for arrays of a device is likely to fail on.
    if device.is_host:
        return ""
    leaves, structure = Structure.of(element)
    left = [
        f"{path or '(the element)'} ({leaf.dtype})"
        for path, leaf in zip(structure.paths, leaves, strict=True)
        if isinstance(leaf, Ragged) or (isinstance(leaf, (np.ndarray, np.generic)) and device.lacks(leaf.dtype))
    ]
    return f", where {', '.join(left)} stays on the host" if left else ""


def _as_element(function: UserFunction, result: Any, where: Callable[[], str]) -> Any:
    # By the rules for elements, but for what is on a device: that stays there.
    leaves, structure = Structure.of(tuple(result) if type(result) is list else result)
    return structure.pack([leaf if is_on_device(leaf) else function.flattened((leaf,), where)[0][0] for leaf in leaves])


class MapsOnReplicas:
    """The functions as one for `Strategy.run`, which each replica calls with what it is given.

    Parameters
    ----------
    by_replica
        Each replica's, in order.
    """

    def __init__(self, by_replica: Sequence[DeviceMaps]) -> None:
        self._by_replica = tuple(by_replica)
        self.__qualname__ = ", ".join(map(str, by_replica[0].functions))

    def __call__(self, element: Any) -> Any:
        context = current_context.get()
        if not isinstance(context, ReplicaContext):
            raise DaskdistError("what replicas call on their devices was called where there is none")
        number = context.replica_id_in_sync_group
        return self._by_replica[number](element, number, named(context.devices[0]))


class SuppliedDataset(Dataset):
    """A dataset as replicas are supplied from it: without the functions at its end that they call themselves.

    Parameters
    ----------
    dataset
        With them.

    Raises
    ------
    ArgumentError
        One is not at its end.
    """

    def __init__(self, dataset: Dataset) -> None:
        node, maps = without_device_maps(node_of(dataset))
        super().__init__(node)
        self.device_maps = DeviceMaps(tuple(each.function for each in maps), tuple(map(str, maps)))

    @property
    def code(self) -> tuple[str, ...]:
        """Tokens of its functions, which change where one is defined again."""
        self._follow_code()
        return self._code or ()
