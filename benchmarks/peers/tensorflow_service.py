"""The pipelines of `benchmarks/service.py` in the tf.data service: a dispatcher, workers and consumers as processes.

A line of standard input asks for a case as JSON: ``pipeline``, ``num_consumers``, and ``kill_after``, the number of
elements after which a worker is killed, or null.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from serving import COSTLY_PRODUCTS, COSTLY_SIZE, SERVICE_BATCH, ServiceSize

service = tf.data.experimental.service


def expensive(x):
    matrix = tf.fill([COSTLY_SIZE, COSTLY_SIZE], 1 / COSTLY_SIZE)
    for _ in range(COSTLY_PRODUCTS):
        matrix = matrix @ matrix
    return x + tf.cast(matrix[0, 0] * 0.5, tf.int64)


def dataset_of(pipeline: str, size: ServiceSize, address: str, job_name: str) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range
    many, few = tf.range(SERVICE_BATCH, dtype=tf.float32), tf.range(16, dtype=tf.float32)
    if pipeline == "batches":
        dataset = numbers(size.num_batches).map(lambda x: many + tf.cast(x, tf.float32))
    elif pipeline == "rows":
        dataset = numbers(size.num_rows).map(lambda x: few + tf.cast(x, tf.float32))
    else:
        dataset = numbers(size.num_costly).map(expensive)
    dataset = dataset.apply(service.distribute("distributed_epoch", address, job_name=job_name))
    return dataset.batch(1024) if pipeline == "rows" else dataset


def consume(size: ServiceSize, address: str) -> None:
    """Read the requested cases, one per line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        pipeline, job_name, killed, kill_after = json.loads(line)
        dataset = dataset_of(pipeline, size, address, job_name)
        numbers, start, first = [], time.perf_counter(), None
        for element in dataset:
            first = first or time.perf_counter() - start
            array = element.numpy()
            numbers += [int(row[0]) for row in array] if pipeline == "rows" else [int(array.reshape(-1)[0])]
            if len(numbers) == kill_after:
                os.kill(killed, 9)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "first": first, "numbers": numbers}), file=answers, flush=True)


def work(address: str, port: str) -> None:
    """Be a worker until standard input ends."""
    config = service.WorkerConfig(dispatcher_address=address, port=int(port), heartbeat_interval_ms=1000)
    server = service.WorkerServer(config)
    print("ready", flush=True)
    sys.stdin.read()
    server.stop() if hasattr(server, "stop") else None


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Process:
    """Another process of this script."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *request) -> None:
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Run the cases that are asked for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    size = sys.argv[1]
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]

    def worker(port: int) -> Process:
        started = Process("worker", size, address, str(port))
        started.process.stdout.readline()
        return started

    ports = [free_port() for _ in range(2)]
    workers = [worker(port) for port in ports]
    consumers = [Process("consumer", size, address) for _ in range(2)]
    print(json.dumps({"version": tf.__version__, "cases": ["batches", "rows", "costly"]}), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        case = json.loads(line)
        readers = consumers[: case["num_consumers"]]
        start = time.perf_counter()
        for reader in readers:
            reader.ask(case["pipeline"], f"job {number}", workers[0].process.pid, case["kill_after"])
        if case["kill_after"] is not None:
            # Consumers wait up to an hour for a lost worker, until another one is at its address.
            workers[0].process.wait()
            workers[0] = worker(ports[0])
        parts = [reader.answer() for reader in readers]
        answer = {"seconds": time.perf_counter() - start, "parts": parts}
        print(json.dumps(answer), file=answers, flush=True)
    for each in [*workers, *consumers]:
        each.stop()


if sys.argv[1] == "worker":
    work(*sys.argv[3:])
elif sys.argv[1] == "consumer":
    consume(ServiceSize(**json.loads(sys.argv[2])), sys.argv[3])
else:
    main()
