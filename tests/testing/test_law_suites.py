"""The public law suites find violations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from daskdist import Dataset
from daskdist.core.dataset_base import node_of
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Compute
from daskdist.core.spec import ElementSpec
from daskdist.ops.filter import Filter
from daskdist.ops.map import Map
from daskdist.sharding import AutoShardPolicy, Decision
from daskdist.testing import DeviceLaws, Elements, NodeLaws, PolicyLaws, same_multiset


@dataclass(frozen=True, eq=False)
class Wrong(Transformation):
    """An operation with wrong facts: it keeps only the first element of each block."""

    name = "wrong"
    facts = Facts(compute=True, keeps_count=True, keeps_rows=True, keeps_spec=True, per_worker=True)

    def lower(self, inputs):
        return Compute(inputs[0], lambda rows: rows.take(np.array([0])), "wrong", factor=None)


class _OfWrong(NodeLaws):
    def nodes(self):
        return [Wrong(node_of(Dataset.range(6)))]


@pytest.mark.parametrize(
    "law",
    [
        "test_fact_compute",
        "test_fact_keeps_count",
        "test_fact_keeps_rows",
        "test_cardinality_is_the_number_of_elements",
        "test_elements_do_not_depend_on_the_blocks_of_the_input",
    ],
)
def test_a_wrong_node_breaks_laws(law):
    with pytest.raises(AssertionError, match="wrong"):
        getattr(_OfWrong(), law)()


class _OfUndecided(PolicyLaws):
    def decide(self, sharding_input):
        return Decision(AutoShardPolicy.FILE, "always")


def test_a_wrong_policy_breaks_laws():
    with pytest.raises(AssertionError, match="FILE gives"):
        _OfUndecided().test_file_is_chosen_only_if_each_worker_has_files()


class _Forgetful:
    kind, index = "CPU", 0

    def put(self, array):
        return np.asarray(array, np.float32)

    get = put


class _OfForgetful(DeviceLaws):
    def make_device(self):
        return _Forgetful()


def test_a_wrong_device_breaks_laws():
    with pytest.raises(AssertionError, match="came back"):
        _OfForgetful().test_get_returns_what_was_put()


def test_multisets():
    same_multiset([1, 2, 2], [2, 1, 2])
    with pytest.raises(AssertionError, match="missing"):
        same_multiset([1, 2], [1, 2, 2])


def test_declaring_a_scan_as_a_map_breaks_laws():
    # A running sum depends on the order of elements, so declaring it as a computation breaks a law.
    total = []

    def running(x):
        total.append(x)
        return np.sum(total)

    class _OfRunning(NodeLaws):
        def nodes(self):
            return [Map(node_of(Dataset.range(5)), UserFunction(running, "map"))]

    with pytest.raises(AssertionError):
        _OfRunning().test_fact_compute()


def test_elements_are_a_source_of_given_values():
    spec = ElementSpec.of(np.int64(0))
    node = Filter(Elements(spec, tuple(np.arange(5)), 2), UserFunction(lambda x: x > 2, "filter"))
    assert [int(x) for x in Dataset(node)] == [3, 4]
