"""TensorFlow's page on the transformation ``distribute``, sentence by sentence; and how to start and find a service."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter

import dask
import numpy as np
import pytest
from conftest import eventually, kept_port
from distributed import Client, LocalCluster, Security
from programs import Program

import daskdist
from daskdist import errors
from daskdist.data import Dataset, service
from daskdist.data.experimental.service import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer, distribute

pytestmark = pytest.mark.cluster

HOST = "127.0.0.1"


def job() -> str:
    """Return a name that no other job has."""
    return uuid.uuid4().hex


def in_process(num_workers, protocol="tcp://", **options):
    """Return a cluster of workers that are threads of this process."""
    where = {"host": HOST, "protocol": protocol, "dashboard_address": f"{HOST}:0"}
    return LocalCluster(n_workers=num_workers, threads_per_worker=1, processes=False, **where, **options)


@pytest.fixture(scope="module")
def one_worker():
    """Return the address of a service that has a single worker, in TensorFlow's protocol."""
    dispatcher = DispatchServer(DispatcherConfig(host=HOST))
    worker = WorkerServer(WorkerConfig(dispatcher.address, worker_address=HOST))
    yield f"grpc://{dispatcher.address}"
    worker.stop()
    dispatcher.stop()


# --- the page ---


def test_the_dataset_of_the_first_example(one_worker):
    dataset = Dataset.range(5)
    dataset = dataset.map(lambda x: x * x)
    dataset = dataset.apply(distribute("parallel_epochs", one_worker))
    dataset = dataset.map(lambda x: x + 1)
    assert {int(element) for element in dataset} == {1, 2, 5, 10, 17}


def test_each_worker_produces_all_elements():
    dispatcher = DispatchServer(DispatcherConfig(host=HOST))
    workers = [WorkerServer(WorkerConfig(dispatcher.address, worker_address=HOST)) for _ in range(3)]
    dataset = Dataset.range(3).apply(distribute("parallel_epochs", dispatcher.target))
    assert sorted(map(int, dataset)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    # In this mode each element comes once.
    assert sorted(map(int, Dataset.range(3).apply(distribute("one_epoch", dispatcher.target)))) == [0, 1, 2]
    for item in [*workers, dispatcher]:
        item.stop()


def test_elements_of_a_job_are_split_between_two_training_workers(one_worker):
    # On the page, the trainers get for example [0, 2, 4] and [1, 3], then [0, 1, 3] and [2, 4].
    name = job()
    shares = [[], []]

    def train(place):
        dataset = Dataset.range(5).apply(distribute("parallel_epochs", one_worker, job_name=name))
        for _ in range(3):
            shares[place].append(list(map(int, dataset)))

    threads = [threading.Thread(target=train, args=(place,), daemon=True) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, other in zip(*shares, strict=True):
        assert sorted(one + other) == [0, 1, 2, 3, 4]


def test_elements_go_to_whoever_asks_first(one_worker):
    name = job()
    dataset = Dataset.range(5).apply(
        distribute("parallel_epochs", one_worker, job_name=name, max_outstanding_requests=1)
    )
    one, other = iter(dataset), iter(Dataset.range(5).apply(distribute("parallel_epochs", one_worker, job_name=name)))
    first = [int(next(one)), int(next(one))]
    rest = list(map(int, other))
    assert len(first + rest) == 5 - len(list(one))


def test_each_repetition_is_a_new_job(one_worker):
    name = job()
    dataset = Dataset.range(5).apply(distribute("parallel_epochs", one_worker, job_name=name)).repeat(3)
    assert sorted(map(int, dataset)) == sorted(3 * list(range(5)))
    # Of finished iterations, the status shows the latest.
    assert [value.iteration for value in service.status(one_worker).jobs if value.name == name] == [2]


def test_the_name_of_a_finished_job_gives_no_elements(one_worker, caplog):
    name = job()
    assert len(list(Dataset.range(5).apply(distribute("parallel_epochs", one_worker, job_name=name)))) == 5
    began_at = time.monotonic()
    assert not list(Dataset.range(5).apply(distribute("parallel_epochs", one_worker, job_name=name)))
    assert time.monotonic() - began_at < 25
    assert "was over before it was requested" in caplog.text


def test_jobs_without_a_name_are_owned_by_one(one_worker):
    dataset = Dataset.range(5).apply(distribute("parallel_epochs", one_worker))
    assert sorted([*map(int, dataset), *map(int, dataset)]) == sorted(2 * list(range(5)))


def test_outstanding_requests_are_limited(one_worker):
    dataset = Dataset.range(1000).apply(distribute("one_epoch", one_worker, job(), max_outstanding_requests=3))
    iterator = iter(dataset)
    next(iterator)

    def num_waiting():
        actual = [value for value in service.status(one_worker).jobs if value.state == "running"]
        return sum(consumer.num_waiting for result in actual for consumer in result.consumers)

    most = 0
    until = time.monotonic() + 1
    while time.monotonic() < until:
        most = max(most, num_waiting())
    assert 0 < most <= 3
    iterator.close()


@pytest.mark.parametrize("name", [None, "given"])
@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_strategies_distribute_datasets_of_the_service(client, kind, name):
    shared = name and job()
    if kind == "mirrored":
        strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
    with strategy:
        dataset = daskdist.Dataset.range(300).batch(20).serve(client, job_name=shared)
        distributed = strategy.distribute_dataset(dataset)
        if shared and kind == "multi_worker":
            assert "sharding: OFF" in str(distributed.explain())
        for _ in range(2):
            counts = Counter()
            for batch in distributed:
                for local in strategy.local_results(batch):
                    counts.update(np.asarray(local).tolist())
            assert counts == Counter(range(300))


# --- workers come and go ---


def test_workers_that_come_and_retire():
    with in_process(1) as cluster, Client(cluster, set_as_default=False) as client:
        iterator = iter(Dataset.range(4000).batch(10).serve(client, max_outstanding_requests=4))
        actual = [next(iterator) for _ in range(5)]
        cluster.scale(2)
        client.wait_for_workers(2)
        eventually(lambda: len(service.status(client).jobs[0].workers) == 2)
        actual += [next(iterator) for _ in range(50)]
        leaving = service.status(client).jobs[0].workers[0]
        assert leaving in client.retire_workers([leaving])
        actual += list(iterator)
        assert Counter(np.concatenate(actual).tolist()) == Counter(range(4000))


# --- where a service is ---


def test_a_scheduler_with_the_preload_module(tmp_path):
    file = tmp_path / "scheduler.json"
    command = ["-m", "dask", "scheduler", "--host", HOST, "--port", "0"]
    command += ["--dashboard-address", f"{HOST}:0", "--scheduler-file", str(file), "--preload", "daskdist.preload"]
    # This scheduler refuses plugins that programs register.
    environment = {"DASK_DISTRIBUTED__SCHEDULER__BLOCKED_HANDLERS": "['register_scheduler_plugin']"}
    process = Program(*command, env=environment, stderr=subprocess.PIPE)
    try:
        eventually(lambda: file.exists() and file.read_text().endswith("}"), 60)
        address = json.loads(file.read_text())["address"]
        worker = WorkerServer(WorkerConfig(address, worker_address=HOST))
        for item in (file, str(file), address):
            assert sorted(map(int, Dataset.range(4).serve(item))) == [0, 1, 2, 3]
        worker.stop()
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_a_scheduler_that_takes_no_code_says_how_to_start_it():
    with (
        dask.config.set({"distributed.scheduler.blocked-handlers": ["register_scheduler_plugin"]}),
        in_process(0) as cluster,
        pytest.raises(errors.ClusterError, match=r"--preload daskdist\.preload"),
    ):
        list(Dataset.range(4).serve(cluster))


def test_the_current_client_is_the_service_if_none_is_given(client):
    with client.as_current():
        assert sorted(map(int, Dataset.range(4).serve())) == [0, 1, 2, 3]
    # In a task, the service is that of the worker's scheduler.
    assert sorted(client.submit(lambda: [int(x) for x in Dataset.range(4).serve()]).result()) == [0, 1, 2, 3]
    assert sorted(map(int, Dataset.range(4).serve(client.cluster))) == [0, 1, 2, 3]


def test_a_missing_service_is_an_error():
    with pytest.raises(errors.ClusterError, match="no service was given"):
        Dataset.range(4).serve()
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        address = f"{HOST}:{taken.getsockname()[1]}"
        with (
            dask.config.set({"daskdist.timeouts.connect": 0.5}),
            pytest.raises(errors.ClusterError, match="no scheduler answers at"),
        ):
            service.status(address)
    with pytest.raises(errors.ClusterError, match="cannot be read"):
        Dataset.range(4).serve("no-such-file.json")


def test_an_encrypted_service():
    pytest.importorskip("cryptography")
    security = Security.temporary()
    with (
        in_process(1, "tls://", security=security) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
    ):
        assert client.scheduler.address.startswith("tls://")
        assert sorted(map(int, Dataset.range(100).serve(client))) == list(range(100))
        assert len(service.status(client).workers) == 1


def certificates(security):
    """Return the settings of Dask that name certificates."""
    prefix, client = "distributed.comm.tls", "distributed.comm.tls.client"
    names = {f"{client}.cert": security.tls_client_cert, f"{client}.key": security.tls_client_key}
    return {f"{prefix}.ca-file": security.tls_ca_file, **names}


def test_certificates_come_from_the_configuration():
    pytest.importorskip("cryptography")
    security = Security.temporary()
    with in_process(1, "tls://", security=security) as cluster:
        address = cluster.scheduler_address
        with dask.config.set(certificates(security)):
            assert sorted(map(int, Dataset.range(100).serve(address))) == list(range(100))
            elements = Dataset.range(9).apply(service.distribute("parallel_epochs", address))
            assert sorted(map(int, elements)) == list(range(9))
            assert len(service.status(address).workers) == 1


# Dask leaves the socket of a failed handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize(
    "ask",
    [
        lambda address: list(Dataset.range(4).serve(address)),
        lambda address: list(Dataset.range(4).batch(2).serve(address, job_name="job")),
        service.status,
        lambda address: service.register_dataset(address, Dataset.range(4)),
        lambda address: WorkerServer(WorkerConfig(address, worker_address=HOST)),
    ],
    ids=["serve", "job", "status", "register_dataset", "WorkerServer"],
)
def test_an_encrypted_service_without_the_right_certificates(ask):
    pytest.importorskip("cryptography")
    security, other = certificates(Security.temporary()), certificates(Security.temporary())
    with in_process(1, "tls://", security=Security.temporary()) as cluster, in_process(1, "tcp://") as plain:
        of_tls, of_tcp = cluster.scheduler_address, plain.scheduler_address
        for settings, address, words in [
            ({}, of_tls, r"needs certificates.*security=distributed\.Security.* or set distributed\.comm\.tls"),
            ({}, of_tls.replace("tls", "tcp"), "no scheduler answers .* uses TLS with 'tls://...'"),
            (other, of_tls, "no scheduler answers .*may have other certificates"),
            (security, of_tcp.replace("tcp", "tls"), "no scheduler answers .*may not use TLS"),
            (
                security | {"distributed.comm.tls.ca-file": "none.pem"},
                of_tls,
                r"certificates of .* cannot be used.*No such file",
            ),
            ({"distributed.comm.require-encryption": True}, of_tcp, "requires encryption.*'tls://"),
        ]:
            short = {"daskdist.timeouts.connect": 2}
            with dask.config.set(settings | short), pytest.raises(errors.ClusterError, match=words):
                ask(address)
    # Not in a later test.
    gc.collect()


def test_a_scheduler_that_is_killed_and_started_again(tmp_path):
    port = kept_port()
    command = ["-m", "dask", "scheduler", "--host", HOST, "--port", str(port), "--preload"]
    command += ["daskdist.preload", "--dashboard-address", f"{HOST}:0"]

    def scheduler():
        environment = {"DASK_DASKDIST__SERVICE__WORK_DIR": str(tmp_path)}
        return Program(*command, env=environment, stderr=subprocess.DEVNULL)

    process = scheduler()
    try:
        with dask.config.set({"daskdist.timeouts.connect": 60}):
            workers = [WorkerServer(WorkerConfig(f"{HOST}:{port}", worker_address=HOST)) for _ in range(2)]
        dataset = Dataset.range(4000).batch(10).serve(f"{HOST}:{port}", job_name="job")
        one, other = iter(dataset), iter(Dataset.range(4000).batch(10).serve(f"{HOST}:{port}", job_name="job"))
        actual = [next(item) for _ in range(30) for item in (one, other)]
        process.kill()
        process.wait(30)
        process = scheduler()
        actual += list(one) + list(other)
        assert Counter(np.concatenate(actual).tolist()) == Counter(range(4000))
        for worker in workers:
            worker.stop()
    finally:
        process.kill()
        process.wait(30)
