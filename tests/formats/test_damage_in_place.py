"""Damaged parts of files hold the places of their elements, so that nothing else takes these."""

from __future__ import annotations

import gzip
import tarfile
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import daskdist
from daskdist import Dataset, Options, errors

SKIP = Options(on_error="skip")


def text(path):
    path.write_bytes(b"a0\n\xff\na2\na3\n\xfe\xff\na5\n")
    return daskdist.read_text(str(path)).map(lambda line: int(str(line)[1:])), [0, 2, 3, 5]


def csv(path):
    path.write_text("a,b\n0,x\n1\n2,x\n3,x,y\n?,x\n5,x\n")
    return daskdist.read_csv(str(path), dtypes={"a": "int64"}).map(lambda row: row["a"]), [0, 2, 5]


def csv_of_latin(path):
    path.write_bytes(b"a,b\n0,x\n1,x\n2\n3,x\n".replace(b"1,x", b"1,\x8d"))
    ds = daskdist.read_csv(str(path), dtypes={"a": "int64"}, encoding="cp1252")
    return ds.map(lambda row: row["a"]), [0, 3]


def json_lines(path):
    path.write_text('{"a": 0}\nbroken\n\n{"a": 2}\n{"a": "x"}\n{"a": 4}\n')
    return daskdist.read_json(str(path), lines=True, dtypes={"a": "int64"}).map(lambda row: row["a"]), [0, 2, 4]


def tfrecord(path):
    Dataset.from_tensor_slices(np.array([b"%d" % k for k in range(6)], object)).to_tfrecord(str(path), rows_per_file=10)
    (file,) = path.glob("*.tfrecord*")
    data = bytearray(file.read_bytes())
    # The fourth of six records of equal size.
    size = len(data) // 6
    data[3 * size + 12] ^= 1
    file.write_bytes(bytes(data))
    return daskdist.read_tfrecord(str(file)).map(int), [0, 1, 2, 4, 5]


def webdataset(path):
    with tarfile.open(path, "w") as archive:
        for number in range(5):
            content = b"?" if number == 2 else b"%d" % number
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    return daskdist.read_webdataset(str(path)).map(lambda sample: sample["cls"]), [0, 1, 3, 4]


def images(path):
    path.mkdir()
    for number in range(5):
        Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(path / f"{number}.png")
    (path / "3.png").write_bytes((path / "2.png").read_bytes()[:40])
    return daskdist.read_images(str(path), labels=None).map(lambda image: image[0, 0, 0]), [0, 1, 2, 4]


def parquet(path):
    # A null has no number.
    pq.write_table(pa.table({"a": pa.array([0, None, 2, 3, None, 5])}), path)
    return daskdist.read_parquet(str(path), "a"), [0, 2, 3, 5]


WRITERS = [text, csv, csv_of_latin, json_lines, tfrecord, webdataset, images, parquet]


@pytest.mark.parametrize("is_option", [False, True])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_zip_pairs_what_is_left_with_its_own(tmp_path, write, is_option):
    ds, left = write(tmp_path / "file")
    paired = Dataset.zip(ds, Dataset.range(20)).shuffle(3, seed=1)
    paired = paired.with_options(SKIP) if is_option else paired.ignore_errors()
    pairs = sorted((int(np.ravel(a)[0]), int(b)) for a, b in paired)
    assert pairs == [(number, number) for number in left]


@pytest.mark.cluster
@pytest.mark.parametrize("write", [csv, images], ids=lambda write: write.__name__)
def test_zip_pairs_what_is_left_with_its_own_in_batches_on_a_cluster_and_served(tmp_path, write, on_cluster, client):
    ds, left = write(tmp_path / "file")
    paired = Dataset.zip(ds, Dataset.range(20)).shuffle(3, seed=1).batch(2).ignore_errors()
    steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(paired)]
    of_steps = [part for step in steps for part in step]
    for batches in (of_steps, list(paired.serve(client))):
        rows = [row for first, second in batches for row in zip(first, second, strict=True)]
        pairs = sorted((int(np.ravel(a)[0]), int(b)) for a, b in rows)
        assert pairs == [(number, number) for number in left]


# How lines of a file reach `zip`.
WAYS_TO_ZIP = {
    "directly": lambda lines: lines,
    "shuffle": lambda lines: lines.shuffle(2, seed=1),
    "flat_map": lambda lines: Dataset.range(1).flat_map(lambda _: lines),
    "interleave": lambda lines: Dataset.range(2).interleave(lambda _: lines, cycle_length=2),
}


@pytest.mark.parametrize("way_to_zip", WAYS_TO_ZIP)
@pytest.mark.parametrize("way", ["raise", "skip", "ignore_errors"])
def test_zip_with_a_file_that_lacks_an_unknown_number_of_lines_is_an_error(tmp_path, way, way_to_zip):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"1\n2\n3\n4\n")[:-9])
    cut = daskdist.read_text(str(tmp_path / "a.txt.gz"))
    ds = Dataset.zip(WAYS_TO_ZIP[way_to_zip](cut), Dataset.range(9))
    ds = {"raise": lambda: ds, "skip": lambda: ds.with_options(SKIP), "ignore_errors": ds.ignore_errors}[way]()
    with pytest.raises(errors.FileError, match="how many are missing here is unknown"):
        list(ds)
    # Nothing takes the numbers of others here.
    assert [int(number) for number, _ in cut.enumerate().ignore_errors()] == [0, 1, 2, 3]
