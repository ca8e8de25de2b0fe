"""Shuffled images in local processes: they are read by the calls that need them, with the same elements and errors."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.structure import LONE
from daskdist.execute.callers.process_pool import close_pools
from daskdist.execute.callers.processes import Processes
from daskdist.execute.callers.unread_rows import UnreadRows
from daskdist.execute.stream.gather import Picks, gather
from daskdist.storage.grouped_splits import joined_split
from daskdist.testing import same_elements

PROCESSES = Options(num_processes=2)
NUM_IMAGES = 1500


@pytest.fixture(scope="module", autouse=True)
def _processes():
    yield
    close_pools()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for folder in ("a", "b"):
        (root / folder).mkdir()
    for number in range(NUM_IMAGES):
        pixels = np.full((2, 3, 3), number % 251, np.uint8)
        pixels[0, 0, 0] = number // 251
        Image.fromarray(pixels).save(root / "ab"[number % 2] / f"{number:04}.png")
    return str(root)


def flipped(image, label, rng):
    return image[:, ::-1] if rng.random() < 0.5 else image, label


PIPELINES = [
    lambda ds: ds.shuffle(700, seed=0).batch(64),
    lambda ds: ds.shuffle(700, seed=0),
    lambda ds: ds.shuffle(NUM_IMAGES, seed=0).map(flipped, rng=1).batch(64),
    lambda ds: ds.shuffle(NUM_IMAGES, seed=0).map(lambda image, label: (image[::-1], label), vectorized=False).batch(7),
    lambda ds: ds.shuffle(300, seed=0).repeat(2).batch(50, drop_remainder=True),
    lambda ds: ds.shuffle(300, seed=0).sliding_window(3, shift=2).batch(10),
    lambda ds: Dataset.zip(ds.shuffle(300, seed=0), ds.shuffle(NUM_IMAGES, seed=1)).batch(20),
    lambda ds: ds.shuffle(300, seed=0).concatenate(ds.shuffle(40, seed=0)).shuffle(90, seed=3).batch(8),
    lambda ds: ds.shuffle(300, seed=0).filter(lambda image, label: bool(label)).batch(8),
    lambda ds: ds.skip(100).shuffle(300, seed=0).map(flipped, rng=1).take(1000),
    lambda ds: ds.shuffle(300, seed=0).enumerate().shard(2, 1).batch(16),
]


@pytest.mark.parametrize("build", PIPELINES)
def test_elements_are_the_same_in_the_same_order(images, build):
    ds = daskdist.read_images(images)
    same_elements(list(build(ds).with_options(PROCESSES)), list(build(ds)), "images in processes")


@pytest.mark.parametrize("num_batches", [0, 9, 20])
def test_a_pass_continues_at_its_position(images, num_batches):
    ds = daskdist.read_images(images).shuffle(600, seed=0).map(flipped, rng=1).batch(64)
    iterator = iter(ds.at_epoch(2).with_options(PROCESSES))
    for _ in range(num_batches):
        next(iterator)
    again = iter(ds.with_options(PROCESSES))
    again.load_state_dict(iterator.state_dict())
    same_elements(list(again), list(ds.at_epoch(2))[num_batches:], "the rest")


def test_only_the_damaged_image_is_lost(images, tmp_path):
    for number in range(NUM_IMAGES):
        (tmp_path / f"{number:04}.png").symlink_to(f"{images}/{'ab'[number % 2]}/{number:04}.png")
    damaged = tmp_path / "1300.png"
    damaged.unlink()
    damaged.write_bytes(b"\x89PNG no image")
    ds = daskdist.read_images(str(tmp_path), labels=None).shuffle(NUM_IMAGES, seed=0)
    iterator, num_images, messages = iter(ds.with_options(PROCESSES)), 0, []
    while True:
        try:
            next(iterator)
            num_images += 1
        except StopIteration:
            break
        except errors.FileError as error:
            messages.append(str(error))
    assert num_images == NUM_IMAGES - len(messages)
    assert len(messages) == 1
    assert "1300.png" in messages[0]
    without = ds.ignore_errors().batch(64)
    expected = list(without.at_epoch(0))
    same_elements(list(without.at_epoch(0).with_options(PROCESSES)), expected, "without the damaged image")


def drained(iterator, limit=None):
    """Return the numbers of images, and the names of those that cannot be read, up to a number of them."""
    elements = []
    while limit is None or len(elements) < limit:
        try:
            elements.append(number_of(next(iterator)))
        except StopIteration:
            break
        except errors.FileError as error:
            elements.append(re.search(r"[0-9]+\.png", str(error)).group())
    return elements


def number_of(image):
    return int(image[0, 0, 0]) * 251 + int(image[0, 0, 1])


@pytest.mark.parametrize("options", [Options(), Options(deterministic=False), PROCESSES])
@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds,
        lambda ds: ds.shuffle(150, seed=0),
        lambda ds: ds.shuffle(400, seed=0).map(lambda image: image + 0, vectorized=False),
        lambda ds: ds.filter(lambda image: number_of(image) >= 0).shuffle(400, seed=0),
    ],
)
def test_damaged_images_are_lost_alone_before_and_after_a_position(images, tmp_path, options, build):
    names = [f"{number:04}.png" for number in range(300)]
    damaged = ["0000.png", "0005.png", "0063.png", "0064.png", "0290.png"]
    for number, name in enumerate(names):
        if name in damaged:
            (tmp_path / name).write_bytes(b"\x89PNG no image")
        else:
            (tmp_path / name).symlink_to(f"{images}/{'ab'[number % 2]}/{name}")
    ds = build(daskdist.read_images(str(tmp_path), labels=None)).with_options(options)
    expected = sorted(damaged) + [number for number in range(300) if names[number] not in damaged]
    for limit in (66, 200):
        iterator, again = iter(ds.at_epoch(0)), iter(ds)
        elements = drained(iterator, limit)
        again.load_state_dict(iterator.state_dict())
        for rest in (drained(iterator), drained(again)):
            assert sorted(elements + rest, key=lambda element: (isinstance(element, int), element)) == expected


class Recorded:
    """A reader that records in a file which parts it reads."""

    def __init__(self, path):
        self.path = path

    def __call__(self, split):
        numbers = [part.payload for part in split.payload]
        with open(self.path, "a") as file:
            print(*numbers, file=file)
        return Block(LONE, [np.array(numbers)])


def test_only_the_needed_rows_are_read(tmp_path):
    caller = Processes(2)
    splits = [joined_split([Split(f"row {n}", n, 1, 8) for n in range(64 * k, 64 * k + 64)]) for k in range(3)]
    reader = Recorded(tmp_path / "read")
    try:
        handles = [caller.source(reader, split, by_row=True, name="read") for split in splits]
        assert all(isinstance(handle.result(0), UnreadRows) for handle in handles)
        assert [caller.report(handle, wait=False).num_rows for handle in handles] == [64, 64, 64]
        assert not reader.path.exists()
        picks = Picks(np.array([5, 0, 63, 5]), np.array([2, 0, 1, 2]), None, None)
        rows = caller.call(gather, handles, picks, name="gather").result(60)
        assert rows.leaves[0].tolist() == [133, 0, 127, 133]
        assert reader.path.read_text() == "133 0 127\n"
        there = Block(LONE, [np.arange(1000, 1064)])
        handles[1] = caller.source(lambda: there, name="rows")
        rows = caller.call(gather, handles, picks, lambda rows: rows, False, name="map").result(60)
        assert rows.leaves[0].tolist() == [133, 0, 1063, 133]
        assert reader.path.read_text() == "133 0 127\n133 0\n"
        total = caller.call(lambda blocks: sum(block.leaves[0].sum() for block in blocks), handles[:1], name="sum")
        assert total.result(60) == sum(range(64))
        assert caller.result(handles[2]).leaves[0].tolist() == list(range(128, 192))
    finally:
        caller.close()
