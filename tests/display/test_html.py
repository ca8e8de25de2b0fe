"""HTML of datasets, replicas and strategies: well-formed, escaped and correct, without reading anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import daskdist
from daskdist import Dataset, PerReplica
from daskdist.testing.never_run import never_run


class _Checked(HTMLParser):
    """A parser that checks that tags are closed in order, and collects the text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.words, self.tags = [], [], set()
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def text_of(value):
    """Return the text that a notebook shows, and check that its HTML is well-formed and has no scripts."""
    with never_run():
        page = _Checked(value._repr_html_())
    assert not page.tags & {"script", "link", "iframe"}
    return " ".join(" ".join(page.words).split())


def doubled(row):
    return row * 2


def written(row):
    return len(str(row))


def test_a_dataset_is_drawn():
    both = Dataset.zip(Dataset.range(10).map(doubled).shuffle(5, seed=1), Dataset.range(10).map(written))
    text = text_of(both.batch(4).prefetch(2))
    assert "Dataset 3 elements" in text
    assert re.search(r"source range\(start=0, stop=10\) compute map\(function=doubled .*?vectorised: multiply", text)
    assert "row by row: it makes text of a value" in text
    assert "arrange shuffle(buffer_size=5, seed=1)" in text
    assert "arrange batch(batch_size=4) option prefetch(buffer_size=2)" in text
    assert "Each element column shape dtype [0] (?,) int64 [1] (?,) int64" in text
    assert "What runs" in text


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda ds: ds.map(doubled, device=True), "compute map"),
        (lambda ds: ds.padded_batch(2), "both padded_batch"),
        (lambda ds: ds.group_by_window(lambda x: x % 2, lambda _, window: window.batch(2), 2), "both group_by_window"),
        (lambda ds: ds.scan(0, lambda total, x: (total + x, total)), "compute scan"),
        (lambda ds: ds.repeat(2), "arrange repeat"),
    ],
)
def test_operations_compute_or_arrange(make, kind):
    assert kind in text_of(make(Dataset.range(4)))


def test_names_are_escaped():
    dataset = Dataset.from_tensor_slices({"<script>alert(1)</script>": np.zeros(3)}).batch(2, name="<b>'\"&")
    html = dataset._repr_html_()
    assert "<script>" not in html
    assert "<b>'" not in html
    assert "<script>alert(1)</script>" in text_of(dataset)


def test_long_plans_and_wide_elements_are_folded():
    dataset = Dataset.from_tensor_slices({f"column {k}": np.zeros(3) for k in range(20)})
    for _ in range(20):
        dataset = dataset.map(lambda row: row)
    html, text = dataset._repr_html_(), text_of(dataset)
    assert "13 earlier operations" in text
    assert "Each element: 20 arrays" in text
    assert html.count("<details>") == html.count("</details>") == 4


def test_files_are_not_read(parquet_files, tmp_path):
    paths = parquet_files(rows=[4, 6])
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    counted, fresh, many = (daskdist.read_parquet(files).batch(2) for files in (paths, paths, paths * 20))
    distributed = strategy.distribute_dataset(counted)
    assert counted.cardinality() == 5
    for path in paths:
        (tmp_path / path).write_bytes(b"no Parquet any more")
    assert "Dataset 5 elements" in text_of(counted)
    text = text_of(fresh)
    assert "elements not counted yet" in text
    assert "ds.cardinality() reads the indexes of the files" in text
    assert "id (?,) int64" in text
    assert "elements not counted yet" in text_of(many)
    assert "this process CPU:0, CPU:1" in text_of(distributed)


def test_an_unknown_spec_is_shown_as_such():
    def unknown(row):
        raise ValueError("not for sample rows" if row == 0 else "nor for others")

    dataset = Dataset.range(3).map(unknown)
    assert "The elements depend on the data" in text_of(dataset)
    with never_run():
        assert repr(dataset).startswith("<Dataset of 3 elements: types are known once they are computed\n")


def test_a_spec_that_was_asked_for_is_shown():
    def fails_for_made_up_rows(row):
        if row not in range(5, 8):
            raise ValueError(row)
        return row / 2

    dataset = Dataset.range(5, 8).map(fails_for_made_up_rows)
    assert "The elements depend on the data" in text_of(dataset)
    assert dataset.element_spec.dtype == np.float64
    assert "(the element) () float64" in text_of(dataset)
    assert "TensorSpec(shape=(), dtype=float64" in repr(dataset)


def test_a_distributed_dataset_has_a_bar_for_each_worker(parquet_files):
    dataset = daskdist.read_parquet(parquet_files(rows=[4, 6])).batch(5)
    distributed = daskdist.MirroredStrategy(["CPU:0", "CPU:1"]).distribute_dataset(dataset)
    text = text_of(distributed)
    assert "2 steps 2 replicas Sharding: none needed (one worker reads everything)" in text
    assert "worker replicas files splits rows bytes 0 this process CPU:0, CPU:1 2 2 10 " in text
    assert "Each replica gets column shape dtype id (?,) int64" in text
    assert "The plan source read_parquet(2 files:" in text
    assert "width:100.0%" in distributed._repr_html_()


@pytest.mark.cluster
def test_workers_of_a_cluster(on_cluster, parquet_files):
    paths = parquet_files(rows=[4, 6])
    distributed = on_cluster.distribute_dataset(daskdist.read_parquet(paths).batch(5))
    text = text_of(distributed)
    assert "Sharding: FILE" in text
    for number, worker in enumerate(on_cluster.workers):
        assert f"{number} {worker} CPU:0 1 1 {(4, 6)[number]}" in text
    assert [int(share) for share in re.findall(r"width:(\d+)\.\d%", distributed._repr_html_())] == [66, 100]
    text = text_of(on_cluster)
    assert "MultiWorkerMirroredStrategy 2 replicas 2 workers" in text
    for worker in on_cluster.workers:
        assert worker in text


def test_values_of_replicas():
    text = text_of(PerReplica([np.arange(6.0).reshape(3, 2), np.array([7])]))
    assert text == (
        "PerReplica 2 replicas replica shape dtype range value 0 (3, 2) float64 0 to 5 [[0. 1.] [2. 3.] [4. 5.]] "
        "1 (1,) int64 [7]"
    )


def test_values_of_many_replicas_are_folded():
    assert "48 more" in text_of(PerReplica(range(60)))


def test_a_strategy_its_variables_and_checkpoints():
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights = daskdist.Variable({"w": np.zeros((3, 4)), "b": 0.0}, name="weights", aggregation="MEAN")
        state = daskdist.Variable(lambda: {"text": "is no array"})
    assert "MirroredStrategy 2 replicas 1 worker" in text_of(strategy)
    assert "this process 0, 1 CPU:0, CPU:1 idle" in text_of(strategy)
    assert text_of(strategy.status()).startswith("StrategyStatus 2 replicas 1 worker")
    text = text_of(weights)
    assert "weights synchronization AUTO aggregation MEAN" in text
    assert "['w'] (3, 4) float64" in text
    assert "a dict on each replica" in text_of(state)
    assert "weights Variable epoch int 3" in text_of(daskdist.Checkpoint(weights=weights, epoch=3))
    assert "keeps the newest 2 no step saved" in text_of(daskdist.CheckpointManager("memory://nowhere", keep=2))


def test_text_of_large_values_is_short():
    large = [np.zeros((32, 16)), np.zeros(1000), np.zeros((2, 30, 40)), np.zeros((9, 1)), np.zeros((2, 2, 2, 2))]
    text = repr(PerReplica([*large, "x" * 5000, ["line"] * 500]))
    assert len(text.splitlines()) < 40
    assert len(text) < 4000
    assert "shape=(32, 16)" in text
    assert "4: <array of shape (2, 2, 2, 2), float64>" in text
    lines = repr(PerReplica(range(64))).splitlines()
    assert lines[8:] == ["  7: 7,", "  ... 54 more replicas", "  62: 62,", "  63: 63", "}"]
