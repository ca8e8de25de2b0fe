"""TensorFlow's names of the data service: servers in this process, registered datasets; and the status."""

from __future__ import annotations

import gc
import inspect
import logging
import time

import dask
import numpy as np
import pytest
from conftest import eventually, kept_port

import daskdist
import daskdist.data.experimental.service
from daskdist import errors
from daskdist.data import Dataset, service
from daskdist.data.experimental.service import (
    DispatcherConfig,
    DispatchServer,
    WorkerConfig,
    WorkerServer,
    distribute,
    from_dataset_id,
    register_dataset,
)

pytestmark = pytest.mark.cluster

HOST = "127.0.0.1"


def dispatcher(**config):
    """Return a dispatcher that only this machine reaches."""
    return DispatchServer(DispatcherConfig(host=HOST, **config))


def worker(server, **config):
    """Return a worker of a dispatcher."""
    return WorkerServer(WorkerConfig(server.target.split("://")[1], worker_address=f"{HOST}:%port%", **config))


@pytest.fixture(scope="module")
def server():
    """Return a dispatcher with two workers."""
    started = dispatcher()
    workers = [worker(started) for _ in range(2)]
    yield started
    for item in [*workers, started]:
        item.stop()


def numbers(elements):
    """Return elements as Python's own numbers."""
    return [int(element) for element in elements]


# --- names ---


def test_signatures_are_those_of_tensorflow():
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}

    required = inspect.Parameter.empty
    assert names(distribute) == {
        "processing_mode": required,
        "service": required,
        "job_name": None,
        "consumer_index": None,
        "num_consumers": None,
        "max_outstanding_requests": None,
        "data_transfer_protocol": None,
        "compression": "AUTO",
        "cross_trainer_cache": None,
        "target_workers": "AUTO",
    }
    assert list(names(from_dataset_id).items()) == [
        ("processing_mode", required),
        ("service", required),
        ("dataset_id", required),
        ("element_spec", None),
        ("job_name", None),
        ("consumer_index", None),
        ("num_consumers", None),
        ("max_outstanding_requests", None),
        ("data_transfer_protocol", None),
        ("cross_trainer_cache", None),
        ("target_workers", "AUTO"),
    ]
    # The function of `daskdist.data.service` has more parameters, but no data_transfer_protocol.
    plain = dict(list(names(service.distribute).items())[:9])
    assert plain == {name: value for name, value in names(distribute).items() if name != "data_transfer_protocol"}
    with pytest.raises(TypeError, match=r"distribute\(\): missing a required argument: 'service'"):
        distribute("one_epoch")
    with pytest.raises(TypeError, match=r"distribute\(\): got an unexpected keyword argument 'jobname'"):
        service.distribute("one_epoch", "localhost:1", jobname="job")
    assert list(names(register_dataset)) == ["service", "dataset", "compression", "dataset_id"]
    assert names(DispatchServer) == {"config": None, "start": True}
    assert names(WorkerServer) == {"config": required, "start": True}
    assert list(DispatcherConfig._fields)[:5] == [
        "port",
        "protocol",
        "work_dir",
        "fault_tolerant_mode",
        "worker_addresses",
    ]
    assert list(WorkerConfig._fields)[:4] == ["dispatcher_address", "worker_address", "port", "protocol"]
    assert daskdist.data.experimental.service.distribute is distribute


# --- servers ---


def test_programs_with_servers_of_their_own(server):
    dataset = Dataset.range(10).apply(distribute(processing_mode="parallel_epochs", service=server.target))
    assert sorted(a.item() for a in dataset.as_numpy_iterator()) == sorted(2 * list(range(10)))
    assert server.num_workers == 2
    assert server.target == f"tcp://{server.address}"
    # A service may be given as the server or its address, also with TensorFlow's protocol.
    for value in (server, f"grpc://{server.address}", ("grpc", server.address), server.address):
        assert sorted(numbers(Dataset.range(3).serve(value))) == [0, 1, 2]


# Tornado does not close a socket that it cannot bind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_servers_are_started_later_and_again(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    first = DispatchServer(DispatcherConfig(host=HOST), start=False)
    with pytest.raises(errors.ClusterError, match="was not started"):
        _ = first.target
    first.start()
    target = first.target
    first.start()
    assert first.target == target
    with pytest.raises(errors.ClusterError, match="cannot be started"):
        dispatcher(port=int(target.rpartition(":")[2]))
    assert "Traceback" not in caplog.text
    gc.collect()
    first.stop()
    first.stop()
    first.join()


def test_a_worker_without_a_dispatcher():
    with (
        dask.config.set({"daskdist.timeouts.connect": 0.5}),
        pytest.raises(errors.ClusterError, match="cannot be started"),
    ):
        WorkerServer(WorkerConfig("127.0.0.1:1", worker_address=HOST))


def test_invalid_configurations_are_refused():
    with pytest.raises(errors.ArgumentError, match="needs work_dir"):
        DispatchServer(DispatcherConfig(fault_tolerant_mode=True))
    with pytest.raises(errors.ArgumentError, match="protocol is 'http'"):
        DispatchServer(DispatcherConfig(protocol="http"))
    with pytest.raises(errors.ArgumentError, match="dispatcher_address is 5000"):
        WorkerServer(WorkerConfig(5000))
    with pytest.raises(errors.ArgumentError, match="data_transfer_protocol is 'carrier'"):
        distribute("one_epoch", "tcp://127.0.0.1:1", data_transfer_protocol="carrier")


def test_another_dispatcher_continues_with_the_jobs(tmp_path):
    port = kept_port()
    first = dispatcher(port=port, work_dir=str(tmp_path), fault_tolerant_mode=True)
    workers = [worker(first) for _ in range(2)]
    dataset = Dataset.range(4000).batch(10)
    one, other = (iter(dataset.apply(distribute("distributed_epoch", first.target, "job"))) for _ in range(2))
    register_dataset(first, dataset, dataset_id="kept")
    actual = [next(item) for _ in range(20) for item in (one, other)]
    first.stop()
    second = dispatcher(port=port, work_dir=str(tmp_path), fault_tolerant_mode=True)
    actual += list(one) + list(other)
    assert sorted(np.concatenate(actual).tolist()) == list(range(4000))
    assert not list(dataset.apply(distribute("distributed_epoch", second.target, "job")))
    assert len(list(from_dataset_id("distributed_epoch", second, "kept"))) == 400
    for value in [*workers, second]:
        value.stop()


def test_jobs_that_nobody_reads_are_removed():
    own = dispatcher(job_gc_timeout_ms=100)
    its_worker = worker(own)
    for _ in range(2):
        assert len(list(Dataset.range(5).serve(own, job_name="job"))) == 5
        eventually(lambda: not service.status(own).jobs)
    its_worker.stop()
    own.stop()


# --- registered datasets ---


def test_registered_datasets(server):
    dataset = Dataset.range(20).map(lambda x: {"x": x, "y": x / 2}).batch(4)
    name = register_dataset(server.target, dataset)
    assert register_dataset(server, dataset) == name
    read = from_dataset_id("distributed_epoch", server.target, name)
    assert read.element_spec == dataset.element_spec
    assert sorted(np.concatenate([value["x"] for value in read]).tolist()) == list(range(20))
    plain = service.from_dataset_id(service.ShardingPolicy.FILE_OR_DATA, server, name, job_name="shared")
    assert sum(len(item["x"]) for item in plain) == 20
    assert from_dataset_id("one_epoch", server, name, element_spec=dataset.element_spec).element_spec


def test_invalid_registrations_are_refused(server):
    name = service.register_dataset(server, Dataset.range(3), dataset_id="three")
    assert name == "three"
    with pytest.raises(errors.ArgumentError, match=r"fingerprint is \w+; that of this pipeline is \w+"):
        service.register_dataset(server, Dataset.range(4), dataset_id="three")
    with pytest.raises(errors.ArgumentError, match="no dataset is registered under the id 'four'"):
        service.from_dataset_id("one_epoch", server, "four")
    with pytest.raises(errors.ArgumentError, match="element_spec is"):
        service.from_dataset_id("one_epoch", server, name, daskdist.TensorSpec((2,), "int64"))
    with pytest.raises(errors.ArgumentError, match="without end"):
        service.from_dataset_id("one_epoch", server, name, job_name="j", consumer_index=0, num_consumers=2)
    with pytest.raises(errors.ShardingError, match="reads no files"):
        list(service.from_dataset_id(service.ShardingPolicy.FILE, server, name))
    with pytest.raises(errors.ArgumentError, match="dataset_id is 3"):
        service.register_dataset(server, Dataset.range(3), dataset_id=3)


# --- status ---


def test_status(server):
    dataset = Dataset.range(10_000).batch(10)
    iterator = iter(dataset.serve(server, job_name="looked at", max_outstanding_requests=8))
    for _ in range(300):
        next(iterator)

    def its_job():
        (job,) = [value for value in service.status(server).jobs if value.name == "looked at"]
        return job

    eventually(lambda: its_job().num_used >= 290)
    eventually(lambda: its_job().elements_per_s > 1)
    job = its_job()
    assert (job.state, job.mode, job.unit) == ("running", "DYNAMIC", "units")
    assert job.num_pending + job.num_leased + job.num_done == 1000
    assert job.num_leased > 0
    assert len(job.workers) == 2
    (consumer,) = job.consumers
    assert 1 <= consumer.num_waiting <= 8
    assert consumer.waiting_bytes >= 80
    status = service.status(server)
    assert "looked at #0" in repr(status)
    assert "DYNAMIC" in repr(status)
    assert status.to_dict()["jobs"]
    iterator.close()
    eventually(lambda: its_job().state == "idle")
    assert len(status.workers) == 2


def test_the_status_of_an_idle_service():
    own = dispatcher()
    assert repr(service.status(own)) == f"data service at {own.target}: 0 workers, 0 iterations of jobs"
    began_at = time.monotonic()
    own.stop()
    assert time.monotonic() - began_at < 25


def test_elements_that_nothing_produces_are_an_error():
    started = dispatcher()
    try:
        served = Dataset.range(3).apply(distribute("parallel_epochs", started.target))
        with (
            dask.config.set({"daskdist.timeouts.data": 0.3}),
            pytest.raises(errors.WaitTimeoutError, match=r"element from the data service.*daskdist\.timeouts\.data"),
        ):
            next(iter(served))
    finally:
        started.stop()
