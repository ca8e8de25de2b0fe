"""Functions that replicas call on their devices with the elements of a distributed dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optree

from daskdist.core.dataset_base import node_of
from daskdist.core.functions.current_context import current_context
from daskdist.core.functions.kept_values import keep_as_they_are, owners_of
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
    """The functions at the end of a pipeline that its replicas call on their devices."""

    functions: tuple[UserFunction, ...] = ()
    lines: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.functions)

    def __call__(self, element: Any, replica_id: int, device: Device) -> Any:
        """Call the functions with a replica's element, in the replica's thread, on its device."""
        for function in self.functions:
            if not device.is_host:
                element = optree.tree_map(partial(put_on, device), element, none_is_leaf=True)

            def where(argument: Any = element) -> str:
                return f"the element of replica {replica_id} ({name_of(device)}){_but_for(argument, device)}"

            # Other devices depend on the thread of the replica, which nothing can end.
            result = (function if device.is_host else function.in_this_thread)(element, where)
            element = _as_element(function, result, where, partial(_owners_in, element))
        return element

    def spec_after(self, spec: ElementSpec) -> ElementSpec:
        """Return the spec of elements after the functions.

        Raises
        ------
        SpecUnknown
            The functions need real elements.
        """
        for function in self.functions:
            spec = spec_after(function, spec)
        return spec


def _but_for(element: Any, device: Device) -> str:
    # For error messages: the leaves that are not device arrays, as a function for device arrays is likely to fail with
    # them.
    if device.is_host:
        return ""
    leaves, structure = Structure.of(element)
    left = [
        f"{path or '(the element)'} ({leaf.dtype})"
        for path, leaf in zip(structure.paths, leaves, strict=True)
        if isinstance(leaf, Ragged) or (isinstance(leaf, (np.ndarray, np.generic)) and device.lacks(leaf.dtype))
    ]
    return f", where {', '.join(left)} stays on the host" if left else ""


def _as_element(
    function: UserFunction, result: Any, where: Callable[[], str], argument_owners: Callable[[], frozenset[int]]
) -> Any:
    # Apply the rules for elements; arrays that are on a device stay there.
    returned, structure = Structure.of(tuple(result) if type(result) is list else result)
    leaves = [leaf if is_on_device(leaf) else function.flattened((leaf,), where)[0][0] for leaf in returned]
    del result, returned
    keep_as_they_are(leaves, 0, argument_owners)
    return structure.pack(leaves)


def _owners_in(element: Any) -> frozenset[int]:
    return owners_of(Structure.of(element)[0])


class MapsOnReplicas:
    """All device functions as one function for `Strategy.run`."""

    def __init__(self, by_replica: Sequence[DeviceMaps]) -> None:
        self._by_replica = tuple(by_replica)
        self.__qualname__ = ", ".join(map(str, by_replica[0].functions))

    def __call__(self, element: Any) -> Any:
        context = current_context.get()
        if not isinstance(context, ReplicaContext):
            raise DaskdistError("a function for replicas' devices was called outside of a replica")
        number = context.replica_id_in_sync_group
        return self._by_replica[number](element, number, named(context.devices[0]))


class SuppliedDataset(Dataset):
    """A dataset without those functions at its end that replicas call on their devices, which are in `device_maps`.

    Raises
    ------
    ArgumentError
        Another operation follows such a function.
    """

    def __init__(self, dataset: Dataset) -> None:
        node, maps = without_device_maps(node_of(dataset))
        super().__init__(node)
        self.device_maps = DeviceMaps(tuple(node.function for node in maps), tuple(map(str, maps)))

    @property
    def code(self) -> tuple[str, ...]:
        """Hashes of the code of its functions: they change when a function is redefined."""
        self._follow_code()
        return self._code or ()
