"""Large reductions between workers from device to device, with a stand-in for the library that does so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
import strict_device
from distributed import Client, LocalCluster, Security, get_worker
from strict_device import StrictDevice

import daskdist
from daskdist import DeviceAssignment, MultiWorkerMirroredStrategy, get_replica_context
from daskdist.devices import device_of, on_host
from daskdist.errors import ArgumentError, CollectiveError
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.collectives import transport
from daskdist.strategy.collectives.mailbox import mailbox_of

pytestmark = pytest.mark.cluster

# Reductions of this many elements use connections between devices.
SIZE = 2**17


class Meeting:
    """The ranks of one connection, which are threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.arrays: dict[int, Any] = {}


class StrictLinks:
    """A library that connects devices. Like NCCL, it adds in another order, and waits for ever for a missing rank."""

    def __init__(self) -> None:
        self.meetings: dict[bytes, Meeting] = {}
        self.lock = threading.Lock()
        self.num_reduced = 0
        self.refuses: set[int] = set()
        self.is_stuck = False

    def suits(self, how: str, dtype: Any) -> bool:
        return str(dtype) in ("float32", "float64", "int64") and (how == "SUM" or dtype.kind != "f")

    def new_id(self) -> bytes:
        return f"id {len(self.meetings)}".encode()

    def connect(self, index: int, new_id: bytes, num_ranks: int, rank: int) -> StrictConnection:
        if rank in self.refuses:
            raise RuntimeError("unhandled system error")
        with self.lock:
            meeting = self.meetings.setdefault(new_id, Meeting(num_ranks))
        meeting.barrier.wait(10 if not self.refuses else 0.1)
        return StrictConnection(self, meeting, index, rank)


class StrictConnection:
    def __init__(self, links: StrictLinks, meeting: Meeting, index: int, rank: int) -> None:
        self.links, self.meeting, self.index, self.rank = links, meeting, index, rank

    def all_reduce(self, how: str, array: Any) -> Any:
        device = StrictDevice(self.index)
        assert device_of(array) == device
        if self.links.is_stuck:
            may_end = threading.Event()
            self.abort = may_end.set  # type: ignore[method-assign]
            device.current_stream().give(lambda: may_end.wait(20))
            return array
        self.meeting.arrays[self.rank] = device.get(array)
        self.meeting.barrier.wait(10)
        functions = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
        total = functions[how].reduce([self.meeting.arrays[rank] for rank in sorted(self.meeting.arrays, reverse=True)])
        self.meeting.barrier.wait(10)
        with self.links.lock:
            self.links.num_reduced += 1
        return device.put(total)

    def abort(self) -> None:
        self.meeting.barrier.abort()


@pytest.fixture(scope="module")
def local_client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictLinks]:
    strict_device.register(3)
    links = StrictLinks()
    monkeypatch.setattr(strict_device, "LINKS", links)
    with dask.config.set({"daskdist.nccl": True, "daskdist.timeouts.collective": 20}):
        yield links
    strict_device.unregister()


@pytest.fixture
def strategy(local_client: Client, links: StrictLinks) -> Iterator[MultiWorkerMirroredStrategy]:
    names = list(workers_of(local_client))
    devices = [("STRICT:0", "STRICT:2"), ("STRICT:1",)]
    assignment = [(worker, name) for worker, some in zip(names, devices, strict=True) for name in some]
    with MultiWorkerMirroredStrategy(local_client, DeviceAssignment(assignment)) as strategy:
        yield strategy


def number_here() -> int:
    return int(get_replica_context().replica_id_in_sync_group)


def values(number: int, dtype: str = "f4") -> Any:
    return np.random.default_rng(number).integers(0, 100, SIZE).astype(dtype)


def reduced(strategy: Any, op: str, dtype: str, put: Any = None) -> list[Any]:
    """Return what each replica gets of a reduction of arrays on devices."""

    def step() -> Any:
        context = get_replica_context()
        array = values(number_here(), dtype)
        if put is None or put(number_here()):
            array = daskdist.devices.named(context.devices[0]).put(array)
        actual = context.all_reduce(op, array)
        assert (device_of(actual) is None) == (device_of(array) is None)
        return on_host(actual)

    return list(strategy.local_results(strategy.run(step)))


NUMPY = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "PROD": np.prod}


@pytest.mark.parametrize(
    ("op", "dtype", "is_linked"),
    [("SUM", "f4", 1), ("MEAN", "f8", 1), ("MAX", "i8", 1), ("PROD", "i8", 1), ("MAX", "f4", 0), ("SUM", "c8", 0)],
)
def test_results_are_those_of_the_tree(op: str, dtype: str, is_linked: int, strategy: Any, links: StrictLinks) -> None:
    expected = NUMPY[op]([values(number, dtype) for number in range(3)], axis=0)
    for times in (1, 2):
        actual = reduced(strategy, op, dtype)
        # Sums of small whole numbers are the same in any order.
        for one in actual:
            np.testing.assert_array_equal(one, expected)
            assert one.dtype == expected.dtype
        # One connection serves all calls.
        assert links.num_reduced == 2 * times * is_linked
    assert len(links.meetings) == is_linked


def test_arrays_on_the_host_go_through_the_hosts(strategy: Any, links: StrictLinks) -> None:
    for put in (lambda number: number != 1, lambda number: False):
        for one in reduced(strategy, "SUM", "f4", put):
            np.testing.assert_array_equal(one, np.sum([values(number) for number in range(3)], axis=0))
    assert not links.meetings


def test_nccl_can_be_turned_off(strategy: Any, links: StrictLinks) -> None:
    with dask.config.set({"daskdist.nccl": False}):
        assert len(reduced(strategy, "SUM", "f4")) == 3
    assert not links.meetings


@pytest.mark.parametrize("refuses", [{0}, {1}, {0, 1}])
def test_workers_that_are_not_connected_go_through_the_hosts(
    refuses: set[int], strategy: Any, links: StrictLinks, caplog: pytest.LogCaptureFixture
) -> None:
    links.refuses = refuses
    for _ in range(2):
        for one in reduced(strategy, "SUM", "f4"):
            np.testing.assert_array_equal(one, np.sum([values(number) for number in range(3)], axis=0))
    assert not links.num_reduced
    # Each of the two workers tries to connect once, and logs it.
    assert caplog.text.count("devices of workers are not connected directly") == 2
    assert "unhandled system error" in caplog.text


def test_one_device_of_two_workers_is_not_connected_to_itself(
    strategy: Any, links: StrictLinks, monkeypatch: Any
) -> None:
    monkeypatch.setattr(StrictDevice, "uuid", "STRICT-same")
    assert len(reduced(strategy, "SUM", "f4")) == 3
    assert not links.meetings


def test_a_device_that_does_not_take_part_is_an_error_within_the_limit(strategy: Any, links: StrictLinks) -> None:
    links.is_stuck = True
    with (
        dask.config.set({"daskdist.timeouts.collective": 0.5}),
        pytest.raises(CollectiveError, match=r"devices of other workers did not take part within 0.5 s"),
    ):
        reduced(strategy, "SUM", "f4")
    links.is_stuck = False
    # Later reductions go through the hosts.
    for one in reduced(strategy, "SUM", "f4"):
        np.testing.assert_array_equal(one, np.sum([values(number) for number in range(3)], axis=0))
    assert not links.num_reduced


@pytest.mark.parametrize(("setting", "is_linked"), [(True, False), ("insecure", True)])
def test_links_beside_encrypted_connections_have_to_be_allowed(
    setting: Any, is_linked: bool, links: StrictLinks
) -> None:
    security = Security.temporary()
    with (
        dask.config.set({"daskdist.nccl": setting, "distributed.comm.tls": {}}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            processes=False,
            protocol="tls",
            security=security,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster, security=security) as client,
    ):
        names = list(workers_of(client))
        assert all(name.startswith("tls://") for name in names)
        assignment = DeviceAssignment([(worker, f"STRICT:{number}") for number, worker in enumerate(names)])
        with MultiWorkerMirroredStrategy(client, assignment) as strategy:
            if is_linked:
                assert len(reduced(strategy, "SUM", "f4")) == 2
            else:
                message = r"all_reduce\(SUM\): .*NCCL are neither encrypted nor authenticated.*'insecure'"
                with pytest.raises(ArgumentError, match=message):
                    reduced(strategy, "SUM", "f4")
            assert links.num_reduced == 2 * is_linked
            assert bool(links.meetings) == is_linked


def test_workers_without_the_setting_are_told(strategy: Any, links: StrictLinks, monkeypatch: Any) -> None:
    settings = iter([True, False])
    lock = threading.Lock()

    def setting(name: str) -> Any:
        with lock:
            return next(settings)

    monkeypatch.setattr(transport, "setting", setting)
    with pytest.raises(CollectiveError, match=r"all_reduce\(SUM\) with daskdist.nccl"):
        reduced(strategy, "SUM", "f4")


def test_a_worker_that_decided_for_the_hosts_does_not_disturb_one_that_has_not(links: StrictLinks) -> None:
    with (
        Client(
            processes=False,
            n_workers=3,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            set_as_default=False,
        ) as client,
        MultiWorkerMirroredStrategy(client) as strategy,
    ):
        _, second, third = strategy.workers

        def step() -> float:
            if get_worker().address == third:
                own = mailbox_of(get_worker()).links
                send = own.send

                def send_late(address: str, message: Any, *over: Any) -> None:
                    if address == second and getattr(message, "part", None) == "offer":
                        threading.Timer(0.5, send, (address, message, *over)).start()
                    else:
                        send(address, message, *over)

                own.send = send_late  # type: ignore[method-assign]
            return float(get_replica_context().all_reduce("SUM", np.ones(100_000))[0])

        assert strategy.local_results(strategy.run(step)) == (3, 3, 3)
