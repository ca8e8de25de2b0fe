"""``map(..., device=True)``: functions that replicas call with the elements on their devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import strict_device
from distributed import Client

import daskdist
from daskdist import Dataset, DeviceAssignment, MirroredStrategy, MultiWorkerMirroredStrategy, TensorSpec
from daskdist.devices import is_on_device, on_host
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.values.per_replica import PerReplica


def plus_one(x: Any) -> Any:
    return x + 1


def pair(x: Any) -> Any:
    return {"x": x, "twice": x * 2}


def where_it_is(x: Any) -> Any:
    return x, 1 if is_on_device(x) else 0


def fails_on_seven(x: Any) -> Any:
    if bool((on_host(x) == 7).any()):
        raise ValueError("a seven")
    return x


def _values(value: Any) -> list[Any]:
    return list(value.values) if isinstance(value, PerReplica) else [value]


def _lists(value: Any) -> list[Any]:
    return [np.asarray(on_host(item)).tolist() for item in _values(value)]


class TestOnItsOwn:
    """A pipeline that is not distributed."""

    def test_it_is_called_with_whole_elements_in_order(self) -> None:
        shapes: list[Any] = []

        def noted(x: Any) -> Any:
            shapes.append(x.shape)
            return x * 2

        ds = Dataset.range(5).batch(2).map(noted, device=True)
        assert ds.element_spec == TensorSpec((None,), np.int64)
        shapes.clear()
        assert [x.tolist() for x in ds] == [[0, 2], [4, 6], [8]]
        assert shapes == [(2,), (2,), (1,)]

    def test_rows_are_elements_too_and_never_given_together(self) -> None:
        shapes = []

        def noted(x: Any) -> Any:
            shapes.append(np.shape(x))
            return x + 1

        assert list(Dataset.range(3).map(noted, device=True)) == [1, 2, 3]
        assert set(shapes) == {()}

    def test_device_maps_prefetch_and_options_may_follow(self) -> None:
        ds = Dataset.range(4).batch(2).map(plus_one, device=True).prefetch(2).map(pair, device=True)
        ds = ds.with_options(daskdist.Options(num_threads=2))
        assert [element["twice"].tolist() for element in ds] == [[2, 4], [6, 8]]
        assert ds.cardinality() == 2

    @pytest.mark.parametrize(
        ("name", "then"),
        [
            ("batch", lambda ds: ds.batch(2)),
            ("map", lambda ds: ds.map(plus_one)),
            ("take", lambda ds: ds.prefetch(1).take(1)),
            ("shuffle", lambda ds: ds.shuffle(3)),
            ("zip", lambda ds: Dataset.zip((Dataset.range(2), ds))),
            ("cache", lambda ds: ds.cache()),
            ("filter", lambda ds: ds.filter(lambda x: x > 1)),
            ("ignore_errors", lambda ds: ds.ignore_errors()),
        ],
    )
    def test_nothing_else_may_follow(self, name: str, then: Any) -> None:
        ds = then(Dataset.range(4).map(plus_one, device=True))
        with pytest.raises(ArgumentError, match=rf"{name}: it comes after map\(plus_one .*, device=True\).*Put {name}"):
            next(iter(ds))
        with pytest.raises(ArgumentError, match=rf"{name}: it comes after map"):
            MirroredStrategy(["CPU:0"]).distribute_dataset(ds)

    @pytest.mark.parametrize(
        ("argument", "value"), [("vectorized", True), ("deterministic", False), ("num_parallel_calls", 2)]
    )
    def test_device_maps_refuse_options_of_calls(self, argument: str, value: Any) -> None:
        with pytest.raises(ArgumentError, match=f"map: {argument} is {value}, but device=True.*Leave {argument} out"):
            Dataset.range(3).map(plus_one, device=True, **{argument: value})

    def test_device_is_true_or_false(self) -> None:
        with pytest.raises(ArgumentError, match="map: device is 'GPU:0'; give True or False"):
            Dataset.range(3).map(plus_one, device="GPU:0")  # type: ignore[arg-type]

    def test_plans_mark_device_maps(self) -> None:
        plan = Dataset.range(4).batch(2).map(plus_one, device=True).explain("pipeline")
        assert "device=True)" in plan
        assert "# on the device of the element's replica" in plan

    def test_a_position_continues(self) -> None:
        ds = Dataset.range(20).shuffle(7, seed=1).batch(3).map(plus_one, device=True)
        elements = [x.tolist() for x in ds]
        first = iter(ds)
        next(first), next(first)
        state = first.state_dict()
        again = iter(ds)
        again.load_state_dict(state)
        assert [x.tolist() for x in again] == [x.tolist() for x in first]
        assert len(elements) == 7


@pytest.mark.usefixtures("strict")
class TestEmbedded:
    """Replicas in this process."""

    def test_each_replica_calls_it_on_its_device(self) -> None:
        strategy = MirroredStrategy(["STRICT:0", "STRICT:1"])
        ds = Dataset.range(8).batch(4).map(where_it_is, device=True)
        steps = list(strategy.distribute_dataset(ds))
        assert [_lists(x) for x, _ in steps] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert [_lists(there) for _, there in steps] == [[1, 1]] * 2
        assert all(is_on_device(value) for x, _ in steps for value in _values(x))

    def test_cpus_are_given_arrays_of_numpy(self) -> None:
        strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        ds = Dataset.range(6).batch(4).map(pair, device=True)
        distributed = strategy.distribute_dataset(ds)
        assert [_lists(step["twice"]) for step in distributed] == [[[0, 2], [4, 6]], [[8], [10]]]

    def test_one_replica_gets_plain_values(self) -> None:
        strategy = MirroredStrategy(["STRICT:0"])
        ds = Dataset.range(4).batch(2).map(plus_one, device=True).map(pair, device=True)
        distributed = strategy.distribute_dataset(ds)
        assert distributed.element_spec == {"x": TensorSpec((None,), np.int64), "twice": TensorSpec((None,), np.int64)}
        assert [on_host(step["twice"]).tolist() for step in distributed] == [[2, 4], [6, 8]]
        optional = iter(distributed).get_next_as_optional()
        assert on_host(optional.get_value()["x"]).tolist() == [1, 2]

    def test_a_replica_without_rows_gets_an_array_without_rows(self) -> None:
        strategy = MirroredStrategy(["STRICT:0", "STRICT:1"])
        ds = Dataset.range(3).batch(2, drop_remainder=False).map(where_it_is, device=True)
        last = list(strategy.distribute_dataset(ds))[-1]
        assert _lists(last[0]) == [[2], []]
        assert _lists(last[1]) == [1, 1]

    def test_specs_and_plans(self) -> None:
        strategy = MirroredStrategy(["STRICT:0", "STRICT:1"])
        ds = Dataset.range(8).batch(4, drop_remainder=True).map(lambda x: x.reshape(-1, 1) * 1.5, device=True)
        distributed = strategy.distribute_dataset(ds)
        assert distributed.element_spec.specs[0] == TensorSpec((2, 1), np.float64)
        assert "device=True)  # on the device of each replica" in distributed.explain()

    def test_a_function_that_needs_the_device_leaves_the_spec_unknown(self) -> None:
        import array_api_strict

        strategy = MirroredStrategy(["STRICT:0"])
        ds = Dataset.range(4).batch(2).map(lambda x: array_api_strict.sum(x), device=True)
        distributed = strategy.distribute_dataset(ds)
        assert [int(step) for step in distributed] == [1, 5]
        with pytest.raises(daskdist.core.spec.SpecUnknown, match="on a made-up element"):
            _ = distributed.element_spec

    def test_a_function_is_called_once_to_learn_its_spec(self) -> None:
        seen = []
        strategy = MirroredStrategy(["STRICT:0"])
        distributed = strategy.distribute_dataset(
            Dataset.range(4).batch(2).map(lambda x: seen.append(x) or x, device=True)
        )
        assert len(list(distributed)) == 2
        seen.clear()
        for _ in range(2):
            list(distributed)
        assert len(seen) == 4

    def test_an_error_names_the_replica_and_its_device(self) -> None:
        strategy = MirroredStrategy(["STRICT:0", "STRICT:1"])
        iterator = iter(strategy.distribute_dataset(Dataset.range(8).batch(4).map(fails_on_seven, device=True)))
        next(iterator)
        said = r"map: fails_on_seven .*raised ValueError: a seven, on the element of replica 1 \(STRICT:1\)"
        with pytest.raises(UserFunctionError, match=rf"{said}.*raised by replica 1, STRICT:1, in fails_on_seven"):
            next(iterator)

    @pytest.mark.parametrize("devices", [["CPU:0", "CPU:1"], ["STRICT:0", "STRICT:1"]], ids=str)
    def test_steps_after_one_that_failed_are_delivered(self, devices: list[str]) -> None:
        strategy = MirroredStrategy(devices)
        distributed = strategy.distribute_dataset(Dataset.range(12).batch(4).map(fails_on_seven, device=True))

        def taken(iterator: Any) -> list[Any]:
            steps: list[Any] = []
            for _ in range(3):
                try:
                    steps.append(_lists(next(iterator)))
                except UserFunctionError:
                    steps.append("failed")
            return [*steps, next(iterator, "over")]

        assert taken(iter(distributed)) == [[[0, 1], [2, 3]], "failed", [[8, 9], [10, 11]], "over"]
        of_replicas = _values(strategy.run(lambda iterator: str(taken(iterator)), args=(distributed,)))
        assert of_replicas == ["[[[0, 1]], [[4, 5]], [[8, 9]], 'over']", "[[[2, 3]], 'failed', [[10, 11]], 'over']"]

    def test_an_error_names_leaves_that_are_not_on_the_device(self) -> None:
        strategy = MirroredStrategy(["STRICT:1"])
        rows = {"x": np.arange(4.0), "half": np.ones(4, np.float16), "word": np.array(list("abcd"), object)}
        ds = Dataset.from_tensor_slices(rows).batch(2).map(lambda row: row["x"] * row["half"], device=True)
        left = r"replica 0 \(STRICT:1\), where \['half'\] \(float16\), \['word'\] \(StringDType\(\)\) stays on the host"
        with pytest.raises(UserFunctionError, match=left):
            next(iter(strategy.distribute_dataset(ds)))

    def test_datasets_of_a_function_each_have_their_own(self) -> None:
        strategy = MirroredStrategy(["STRICT:0", "STRICT:1"])

        def dataset_fn(context: Any) -> Dataset:
            own = 100 * (context.input_pipeline_id + 1)
            return Dataset.range(4).batch(2).map(lambda x: x + own, device=True)

        options = daskdist.InputOptions(replication_mode="PER_REPLICA")
        distributed = strategy.distribute_datasets_from_function(dataset_fn, options)
        assert [_lists(step) for step in distributed] == [[[100, 101], [200, 201]], [[102, 103], [202, 203]]]

    @pytest.mark.parametrize("devices", [["STRICT:0", "STRICT:1"], ["CPU:0", "CPU:1"]])
    def test_loops_call_device_maps(self, devices: list[str]) -> None:
        strategy = MirroredStrategy(devices)
        ds = strategy.distribute_dataset(Dataset.range(8).batch(4).map(where_it_is, device=True))

        def loop(iterator: Any) -> Any:
            return [(on_host(x).tolist(), int(there)) for x, there in iterator]

        actual = strategy.run(lambda iterator: str(loop(iterator)), args=(ds,))
        there = int(devices[0] != "CPU:0")
        assert _values(actual) == [str([([0, 1], there), ([4, 5], there)]), str([([2, 3], there), ([6, 7], there)])]

    def test_an_error_in_a_loop_names_the_replica(self) -> None:
        strategy = MirroredStrategy(["STRICT:0"])
        ds = strategy.distribute_dataset(Dataset.range(8).batch(4).map(fails_on_seven, device=True))
        with pytest.raises(UserFunctionError, match=r"on the element of replica 0 \(STRICT:0\)"):
            strategy.run(lambda iterator: len(list(iterator)), args=(ds,))


def _loop(iterator: Any) -> str:
    from daskdist.devices import is_on_device, on_host

    return str([(on_host(x).tolist(), int(there), is_on_device(x)) for x, there in iterator])


@pytest.mark.cluster
@pytest.mark.usefixtures("strict")
class TestOnCluster:
    """Replicas in worker processes."""

    @pytest.fixture
    def strategy(self, client: Client) -> Iterator[MultiWorkerMirroredStrategy]:
        client.run(strict_device.register)
        workers = list(workers_of(client))
        strategy = MultiWorkerMirroredStrategy(client, DeviceAssignment([(worker, "STRICT:0") for worker in workers]))
        yield strategy
        strategy.close()

    def test_steps(self, strategy: MultiWorkerMirroredStrategy) -> None:
        distributed = strategy.distribute_dataset(Dataset.range(8).batch(4).map(where_it_is, device=True))
        steps = list(distributed)
        assert [_lists(x) for x, _ in steps] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert [_lists(there) for _, there in steps] == [[1, 1]] * 2
        assert "# on the device of each replica" in distributed.explain()

    def test_loops(self, strategy: MultiWorkerMirroredStrategy) -> None:
        distributed = strategy.distribute_dataset(Dataset.range(8).batch(4).map(where_it_is, device=True))
        actual = [str(value) for value in _values(strategy.run(_loop, args=(distributed,)))]
        assert actual == ["[([0, 1], 1, True), ([4, 5], 1, True)]", "[([2, 3], 1, True), ([6, 7], 1, True)]"]

    def test_datasets_made_on_workers(self, strategy: MultiWorkerMirroredStrategy) -> None:
        def dataset_fn(context: Any) -> Dataset:
            own = 100 * (context.input_pipeline_id + 1)
            return Dataset.range(4).batch(2).map(lambda x: (x + own, x), device=True)

        distributed = strategy.distribute_datasets_from_function(dataset_fn)
        assert [_lists(value) for value, _ in distributed] == [[[100, 101], [200, 201]], [[102, 103], [202, 203]]]

    def test_an_error_names_the_replica(self, strategy: MultiWorkerMirroredStrategy) -> None:
        distributed = strategy.distribute_dataset(Dataset.range(8).batch(4).map(fails_on_seven, device=True))
        with pytest.raises(UserFunctionError, match=r"a seven, on the element of replica 1 \(STRICT:0\)"):
            [_lists(step) for step in distributed]
