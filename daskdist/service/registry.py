"""Datasets that are registered with the service and read by their ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import cloudpickle

from daskdist.core.node import Node
from daskdist.core.randomness.pass_numbers import PassCounter, PassNumber
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError
from daskdist.passes.fingerprint import fingerprint
from daskdist.service.address import ServiceAddress
from daskdist.service.consumer.dispatcher_connection import ask
from daskdist.service.dispatcher.commands import Hello, Register, Registered, Welcome
from daskdist.service.request import ServiceRequest, checked_compression
from daskdist.service.service_dataset import DatasetFacts, Served, check_endless, entry_of, shared_out

# The counters of the passes over datasets of which only the ids are known, by the address of the service and the id.
_COUNTERS: Final[dict[tuple[str, str], PassCounter]] = {}


def register(
    node: Node, spec: ElementSpec, address: ServiceAddress, compression: str | None, dataset_id: str | None
) -> str:
    """Register a dataset and return its id, which is its fingerprint if none is given.

    Raises
    ------
    ArgumentError
        Another dataset has the id, or the dataset cannot be sent to workers.
    ClusterError
        The service cannot be reached.
    """
    dataset_fingerprint = fingerprint(node)
    name = dataset_fingerprint if dataset_id is None else dataset_id
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"register_dataset: dataset_id is {dataset_id!r}; give a string that is not empty, or None")
    entry = entry_of(name, dataset_fingerprint, node, spec, checked_compression(compression))
    answer: Registered = ask(address, Register(entry))
    return answer.dataset


def registered(dataset_id: str, element_spec: Any, request: ServiceRequest, address: ServiceAddress) -> Node:
    """Return the node of a dataset that is registered.

    Raises
    ------
    ArgumentError
        No dataset has this id, it has another spec, or it does not allow the options.
    ClusterError
        The service cannot be reached.
    """
    known: Welcome = ask(address, Hello(dataset_id))
    if known.facts is None:
        raise ArgumentError(
            f"no dataset is registered under the id {dataset_id!r}; give the id that register_dataset returned"
        )
    facts: DatasetFacts = cloudpickle.loads(known.facts)
    if element_spec is not None:
        leaves, structure = Structure.of(element_spec)
        if facts.spec.most_general_common_spec(ElementSpec(structure, leaves)) is None:
            raise ArgumentError(
                f"element_spec is {element_spec}, but that of the dataset {dataset_id!r} is {facts.spec.packed}"
            )
    check_endless(request, facts.cardinality)
    counter = _COUNTERS.setdefault((address.address, dataset_id), PassCounter())
    node = Served(
        replace(request, compression=facts.compression),
        address,
        dataset_id,
        facts.fingerprint,
        facts.spec,
        facts.cardinality,
        file_objection=facts.file_objection,
        passes=PassNumber(counter),
    )
    return shared_out(node)
