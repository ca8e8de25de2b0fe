"""The examples of the TensorFlow pages that daskdist follows, with ``import daskdist as tf``.

NumPy replaces TensorFlow's arrays: ``np.float32(0.1)`` for ``tf.constant(0.1)``, ``np.square`` for ``tf.square``; CPU
replicas replace GPUs. The output is that of the pages, with NumPy's values.
"""

from typing import Any

import numpy as np
import pytest

import daskdist as tf

ONE_LOSS = "[[0.7]\n [0.7]]"
TWO_LOSSES = """PerReplica:{
  0: array([[0.7],
       [0.7]], dtype=float32),
  1: array([[0.7],
       [0.7]], dtype=float32)
}"""


@pytest.fixture(params=["embedded", pytest.param("cluster", marks=pytest.mark.cluster)])
def two_replicas(request: pytest.FixtureRequest) -> Any:
    if request.param == "embedded":
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    client = request.getfixturevalue("client")
    return tf.distribute.experimental.MultiWorkerMirroredStrategy(client)


def test_a_pythonic_loop_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    global_batch_size = 2
    strategy = tf.distribute.MirroredStrategy()
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(4).batch(global_batch_size)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    def train_step(input: Any) -> Any:
        features, labels = input
        return labels - 0.3 * features

    for x in dist_dataset:
        loss = strategy.run(train_step, args=(x,))
        print("Loss is", loss)
    assert capsys.readouterr().out == f"Loss is {ONE_LOSS}\n" * 2


def test_a_pythonic_loop_on_two_devices(two_replicas: Any, capsys: pytest.CaptureFixture[str]) -> None:
    global_batch_size = 4
    strategy = two_replicas
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(4).batch(global_batch_size)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def train_step(input: Any) -> Any:
        features, labels = input
        return labels - 0.3 * features

    for x in dist_dataset:
        loss = strategy.run(train_step, args=(x,))
        print("Loss is", loss)
    assert capsys.readouterr().out == f"Loss is {TWO_LOSSES}\n"


def test_an_explicit_iterator(two_replicas: Any, capsys: pytest.CaptureFixture[str]) -> None:
    global_batch_size = 4
    strategy = two_replicas
    train_dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(50).batch(global_batch_size)
    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

    @tf.function
    def distributed_train_step(dataset_inputs: Any) -> Any:
        def train_step(input: Any) -> Any:
            return np.float32(0.1)

        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    EPOCHS = 2
    STEPS = 3
    for epoch in range(EPOCHS):
        total_loss: Any = 0.0
        num_batches = 0
        dist_dataset_iterator = iter(train_dist_dataset)
        for _ in range(STEPS):
            total_loss += distributed_train_step(next(dist_dataset_iterator))
            num_batches += 1
        average_train_loss = total_loss / num_batches
        template = "Epoch {}, Loss: {:.4f}"
        print(template.format(epoch + 1, average_train_loss))
    assert capsys.readouterr().out == "Epoch 1, Loss: 0.2000\nEpoch 2, Loss: 0.2000\n"


def test_element_spec_as_input_signature(two_replicas: Any, capsys: pytest.CaptureFixture[str]) -> None:
    global_batch_size = 4
    epochs = 1
    steps_per_epoch = 1
    mirrored_strategy = two_replicas
    dataset = tf.data.Dataset.from_tensors([2.0]).repeat(100).batch(global_batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(per_replica_inputs: Any) -> Any:
        def step_fn(inputs: Any) -> Any:
            return np.square(inputs)

        return mirrored_strategy.run(step_fn, args=(per_replica_inputs,))

    for _ in range(epochs):
        iterator = iter(dist_dataset)
        for _ in range(steps_per_epoch):
            output = train_step(next(iterator))
            print(output)
    assert capsys.readouterr().out == TWO_LOSSES.replace("0.7", "4.") + "\n"


def test_input_signature_refuses_what_does_not_fit() -> None:
    strategy = tf.MirroredStrategy(["CPU:0", "CPU:1"])
    dist_dataset = strategy.distribute_dataset(tf.data.Dataset.from_tensors([2.0]).repeat(4).batch(4))

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs: Any) -> Any:
        return inputs

    others = strategy.distribute_dataset(tf.data.Dataset.range(4).batch(4))
    with pytest.raises(tf.errors.ArgumentError, match=r"shape \(2,\) and dtype int64; input_signature has .*float32"):
        train_step(next(iter(others)))


def test_element_spec_of_one_and_two_devices() -> None:
    dataset = tf.data.Dataset.from_tensors(([1.0], [2])).repeat(100).batch(16)
    one = tf.distribute.MirroredStrategy().experimental_distribute_dataset(dataset)
    floats = "TensorSpec(shape=(None, 1), dtype=float32, name=None)"
    ints = "TensorSpec(shape=(None, 1), dtype=int32, name=None)"
    assert repr(one.element_spec) == f"({floats}, {ints})"
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).experimental_distribute_dataset(dataset)
    assert repr(two.element_spec) == f"(PerReplicaSpec({floats}, {floats}), PerReplicaSpec({ints}, {ints}))"
    assert repr(iter(two).element_spec) == repr(two.element_spec)


def test_iter_of_a_distributed_dataset(two_replicas: Any, capsys: pytest.CaptureFixture[str]) -> None:
    global_batch_size = 4
    strategy = two_replicas
    dataset = tf.data.Dataset.from_tensor_slices([1, 2, 3, 4]).repeat().batch(global_batch_size)
    distributed_iterator = iter(strategy.experimental_distribute_dataset(dataset))
    print(next(distributed_iterator))
    assert capsys.readouterr().out == (
        "PerReplica:{\n  0: array([1, 2], dtype=int32),\n  1: array([3, 4], dtype=int32)\n}\n"
    )


def test_get_next(two_replicas: Any) -> None:
    strategy = two_replicas
    dataset = tf.data.Dataset.range(100).batch(2)
    dist_dataset_iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def one_step(input: Any) -> Any:
        return input

    step_num = 5
    for _ in range(step_num):
        strategy.run(one_step, args=(dist_dataset_iterator.get_next(),))
    results = strategy.experimental_local_results(dist_dataset_iterator.get_next())
    assert repr(results) == "(array([10]), array([11]))"


def test_get_next_as_optional(two_replicas: Any) -> None:
    strategy = two_replicas
    global_batch_size = 4
    steps_per_loop = 5
    dataset = tf.data.Dataset.range(5).batch(global_batch_size)
    distributed_iterator = iter(strategy.experimental_distribute_dataset(dataset))
    seen = []

    def step_fn(x: Any) -> Any:
        return x

    @tf.function
    def train_fn(distributed_iterator: Any) -> None:
        for _ in range(steps_per_loop):
            optional_data = distributed_iterator.get_next_as_optional()
            if not optional_data.has_value():
                break
            per_replica_results = strategy.run(step_fn, args=(optional_data.get_value(),))
            seen.append(strategy.experimental_local_results(per_replica_results))

    train_fn(distributed_iterator)
    assert [[list(values) for values in step] for step in seen] == [[[0, 1], [2, 3]], [[4], []]]


def test_datasets_from_a_function(two_replicas: Any) -> None:
    strategy = two_replicas
    global_batch_size = 8

    def dataset_fn(input_context: Any) -> Any:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = tf.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    actual = []
    for _, batch in zip(range(3), inputs, strict=False):
        replica_results = strategy.experimental_run_v2(lambda x: x.sum(), args=(batch,))
        actual.append(strategy.experimental_local_results(replica_results))
    assert actual == [(4.0, 4.0)] * 3


def test_the_loop_of_the_tpu_page(two_replicas: Any, tmp_path: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(4):
        table = pa.table({"x": np.arange(number * 4, number * 4 + 4)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    strategy = two_replicas
    dataset = tf.read_parquet(tmp_path).batch(8)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    rows = [
        row
        for x in dist_dataset
        for values in strategy.experimental_local_results(strategy.experimental_run_v2(lambda x: x, args=(x,)))
        for row in values["x"].tolist()
    ]
    assert sorted(rows) == list(range(16))


def test_a_dataset_of_numpy_arrays(two_replicas: Any) -> None:
    strategy = two_replicas
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    assert isinstance(dataset, tf.data.Dataset)
    assert repr(dataset.element_spec) == "TensorSpec(shape=(), dtype=float32, name=None)"
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(4))
    assert sum(float(strategy.reduce(tf.distribute.ReduceOp.SUM, x, axis=0)) for x in dist_dataset) == 10
    lists = strategy.experimental_make_numpy_dataset({"a": [np.arange(3), np.arange(3)], "b": (np.zeros(2),)})
    assert lists.element_spec["a"].shape == (3,)


def test_datasets_of_every_origin_are_datasets_of_tensorflow(tmp_path: Any) -> None:
    (tmp_path / "lines.txt").write_text("a\nb\n")
    assert isinstance(tf.read_text(tmp_path), tf.data.Dataset)
    assert isinstance(tf.data.TextLineDataset(tmp_path / "lines.txt"), tf.data.Dataset)
    # Classes of files are classes of their own.
    assert not isinstance(tf.data.Dataset.range(2), tf.data.TextLineDataset)
    assert not isinstance([1], tf.data.Dataset)


def test_the_last_batch_of_the_page_on_reduce(two_replicas: Any) -> None:
    parts = (np.arange(4.0), np.array([4.0, 5.0]))
    value = two_replicas.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    # The denominator is 6; the mean of the means of replicas weighs some rows 1/8 and others 1/4.
    assert float(two_replicas.reduce(tf.distribute.ReduceOp.MEAN, value, axis=0)) == 2.5
    means = two_replicas.run(np.mean, args=(value,))
    assert float(two_replicas.reduce(tf.distribute.ReduceOp.MEAN, means)) == 3.0
    with pytest.raises(tf.errors.ArgumentError, match="Give axis=0"):
        float(two_replicas.reduce(tf.distribute.ReduceOp.MEAN, value)[0])
