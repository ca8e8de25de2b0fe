"""Steps of TensorFlow's strategies, a sum of half a batch on each of two replicas: prints steps a second, as JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np


def main(num_steps: int) -> None:
    ports = [_free_port(), _free_port()]
    both = [
        subprocess.Popen(
            [sys.executable, __file__, str(num_steps), *map(str, ports), str(number)],
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            text=True,
        )
        for number in range(2)
    ]
    try:
        several, _ = both[0].communicate(timeout=240)
    finally:
        for each in both:
            each.kill()
            each.wait()
    alone = subprocess.run(
        [sys.executable, __file__, str(num_steps), "alone"], stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    print(json.dumps({**json.loads(several), **json.loads(alone.stdout)}))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def rates(name: str, num_steps: int) -> dict[str, float]:
    import tensorflow as tf

    if name == "MirroredStrategy":
        (processor,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(0).random((2**16, 16), np.float32)
    dataset = tf.data.Dataset.from_tensor_slices(rows).repeat().batch(128, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    iterator = iter(strategy.experimental_distribute_dataset(dataset.with_options(options)))

    def one(iterator: object) -> object:
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(next(iterator),)), axis=None)

    step = tf.function(one)

    @tf.function
    def many(iterator: object, number: object) -> object:
        total = 0.0
        for _ in tf.range(number):
            total += one(iterator)
        return total

    def awaited(num_steps: int) -> None:
        for _ in range(num_steps):
            float(step(iterator))

    def in_range(num_steps: int) -> None:
        float(many(iterator, tf.constant(num_steps)))

    found = {}
    for case, way in {"awaited": awaited, "in tf.range": in_range}.items():
        way(num_steps // 10 + 1)
        start = time.perf_counter()
        way(num_steps)
        found[f"TensorFlow {name}, {case}"] = num_steps / (time.perf_counter() - start)
    return found


if len(sys.argv) == 2:
    main(int(sys.argv[1]))
elif sys.argv[2] == "alone":
    print(json.dumps(rates("MirroredStrategy", int(sys.argv[1]))))
else:
    steps, *ports, number = sys.argv[1:]
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": int(number)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    print(json.dumps(rates("MultiWorkerMirroredStrategy", int(steps))), flush=True)
