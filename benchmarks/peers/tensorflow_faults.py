"""Passes over the tf.data service in which a worker is killed: prints the rows that came, as JSON by the case's name.

The dispatcher is fault-tolerant. The arguments are the number of rows, of rows of a batch, and of the step before which
the first of two workers is killed.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf
from serving import COSTLY_PRODUCTS, COSTLY_SIZE

service = tf.data.experimental.service

# A pass without a batch for so long has hung.
_HANGS_AFTER_S = 20.0


def expensive(x):
    matrix = tf.fill([COSTLY_SIZE, COSTLY_SIZE], 1 / COSTLY_SIZE)
    for _ in range(COSTLY_PRODUCTS):
        matrix = matrix @ matrix
    return x + tf.cast(matrix[0, 0] * 0.5, tf.int64)


def work(address: str, port: str) -> None:
    """Be a worker until this process is killed."""
    server = service.WorkerServer(service.WorkerConfig(address, port=int(port), heartbeat_interval_ms=1000))
    print("ready", flush=True)
    server.join()


def start_worker(address: str, port: int) -> subprocess.Popen:
    command = [sys.executable, __file__, "worker", address, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def one_pass(policy, *, restarts: bool, num_rows: int, batch_rows: int, kill_at: int) -> dict:
    """Iterate while a worker is killed, and started again at its address or not."""
    with tempfile.TemporaryDirectory() as directory:
        dispatcher = service.DispatchServer(
            service.DispatcherConfig(work_dir=directory, fault_tolerant_mode=True, job_gc_check_interval_ms=1000)
        )
        address = dispatcher.target.split("://")[1]
        ports = [free_port(), free_port()]
        workers = [start_worker(address, port) for port in ports]
        rows = tf.data.Dataset.range(num_rows).map(expensive).batch(batch_rows)
        batches: queue.Queue = queue.Queue(maxsize=1)

        def iterate() -> None:
            try:
                for batch in rows.apply(service.distribute(policy, dispatcher.target, job_name="pass")):
                    batches.put(batch.numpy().tolist())
                batches.put(None)
            except Exception as error:
                batches.put(f"{type(error).__name__}: {str(error)[:100]}")

        threading.Thread(target=iterate, daemon=True).start()
        visited, times, error = [], [], None
        for step in range(sys.maxsize):
            if step == kill_at:
                workers[0].send_signal(signal.SIGKILL)
                workers[0].wait()
                if restarts:
                    workers[0] = start_worker(address, ports[0])
            try:
                batch = batches.get(timeout=_HANGS_AFTER_S)
            except queue.Empty:
                times.append(time.perf_counter())
                error = f"no batch for {_HANGS_AFTER_S:g} s"
                break
            if not isinstance(batch, list):
                error = batch
                break
            times.append(time.perf_counter())
            visited += batch
        for worker in workers:
            worker.kill()
            worker.wait()
    longest_gap_s = max(after - before for before, after in pairwise(times))
    return {"visited": visited, "longest_gap_s": longest_gap_s, "error": error}


def main(num_rows: int, batch_rows: int, kill_at: int) -> None:
    dynamic, off = service.ShardingPolicy.DYNAMIC, service.ShardingPolicy.OFF
    cases = {
        "DYNAMIC, not restarted": (dynamic, False, 1),
        "DYNAMIC, restarted": (dynamic, True, 1),
        "OFF, restarted": (off, True, 2),
    }
    outcomes = {}
    for name, (policy, restarts, num_times) in cases.items():
        outcome = one_pass(policy, restarts=restarts, num_rows=num_rows, batch_rows=batch_rows, kill_at=kill_at)
        outcomes[f"TensorFlow's service, {name}"] = {**outcome, "num_times": num_times}
    print(json.dumps(outcomes), flush=True)
    # A thread may wait for a lost worker.
    os._exit(0)


if sys.argv[1] == "worker":
    work(*sys.argv[2:])
else:
    main(*map(int, sys.argv[1:]))
