"""WebDataset: the members of a sample, elements of fields, splits of archives, and refused input."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import dask
import numpy as np
import pyarrow as pa
import pytest
from conftest import TESTS
from PIL import Image
from webdataset_archives import archive, npy, picture, png, save

import daskdist
from daskdist import Dataset, TensorSpec, errors, read_webdataset
from daskdist.core.dataset_base import element_spec_of, node_of
from daskdist.core.spec import ElementSpec
from daskdist.formats.webdataset.decoding import Decoding
from daskdist.formats.webdataset.samples import Samples
from daskdist.formats.webdataset.webdataset_format import WebDataset
from daskdist.storage import byte_ranges
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws

DIGITS = TESTS / "data" / "webdataset-digits.tar"
TEXT = np.dtypes.StringDType()


def members_of(k, fields=("png", "cls", "json", "npy", "txt", "bin")):
    made = {
        "png": png(picture(k)),
        "cls": str(k - 3).encode(),
        "json": json.dumps({"n": k, "box": {"x": k / 2, "tags": ["a"] * (k % 3)}}).encode(),
        "npy": npy(np.arange(k % 3, dtype=np.float32)),
        "txt": f"sample {k} ü".encode(),
        "bin": bytes([k, 0]),
    }
    return [(f"train/{k:04d}.{name}", made[name]) for name in fields]


def element(k):
    text, tags = np.empty((), TEXT), np.array(["a"] * (k % 3), TEXT)
    text[()] = f"sample {k} ü"
    return {
        "__key__": f"train/{k:04d}",
        "png": picture(k),
        "cls": np.int64(k - 3),
        "json": {"n": np.int64(k), "box": {"x": np.float64(k / 2), "tags": tags}},
        "npy": np.arange(k % 3, dtype=np.float32),
        "txt": str(text),
        "bin": np.array(bytes([k, 0]), object)[()],
    }


def read_with(form, path):
    splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    return [value for split in splits for value in form.read(split).elements()]


class TestWebDataset(FormatLaws):
    def make_format(self):
        return WebDataset()

    def write(self, directory):
        written = {}
        for number, keys in enumerate([range(2), range(2, 4)]):
            written[save(directory, [m for k in keys for m in members_of(k)], f"{number}.tar")] = list(
                map(element, keys)
            )
        return written

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        # An archive without samples would have another spec, so there is none here; TestColumns has one.
        files = self.write(tmp_path)
        form = self.make_format()
        with dask.config.set({"daskdist.split-bytes": 30_000}):
            assert [len(form.list_splits(path, 0, FirstFile(path, form.spec(path)))) > 1 for path in files] == [
                True,
                True,
            ]


class TestColumns(FormatLaws):
    split_bytes = "20 kB"

    """Fields whose spec is known from their names, so that an archive may be empty."""

    def make_format(self):
        return WebDataset({"x": "png", "y": ["cls", "cls"], "key": "__key__"}, resize=(2, 5), missing={"cls": 7})

    def write(self, directory):
        written = {}
        for number, keys in enumerate([range(5), range(0), range(5, 7)]):
            members = [m for k in keys for m in members_of(k, ("png", "cls") if k % 2 else ("png",))]
            written[save(directory, members, f"{number}.tar")] = [
                {
                    "x": np.asarray(Image.fromarray(picture(k)).resize((5, 2), Image.Resampling.BILINEAR)),
                    "y": np.array([k - 3, k - 3] if k % 2 else [7, 7]),
                    "key": f"train/{k:04d}",
                }
                for k in keys
            ]
        return written

    def test_writes_what_it_reads(self, tmp_path):
        # The fields' names cannot be names of members, so the elements cannot be written.
        with pytest.raises(errors.ArgumentError, match=r"the field 'x' is .*call it 'x.npy'"):
            self.make_format().check(self.make_format().spec(next(iter(self.write(tmp_path)))))


class TestCompressed(TestWebDataset):
    def write(self, directory):
        written = {}
        compress = [gzip.compress, lambda data: pa.Codec("zstd").compress(data).to_pybytes()]
        for (path, rows), end, function in zip(
            super().write(directory).items(), (".tgz", ".tar.zst"), compress, strict=True
        ):
            made = path.removesuffix(".tar") + end
            Path(made).write_bytes(function(Path(path).read_bytes()))
            Path(path).unlink()
            written[made] = rows
        return written

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        form, files = self.make_format(), self.write(tmp_path)
        with dask.config.set({"daskdist.split-bytes": 2000}):
            assert all(len(form.list_splits(path, 0, FirstFile(path, form.spec(path)))) > 1 for path in files)


# --- files of others ---


def test_an_archive_of_webdataset_itself():
    ds = read_webdataset(DIGITS, image_mode=None)
    rows = list(ds)
    assert [row["__key__"] for row in rows] == [f"{k:05d}" for k in range(8)]
    assert [int(row["cls"]) for row in rows] == list(range(8))
    assert [int(row["json"]["i"]) for row in rows] == list(range(8))
    with tarfile.open(DIGITS) as tar:
        for row in rows:
            image = np.asarray(Image.open(tar.extractfile(f"{row['__key__']}.png")))
            np.testing.assert_array_equal(row["png"], image[:, :, None])
    assert list(ds.element_spec) == ["__key__", "cls", "json", "png"]
    assert ds.element_spec["png"] == TensorSpec((None, None, None), "uint8")
    assert read_webdataset(DIGITS).element_spec["png"] == TensorSpec((None, None, 3), "uint8")
    pairs = next(iter(read_webdataset(DIGITS, ("png", "cls")).batch(8)))
    assert pairs[0].shape == (8, 8, 8, 3)
    assert pairs[1].tolist() == list(range(8))


# --- samples ---


def test_members_of_one_key_in_a_row_are_a_sample(tmp_path):
    members = [
        ("x/", b""),
        ("README", b"of no sample"),
        ("__meta__/info.json", b"{}"),
        ("x/a.cls", b"1"),
        ("x/.hidden.cls", b"9"),
        ("x/a.seg.TXT", b"one"),
        ("y.z/a.cls", b"2\n"),
        ("y.z/a.seg.txt", b"two"),
        ("./b.cls", b"-3"),
        ("./b.seg.txt", b""),
    ]
    members[0] = (tarfile.TarInfo("x/"), b"")
    members[0][0].type = tarfile.DIRTYPE
    rows = list(read_webdataset(save(tmp_path, members)))
    assert [(row["__key__"], int(row["cls"]), row["seg.txt"]) for row in rows] == [
        ("x/a", 1, "one"),
        ("y.z/a", 2, "two"),
        ("./b", -3, ""),
    ]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("split_bytes", [600, 2000, "16 MiB"])
def test_names_of_any_length(tmp_path, form, split_bytes):
    folder = "/".join(["a folder of some length"] * (5 if form == tarfile.USTAR_FORMAT else 20))
    names = [f"{folder}/{k}" for k in range(6)] + ([] if form == tarfile.USTAR_FORMAT else ["ü" * 150])
    path = save(tmp_path, [(f"{name}.{end}", b"5") for name in names for end in ("cls", "txt")], form=form)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        assert [(row["__key__"], int(row["cls"])) for row in read_webdataset(path)] == [(name, 5) for name in names]


def test_archives_put_one_after_the_other(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(archive([("a.cls", b"1")]) + archive([("a.cls", b"2")]))
    for split_bytes in (512, "16 MiB"):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            assert [int(cls) for cls in read_webdataset(path, "cls")] == [1, 2]


def test_sizes_in_other_spellings(tmp_path):
    # The program star writes sizes above 8 GiB in binary, and may do so for small ones; checksums begin with spaces.
    data = bytearray(archive([("a.cls", b"12"), ("b.cls", b"3")]))
    data[124:136] = b"\x80" + (2).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = f"{sum(data[:512]):6o} \0".encode()
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    assert [int(cls) for cls in read_webdataset(path, "cls")] == [12, 3]


def test_samples_of_one_shape_stack_and_others_do_not(tmp_path):
    shapes = [(2, 3), (2, 3), (4, 3), (4, 5)]
    path = save(tmp_path, [(f"{k}.png", png(picture(k, *shape))) for k, shape in enumerate(shapes)])
    ds = read_webdataset(path, "png")
    assert [image.shape for image in ds] == [(2, 3, 3), (2, 3, 3), (4, 3, 3), (4, 5, 3)]
    assert [batch.shape for batch in ds.take(2).batch(2)] == [(2, 2, 3, 3)]
    assert [image.shape for image in ds.take(3).map(lambda image: image + 1)] == [(2, 3, 3), (2, 3, 3), (4, 3, 3)]
    with pytest.raises(errors.StackError):
        list(ds.batch(4))
    resized = read_webdataset(path, "png", resize=(6, 7))
    assert resized.element_spec == TensorSpec((6, 7, 3), "uint8")
    assert next(iter(resized.batch(4))).shape == (4, 6, 7, 3)


# --- what fields become ---


@pytest.mark.parametrize(
    ("field", "content", "expected"),
    [
        ("cls", b" 7\n", np.int64(7)),
        ("index", b"-1", np.int64(-1)),
        ("txt", "ü\n".encode(), "ü\n"),
        ("transcript", b"", ""),
        ("bin", b"\0\1\0", b"\0\1\0"),
        ("pyd", b"cos\nsystem\n(S'false'\ntR.", b"cos\nsystem\n(S'false'\ntR."),
        ("npy", npy(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)),
        ("npy", npy(np.asfortranarray(np.arange(6).reshape(2, 3))), np.arange(6).reshape(2, 3)),
        ("npy", npy(np.arange(3, dtype=">i2")), np.arange(3, dtype=np.int16)),
        ("npy", npy(np.float32(1.5)), np.float32(1.5)),
        ("npy", npy(np.array(["a", "bc"])), np.array(["a", "bc"], TEXT)),
        ("npy", npy(np.zeros((2, 0))), np.zeros((2, 0))),
        ("json", b"[1, 2.5]", np.array([1, 2.5])),
        ("json", b"true", np.True_),
        ("json", b'{"a": null, "b": "x"}', {"a": np.float64("nan"), "b": "x"}),
        ("json", b"[[1], []]", daskdist.Ragged(np.array([1]), [0, 1, 1])),
        ("png", png([[0, 255]]), np.array([[[0] * 3, [255] * 3]], np.uint8)),
        ("bmp", png([[[1, 2, 3]]], "BMP"), np.array([[[1, 2, 3]]], np.uint8)),
        ("webp", png([[[9, 9, 9]]], "WEBP", lossless=True), np.array([[[9, 9, 9]]], np.uint8)),
        ("png", png([[[1, 2, 3, 0]]]), np.array([[[1, 2, 3]]], np.uint8)),
    ],
)
def test_fields(tmp_path, field, content, expected):
    ds = read_webdataset(save(tmp_path, [(f"a.{field}", content), (f"b.{field}", content)]), [field])
    assert len(list(ds)) == 2
    for row in ds:
        value = row[field]
        if isinstance(expected, daskdist.Ragged):
            assert value.tolist() == expected.tolist()
        elif isinstance(expected, (str, bytes)):
            assert value == expected
        else:
            daskdist.testing.same_elements([value], [expected])
    assert ElementSpec.of(next(iter(ds))).most_general_common_spec(element_spec_of(ds)) is not None


@pytest.mark.parametrize(
    ("mode", "shapes"),
    [
        ("RGB", [(1, 2, 3)] * 5),
        ("L", [(1, 2, 1)] * 5),
        ("RGBA", [(1, 2, 4)] * 5),
        (None, [(1, 2, 1), (1, 2, 3), (1, 2, 4), (1, 2, 4), (1, 2, 1)]),
    ],
)
def test_modes_of_images(tmp_path, mode, shapes):
    gray, color, alpha = (
        Image.new("L", (2, 1), 9),
        Image.new("RGB", (2, 1), (9, 9, 9)),
        Image.new("RGBA", (2, 1), (9,) * 4),
    )
    palette = color.quantize(2)
    palette.info["transparency"] = b"\x05\x06"
    contents = []
    for image in (gray, color, alpha, palette, gray.convert("1")):
        file = io.BytesIO()
        image.save(file, "PNG")
        contents.append(file.getvalue())
    path = save(tmp_path, [(f"{k}.png", content) for k, content in enumerate(contents)])
    images = list(read_webdataset(path, "png", image_mode=mode))
    assert [image.shape for image in images] == shapes
    assert {image.dtype for image in images} == {np.dtype(np.uint8)}
    if mode is not None:
        assert {int(image[0, 0, 0]) for image in images[:4]} == {9}


def test_fields_of_other_kinds_than_their_names_say(tmp_path):
    path = save(tmp_path, [("a.id", b"n7"), ("a.left.png", b"no image"), ("a.meta", b"[1]"), ("a.json", b'{"x": 1}')])
    with pytest.raises(
        errors.FileError, match=r"a\.tar.*its first 'id' is 'n7', but a field of that name is an integer; .*decode="
    ):
        list(read_webdataset(path, "id"))
    (row,) = read_webdataset(path, decode={"id": "text", "png": "raw", "meta": "json", "json": "text"})
    assert (row["id"], row["left.png"], row["meta"].tolist(), row["json"]) == ("n7", b"no image", [1], '{"x": 1}')
    (row,) = read_webdataset(path, decode=False)
    assert [row[name] for name in ("id", "left.png", "meta", "json")] == [b"n7", b"no image", b"[1]", b'{"x": 1}']
    with pytest.raises(errors.ArgumentError, match=r"decode: 'id' is 'txt'; there are .*did you mean 'text'"):
        read_webdataset(path, decode={"id": "txt"})
    with pytest.raises(errors.ArgumentError, match="decode is 'raw'; give True, False, or a dict"):
        read_webdataset(path, decode="raw")


def test_json_of_another_structure_than_the_first(tmp_path):
    def path_of(*contents):
        return save(tmp_path, [(f"{k}.json", json.dumps(content).encode()) for k, content in enumerate(contents)])

    many = [{"a": 1}] * 70
    assert [float(x["a"]) for x in read_webdataset(path_of({"a": 1}, {"a": 2.5}), "json")] == [1, 2.5]
    for other, reason in [
        ({"a": 1.5}, r"sample '70' is .*'a' is 1\.5, but int64 is expected"),
        ({"a": "x"}, "'a' is 'x'"),
        ({"a": True}, "'a' is True"),
        ({"a": None}, "'a' is None"),
        ({"a": 2**63}, "'a' is 9223372036854775808, but int64 is expected"),
        ({}, "it lacks 'a'"),
        ({"a": 1, "b": 2}, r"it has 'b' besides \['a'\]"),
        ([1], r"it is \[1\], but an object is expected"),
    ]:
        path = path_of(*many, other, {"a": 3})
        with pytest.raises(errors.FileError, match=rf"{reason}.*decode=\{{'json': 'text'\}}"):
            list(read_webdataset(path, "json"))
        with pytest.raises(errors.FileError, match=reason) as caught:
            list(read_webdataset(path, "json").ignore_errors())
        assert type(caught.value) is errors.FileError
        assert len(list(read_webdataset(path, decode={"json": "text"}))) == 72
    for first, reason in [
        ({}, "structs of no fields"),
        ([{"a": 1}], "lists of structs"),
        ([1, "x"], "a value is a number in some records, but text in others"),
        ({"a": 2**64}, "a value is 18446744073709551616, which does not fit into 64 bits"),
        ({"a": [-1, 2**63]}, "a value is negative in some records, but too large for int64"),
    ]:
        with pytest.raises(
            errors.FileError,
            match=rf"a\.tar: field 'json' cannot be converted to arrays: .*{reason}.*decode=\{{'json': 'text'\}}",
        ):
            read_webdataset(path_of(first))


@pytest.mark.parametrize("values", [[2**63, 1], [1, 2**63], [2**64 - 1, 0]])
def test_whole_numbers_of_64_bits_in_json(tmp_path, values):
    path = save(tmp_path, [(f"{k}.json", json.dumps({"x": value}).encode()) for k, value in enumerate(values)])
    ds = read_webdataset(path, "json")
    assert ds.element_spec == {"x": TensorSpec((), "uint64")}
    assert [int(row["x"]) for row in ds] == values
    # As the reader of JSON lines.
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    assert ds.element_spec == daskdist.read_json(tmp_path / "a.jsonl").element_spec
    ds.map(lambda row: {"json": row}).to_webdataset(tmp_path / "copy")
    assert [int(row["x"]) for row in read_webdataset(tmp_path / "copy", "json")] == values
    path = save(tmp_path, [(f"{k}.json", b"%d" % value) for k, value in enumerate([2**63] * 64 + [-1])])
    with pytest.raises(errors.FileError, match=r"sample '64' is -1, .*it is -1, but uint64 is expected"):
        list(read_webdataset(path, "json"))


def test_arrays_of_another_dtype_or_rank(tmp_path):
    for other, said in [(np.arange(2), r"int64\[2\]"), (np.zeros((1, 1), np.float32), r"float32\[1, 1\]")]:
        arrays = [np.zeros(3, np.float32)] * 64 + [other]
        path = save(tmp_path, [(f"{k:02d}.npy", npy(array)) for k, array in enumerate(arrays)])
        with pytest.raises(
            errors.FileError, match=rf"'64.npy' is {said}, but those of the first samples are float32 with 1 axes"
        ):
            list(read_webdataset(path))
    path = save(tmp_path, [("0.npy", npy(np.zeros(1))), ("1.npy", npy(np.arange(2)))])
    with pytest.raises(
        errors.FileError, match=r"the field 'npy' is float64 of 1 axes, int64 of 1 axes; get bytes with"
    ):
        read_webdataset(path)


# --- fields that some lack ---


def test_a_sample_that_lacks_a_field(tmp_path):
    path = save(tmp_path, [("a.cls", b"1"), ("a.txt", b"x"), ("b.cls", b"2"), ("c.txt", b"z")])
    with pytest.raises(
        errors.FileError, match=r"a\.tar.*sample 'b' at byte 2048: has no field 'txt'.*missing=\{'txt': \.\.\.\}"
    ):
        list(read_webdataset(path))
    with pytest.raises(errors.FileError, match=r"sample 'c'.*has no field 'cls'"):
        list(read_webdataset(path, ["cls"]))
    rows = list(read_webdataset(path, missing={"cls": -1, "txt": "?"}))
    assert [(row["__key__"], int(row["cls"]), row["txt"]) for row in rows] == [
        ("a", 1, "x"),
        ("b", 2, "?"),
        ("c", -1, "z"),
    ]
    with pytest.raises(errors.FileError, match=r"sample 'b' .*has no field 'txt'") as caught:
        list(read_webdataset(path).ignore_errors())
    assert type(caught.value) is errors.FileError


def test_replacements_of_missing_members_of_every_kind(tmp_path):
    others = [(f"z.{name.partition('.')[2]}", content) for name, content in members_of(3)]
    path = save(tmp_path, [*others, ("b.other", b"")])
    stand_ins = {
        "png": np.zeros((1, 1, 3), np.uint8),
        "cls": 4,
        "json": {"n": 0, "box": {"x": 0, "tags": []}},
        "npy": np.zeros(0, np.float32),
        "txt": "",
        "bin": b"",
        "never": b"at all",
    }
    rows = list(read_webdataset(path, [*stand_ins, "__key__"], missing=stand_ins))
    assert [row["__key__"] for row in rows] == ["z", "b"]
    assert rows[1]["png"].shape == (1, 1, 3)
    assert (int(rows[1]["cls"]), rows[1]["txt"], rows[1]["bin"], rows[0]["never"]) == (4, "", b"", b"at all")
    assert (int(rows[1]["json"]["n"]), len(rows[1]["json"]["box"]["tags"]), len(rows[1]["npy"])) == (0, 0, 0)
    for name, value in [("cls", "x"), ("png", np.zeros((1, 3))), ("txt", 3), ("json", {"m": 1}), ("npy", b"x")]:
        with pytest.raises(errors.ArgumentError, match=f"missing: .* cannot be a value of '{name}'"):
            read_webdataset(path, [name], missing={name: value})
    with pytest.raises(errors.ArgumentError, match=r"missing: none of the first samples has 'other.npy'"):
        read_webdataset(path, missing={"other.npy": 1})


def test_a_field_that_the_first_samples_have_not(tmp_path):
    members = [(f"{k:03d}.cls", b"1") for k in range(99)] + [("100.cls", b"1"), ("100.txt", b"x")]
    path = save(tmp_path, members)
    with pytest.raises(errors.FileError, match=r"sample '100'.*a field 'txt', which the first samples.*columns="):
        list(read_webdataset(path))
    assert len(list(read_webdataset(path, ["cls"]))) == 100
    assert len(list(read_webdataset(path, ["cls", "txt"], missing={"txt": ""}))) == 100


def test_invalid_columns_and_options_are_refused(tmp_path):
    path = save(tmp_path, members_of(1))
    with pytest.raises(errors.ArgumentError, match="no column 'jpg'; there are '__key__', 'png'"):
        read_webdataset(path, ["jpg"])
    with pytest.raises(errors.ArgumentError, match="only integer fields can be joined in an array"):
        read_webdataset(path, {"x": ["cls", "bin"]})
    for options, said in [
        ({"image_mode": "P"}, "the mode of images is 'P'"),
        ({"resize": 7}, "resize is 7"),
        ({"resize": (0, 3)}, r"resize is \(0, 3\)"),
        ({"compression": "rar"}, "compression is 'rar'"),
    ]:
        with pytest.raises(errors.ArgumentError, match=said):
            read_webdataset(path, **options)


def test_archives_without_samples(tmp_path):
    empty, full = save(tmp_path, [], "a.tar"), save(tmp_path, [("b.cls", b"1")], "b.tar")
    (tmp_path / "c.tar").write_bytes(b"")
    with pytest.raises(errors.FileError, match=r"a\.tar: has no samples to infer the fields"):
        read_webdataset(empty)
    assert [int(row["cls"]) for row in read_webdataset([empty, full])] == [1]
    assert [int(cls) for cls in read_webdataset([empty, full], "cls")] == [1]
    assert [int(row["cls"]) for row in read_webdataset([full, empty])] == [1]
    with pytest.raises(errors.FileError, match=r"c\.tar: has 0 bytes; an archive"):
        list(read_webdataset([full, tmp_path / "c.tar"]))


# --- reading in parts ---


def test_ranges_before_are_passed_over_without_being_read(tmp_path, monkeypatch):
    path = save(tmp_path, [(f"{k:03d}.bin", bytes(50_000)) for k in range(100)])
    with dask.config.set({"daskdist.split-bytes": "500 kB"}):
        form = WebDataset(decode=False)
        splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    counted = []
    known = byte_ranges.Storage.open

    class Counting:
        def __init__(self, file):
            self.file, self.seek = file, file.seek

        def read(self, num_bytes=-1):
            data = self.file.read(num_bytes)
            counted.append(len(data))
            return data

    @contextlib.contextmanager
    def opened(self, path):
        with known(self, path) as file:
            yield Counting(file)

    monkeypatch.setattr(byte_ranges.Storage, "open", opened)
    rows = form.read(splits[-2])
    keys = [int(row["__key__"]) for row in rows.elements()]
    assert keys == list(range(keys[0], keys[0] + len(keys)))
    assert keys[0] > 80
    # This is far less than the first nine tenths of the archive, which are not read.
    assert sum(counted) < 1_000_000


def test_a_framing_finds_the_same_by_hops_and_by_reading(tmp_path):
    data = archive([m for k in range(9) for m in members_of(k)], form=tarfile.PAX_FORMAT) + archive(members_of(10))
    framing = Samples()
    places = {framing.boundary(data, at, is_end=True) for at in range(0, len(data) + 1, 497)}
    assert len(places) > 10
    for at in range(0, len(data) + 1, 497):
        expected = framing.boundary(data, at, is_end=True)
        assert framing.hop(lambda start, stop: data[start:stop], 0, at, len(data)) == expected
        actual = framing.boundary(data[: at + 4000], at, is_end=False)
        assert actual in (None, expected)


def test_many_archives_list_fast(tmp_path):
    first = Path(save(tmp_path, [("a.cls", b"1")]))
    content = first.read_bytes()
    for number in range(1000):
        (tmp_path / f"{number:04d}.tar").write_bytes(content)
    start = time.thread_time()
    ds = read_webdataset(tmp_path)
    assert len(node_of(ds).splits()) == 1001
    assert time.thread_time() - start < 5


def test_braces_stand_for_many_files(tmp_path):
    for name in ("a-08", "a-09", "a-10", "b-x", "{c,d}"):
        save(tmp_path, [(f"{name}.cls", b"1")], f"{name}.tar")

    def keys(name):
        return list(read_webdataset(f"{tmp_path}/{name}.tar", "__key__"))

    assert keys("a-{08..10}") == ["a-08", "a-09", "a-10"]
    assert keys("a-{10..08}") == ["a-10", "a-09", "a-08"]
    assert keys("{a-09,b-x}") == ["a-09", "b-x"]
    assert keys("{a,a}-{09..10}") == ["a-09", "a-10", "a-09", "a-10"]
    assert keys("{c,d}") == ["{c,d}"]
    with pytest.raises(errors.FileError, match=r"a-07\.tar"):
        keys("a-{07..08}")
    with pytest.raises(errors.ArgumentError, match="stands for 100,000,000 files; the limit is 1,000,000"):
        keys("a-{0..99999999}")


def test_an_archive_in_an_archive_of_another_kind(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("in/a.tar", archive([m for k in range(5) for m in members_of(k)]))
    with dask.config.set({"daskdist.split-bytes": "20 kB"}):
        rows = list(read_webdataset(f"zip://in/a.tar::{path}"))
    daskdist.testing.same_elements(rows, [element(k) for k in range(5)])


# --- writing ---


def written(tmp_path, rows, name="w.tar"):
    form = WebDataset(image_mode=None)
    ds = Dataset.from_tensor_slices(rows)
    form.check(element_spec_of(ds))
    path = tmp_path / name
    with path.open("wb") as file:
        (block,) = [node_of(ds).lower(()).function(split) for split in node_of(ds).splits()]
        form.write(block, file)
    return path


def test_samples_are_written_as_the_library_reads_them(tmp_path):
    rows = {
        "__key__": np.array(["a/0", "a/1"], TEXT),
        "png": np.stack([picture(0), picture(1)]),
        "cls": np.array([3, -4], np.int16),
        "txt": np.array(["ü", ""], TEXT),
        "x.npy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bin": np.array([b"\0a\0", b""], object),
        "json": {"n": np.array([1, 2]), "v": np.array([[0.5], [1.5]])},
    }
    path = written(tmp_path, rows)
    with tarfile.open(path) as tar:
        names = [member.name for member in tar]
        assert names[:6] == [f"a/0.{name}" for name in list(rows)[1:]]
        assert {member.mtime for member in tar} == {0}
        assert tar.extractfile("a/1.cls").read() == b"-4"
        assert json.load(tar.extractfile("a/0.json")) == {"n": 1, "v": [0.5]}
        np.testing.assert_array_equal(np.load(io.BytesIO(tar.extractfile("a/1.x.npy").read())), rows["x.npy"][1])
        np.testing.assert_array_equal(np.asarray(Image.open(tar.extractfile("a/0.png"))), picture(0))
    first, second = read_webdataset(path)
    assert (first["__key__"], second["__key__"], int(second["cls"]), first["txt"]) == ("a/0", "a/1", -4, "ü")
    assert path.read_bytes() == written(tmp_path, rows, "again.tar").read_bytes()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("png", (2, 3, 1)),
        ("png", (2, 3, 2)),
        ("png", (2, 3, 4)),
        ("webp", (2, 3, 3)),
        ("bmp", (2, 3, 3)),
        ("tif", (2, 3, 4)),
        ("ppm", (2, 3, 3)),
        ("pgm", (2, 3, 1)),
    ],
)
def test_images_come_back_as_they_were(tmp_path, name, shape):
    images = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
    path = written(tmp_path, {name: images})
    np.testing.assert_array_equal(np.stack(list(read_webdataset(path, name, image_mode=None))), images)


def test_generated_keys_are_unique_over_files(tmp_path):
    one = written(tmp_path, {"cls": np.arange(3)}, "1.tar")
    other = written(tmp_path, {"cls": np.arange(3, 6)}, "2.tar")
    keys = [row["__key__"] for row in read_webdataset([one, other])]
    assert len(set(keys)) == 6
    assert [key[:7] for key in keys] == ["000000-", "000001-", "000002-"] * 2
    assert read_webdataset(one, "cls").cardinality() == -2
    assert [int(cls) for cls in read_webdataset([one, other], "cls")] == list(range(6))


@pytest.mark.parametrize(
    ("element", "why"),
    [
        ((np.zeros(2), 1), "an element is .*map it to a dict first"),
        ({"x": np.zeros(2, np.float32)}, "'x' .* a field of that name is bytes; call it 'x.npy'"),
        ({"x": np.int64(1)}, "call it 'x.cls'"),
        ({"x": "text"}, "call it 'x.txt'"),
        ({"x": {"a": 1}}, "'x' is a nest; call it 'x.json'"),
        ({"cls": 1.5}, "a field of that name is a whole number; call it 'cls.npy'"),
        ({"txt": 1}, "a field of that name is text"),
        ({"png": np.zeros((2, 2, 3), np.float32)}, "an image is uint8 of shape"),
        ({"jpg": np.zeros((2, 2, 4), np.uint8)}, "such an image has 1 or 3 channels"),
        ({"gif": np.zeros((2, 2, 3), np.uint8)}, "which can be written as png, .*call it 'gif.png'"),
        ({"a/b": b""}, "'a/b' is not a file extension"),
        ({"PNG": b""}, "'PNG' is not a file extension"),
        ({"__key__": 1, "cls": 1}, "'__key__' is .*keys are text"),
        ({"__key__": "a"}, "no fields besides its key"),
        ({"npy": "a"}, "a field of that name is an array of numbers; call it 'npy.txt'"),
    ],
)
def test_elements_that_are_no_samples(element, why):
    with pytest.raises(errors.ArgumentError, match=why):
        WebDataset().check(ElementSpec.of(element))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["a", "a"], "row 1 has the invalid key 'a': another row has the same key"),
        (["a.b", "c"], r"row 0 has the invalid key 'a\.b': it is empty or has a dot after the last slash"),
        (["", "c"], "row 0 has the invalid key ''"),
        (["/a", "c"], "row 0 .*absolute"),
        (["a/../../b", "c"], "row 0 .*points outside"),
    ],
)
def test_invalid_keys_are_refused(tmp_path, keys, why):
    with pytest.raises(errors.ArgumentError, match=why):
        written(tmp_path, {"__key__": np.array(keys, TEXT), "cls": np.arange(2)})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("json", b"x", "Object of type bytes"),
        ("json", np.datetime64("2024-01-01", "ns"), "JSON has no times"),
        ("json", {"a": [np.timedelta64(5, "Y")]}, "JSON has no times"),
        ("json", {1: 2, "1": 3}, "two of the keys 1, '1' are the same as text"),
        ("cls", np.uint64(2**63), "does not fit into 64 bits"),
    ],
)
def test_values_that_cannot_be_written(tmp_path, field, value, why):
    with pytest.raises(errors.ArgumentError, match=f"row 0: the field '{field}' cannot be written: .*{why}"):
        Dataset.from_list([{field: value}]).to_webdataset(tmp_path)


# --- the library ---


def test_without_pillow(tmp_path, monkeypatch):
    path = save(tmp_path, members_of(1))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'daskdist\[images\]'"):
        read_webdataset(path)
    assert [int(cls) for cls in read_webdataset(path, "cls")] == [-2]


def test_the_decoder_is_chosen_by_the_whole_name_first():
    decoding = Decoding({"a.png": "raw", "png": "text"})
    assert [decoding.kind(name) for name in ("a.png", "b.png", "png", "jpg", "x")] == [
        "raw",
        "text",
        "text",
        "image",
        "raw",
    ]


def test_only_bytes_are_written_as_bytes():
    # In Python, bytes(3) are three zeros.
    assert Decoding().encode("raw", np.array(b"abc", object)) == b"abc"
    for value in (3, [1, 2], "text", None):
        given = np.empty((), object)
        given[()] = value
        with pytest.raises(ValueError, match="field 'raw' holds bytes, but a value is"):
            Decoding().encode("raw", given)


def test_a_copy_reads_the_same(tmp_path):
    path = tmp_path / "a.tar"
    shutil.copy(DIGITS, path)
    form = WebDataset()
    daskdist.testing.same_elements(read_with(form, str(path)), read_with(replace(form), str(DIGITS)))
