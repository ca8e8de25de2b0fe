"""``tf.train.Example``: features that are read, input that is refused, and records that are written.

The tests build examples byte by byte; the expected values are those of TensorFlow 2.21's
``tf.io.parse_single_example``.
"""

from __future__ import annotations

import random
import struct

import dask
import numpy as np
import pytest

from daskdist import FixedLenFeature, FixedLenSequenceFeature, Options, Ragged, VarLenFeature, errors, read_tfrecord
from daskdist.core.block import Block, Bundle
from daskdist.core.structure import Structure
from daskdist.formats.tfrecord.example import Examples
from daskdist.formats.tfrecord.record_framing import framed
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.testing import FormatLaws

TEXT = np.dtypes.StringDType()


# --- examples, byte by byte ---


def varint(number):
    number, made = number & (2**64 - 1), b""
    while number > 127:
        number, made = number >> 7, made + bytes([number & 127 | 128])
    return made + bytes([number])


def message(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def floats(*values):
    return message(2, message(1, struct.pack(f"<{len(values)}f", *values)))


def integers(*values):
    return message(3, message(1, b"".join(map(varint, values))))


def strings(*values):
    return message(1, b"".join(message(1, value) for value in values))


def entry(name, feature):
    return message(1, message(1, name.encode()) + message(2, feature))


def example(*entries, **features):
    return message(1, b"".join(entries) + b"".join(entry(name, feature) for name, feature in features.items()))


def parsed(records, **features):
    """Return the columns of records by name."""
    lengths = np.array([len(record) for record in records])
    reader = Examples(features)
    columns, rows, refused = reader.parse(b"".join(records), np.cumsum(lengths) - lengths, lengths)
    assert sorted([*rows.tolist(), *(record.row for record in refused)]) == list(range(len(records)))
    return reader.spec.structure.pack(columns), refused


FLOAT, INTEGER = FixedLenFeature((), "float32"), FixedLenFeature((), "int64")
PAIR, TWO = FixedLenFeature((2,), "float32"), FixedLenFeature((2,), "int64")
SEQUENCE = FixedLenSequenceFeature((2,), "float32", allow_missing=True)
UNPACKED = message(2, varint(13) + struct.pack("<f", 1) + varint(13) + struct.pack("<f", 2))


@pytest.fixture(params=[1, 100], ids=["alone", "among many"])
def number(request):
    return request.param


@pytest.mark.parametrize(
    ("record", "feature", "value"),
    [
        (example(a=floats(1)), FLOAT, 1.0),
        (example(a=floats(1, 2)), PAIR, [1, 2]),
        (example(a=floats(1, 2, 3, 4)), FixedLenFeature([2, 2], "float32"), [[1, 2], [3, 4]]),
        (example(a=UNPACKED), PAIR, [1, 2]),
        (example(a=integers(1, -2)), TWO, [1, -2]),
        (example(a=integers(-(2**63), 2**63 - 1)), TWO, [-(2**63), 2**63 - 1]),
        (example(a=message(3, varint(8) + varint(5) + varint(8) + varint(-6))), TWO, [5, -6]),
        # These varints have more bytes than needed, and more than 64 bits.
        (example(a=message(3, message(1, b"\x81\x80\x80\x00\x02"))), TWO, [1, 2]),
        (example(a=message(3, message(1, b"\xff" * 9 + b"\x7f"))), INTEGER, -1),
        (example(a=strings(b"x", b"")), FixedLenFeature((2,), bytes), [b"x", b""]),
        (example(a=strings("ü".encode())), FixedLenFeature((), str), "ü"),
        (example(a=floats()), FixedLenFeature((0,), "float32"), []),
        # The feature is missing or empty.
        (example(b=floats(1)), FixedLenFeature((2,), "float32", [1, 2]), [1, 2]),
        (example(b=floats(1)), FixedLenFeature((2, 2), "float32", 7), [[7, 7], [7, 7]]),
        (example(a=b""), FixedLenFeature((), "float32", 3), 3),
        (b"", FixedLenFeature((), bytes, b"none"), b"none"),
        (example(), FixedLenFeature((), str, "none"), "none"),
        (example(b=floats(1)), VarLenFeature("float32"), []),
        (example(a=b""), VarLenFeature("float32"), []),
        (b"", VarLenFeature("int64"), []),
        (example(b=floats(1)), SEQUENCE, np.zeros((0, 2))),
        (example(a=floats()), SEQUENCE, np.zeros((0, 2))),
        (example(a=b""), SEQUENCE, np.zeros((0, 2))),
        (example(), FixedLenSequenceFeature((), "int64", True, 4), []),
        (example(a=floats(1, 2, 3, 4)), SEQUENCE, [[1, 2], [3, 4]]),
        (example(a=floats(1, 2, 3)), VarLenFeature("float32"), [1, 2, 3]),
        (example(a=strings(b"x", b"")), VarLenFeature(bytes), [b"x", b""]),
        # The feature appears twice: the last one counts.
        (example(entry("a", floats(1, 2)), entry("a", floats(3, 4))), PAIR, [3, 4]),
        (example(entry("a", integers(1)), entry("a", floats(3, 4))), PAIR, [3, 4]),
        (example(entry("a", floats(1, 2)), entry("a", floats(3))), VarLenFeature("float32"), [3]),
        (
            example(entry("a", floats(1, 2)), entry("a", b"")),
            FixedLenFeature((2,), "float32", [8, 9]),
            [1, 2],
        ),
        (example(a=floats(1, 2)) + example(a=floats(3, 4)), PAIR, [3, 4]),
        (example(b=floats(1)) + example(a=floats(3, 4)), PAIR, [3, 4]),
        # Fields are in another order, or unknown fields and features are in between.
        (message(1, message(1, message(2, floats(1, 2)) + message(1, b"a"))), PAIR, [1, 2]),
        (varint(9 << 3) + varint(5) + example(a=floats(1, 2)), PAIR, [1, 2]),
        (example(a=floats(1, 2) + varint(9 << 3) + varint(5)), PAIR, [1, 2]),
        (example(entry("z", b"\xff\xff"), entry("a", floats(1, 2))), PAIR, [1, 2]),
        (message(1, message(1, message(1, b"\xff") + message(2, floats(1))) + entry("a", floats(1, 2))), PAIR, [1, 2]),
    ],
)
def test_parsed_features(record, feature, value, number):
    columns, refused = parsed([record] * number, a=feature)
    assert not refused
    assert len(columns["a"]) == number
    for row in columns["a"]:
        assert row.dtype == feature.spec.dtype if isinstance(row, np.ndarray) else feature.spec.shape == ()
        assert np.array_equal(row, np.array(value, feature.spec.dtype))


@pytest.mark.parametrize(
    ("record", "feature", "reason"),
    [
        (example(b=floats(1)), FLOAT, "feature 'a' is missing; give it a default_value"),
        (b"", FLOAT, "feature 'a' is missing"),
        (example(a=b""), FLOAT, "feature 'a' is missing"),
        (example(), FixedLenFeature((0,), "float32"), "feature 'a' is missing"),
        (example(), FixedLenSequenceFeature((), "int64"), "feature 'a' is missing; give it allow_missing=True"),
        (example(a=floats()), FLOAT, r"feature 'a' has 0 values; shape \(\) takes 1"),
        (example(a=floats()), FixedLenFeature((), "float32", 3), r"feature 'a' has 0 values"),
        (example(a=floats(1, 2)), FLOAT, r"feature 'a' has 2 values; shape \(\) takes 1"),
        (example(a=floats(1, 2)), FixedLenFeature((3,), "float32"), r"has 2 values; shape \(3,\) takes 3"),
        (example(a=integers(1, 2)), INTEGER, r"has 2 values; shape \(\) takes 1"),
        (example(a=strings(b"x", b"y")), FixedLenFeature((), bytes), r"has 2 values; shape \(\) takes 1"),
        (example(a=floats(1, 2, 3)), SEQUENCE, r"has 3 values; shape \(2,\) takes 2 at a time"),
        (example(a=integers(1)), FLOAT, "feature 'a' holds int64, but float32 is expected"),
        (example(a=integers()), FixedLenFeature((), "float32", 3), "holds int64, but float32"),
        (example(a=integers()), VarLenFeature("float32"), "holds int64, but float32"),
        (example(a=floats(1)), VarLenFeature(str), "holds float32, but bytes"),
        (example(a=integers(1)), SEQUENCE, "holds int64, but float32"),
        (example(entry("a", floats(1, 2)), entry("a", integers(3, 4))), PAIR, "holds int64, but float32"),
        (example(a=strings(b"\xff")), FixedLenFeature((), str), "feature 'a' is not UTF-8: invalid start byte"),
        (example(a=message(3, message(1, b"\x81" * 10 + b"\x01"))), INTEGER, "an integer of 11 bytes"),
        (example(a=message(3, message(1, b"\x01\x81"))), INTEGER, "its integers end within one"),
        (example(a=message(2, message(1, b"12345"))), FLOAT, "5 bytes of floats, which have four each"),
        (example(a=b"\xff\xff"), FLOAT, "feature 'a' is not a list of values"),
        (b"garbage!", FLOAT, "not an example"),
        (example(a=floats(1)) + b"\xff", FLOAT, "it ends within a number"),
        (example(a=floats(1))[:-1], FLOAT, r"truncated one: a field of \d+ bytes, but \d+ are left"),
        (varint(5 << 3 | 3) + varint(5 << 3 | 4), VarLenFeature("float32"), "a field of wire type 3"),
    ],
)
def test_refused_records(record, feature, reason, number):
    good = {"float32": floats(1, 2), "int64": integers(7), "object": strings(b"x")}
    size = None if isinstance(feature, VarLenFeature) else int(np.prod(feature.shape))
    fill = {"float32": floats(*[1] * (size or 0)), "int64": integers(*[1] * (size or 0))}
    other = fill.get(str(feature.dtype), good["object"])
    records = [example(a=other)] * (number - 1)
    records.insert(number // 2, record)
    columns, refused = parsed(records, a=feature)
    assert len(columns["a"]) == number - 1
    ((row, actual, _),) = refused
    assert row == number // 2
    with pytest.raises(ValueError, match=reason):
        raise ValueError(actual)


def drawn(draws, damage):
    """Return an example of random features, some of which do not fit the requested ones."""
    entries = []
    for name, kind, count in (("a", 2, 3), ("bb", 3, 1), ("ccc", 1, 1), ("a longer name", 2, None), ("f", 1, None)):
        count = draws.choice([0, 1, 2, 5]) if count is None else count
        count += draws.random() < damage / 3
        kind = draws.choice([1, 2, 3]) if draws.random() < damage / 3 else kind
        if draws.random() < (0.1 if name in ("bb", "f") else damage / 3):
            continue
        if kind == 1:
            content = strings(*[draws.randbytes(draws.choice([0, 1, 3, 200])) for _ in range(count)])
        elif kind == 2:
            content = floats(*[draws.random() for _ in range(count)])
        else:
            content = integers(*[draws.choice([0, 1, -1, 300, 2**62, -(2**63)]) for _ in range(count)])
        entries.append(entry(name, content))
    if draws.random() < 0.3:
        draws.shuffle(entries)
    record = example(*entries, other=integers(1))
    return record[: draws.randrange(len(record))] if draws.random() < damage / 5 else record


@pytest.mark.parametrize("seed", range(10))
def test_records_parsed_together_equal_records_parsed_one_by_one(seed):
    draws = random.Random(seed)
    records = [drawn(draws, draws.choice([0, 0.3])) for _ in range(300)]
    reader = Examples(
        {
            "a": FixedLenFeature((3,), "float32"),
            "bb": FixedLenFeature((), "int64", -1),
            "ccc": FixedLenFeature((1, 1), bytes),
            "a longer name": VarLenFeature("float32"),
            "f": VarLenFeature(bytes),
        }
    )
    lengths = np.array([len(record) for record in records])
    columns, rows, refused = reader.parse(b"".join(records), np.cumsum(lengths) - lengths, lengths)
    assert 0 < len(refused) < 200
    report = {record.row: record.reason for record in refused}
    for row, record in enumerate(records):
        alone, _, why = reader.parse(record, np.zeros(1, np.int64), lengths[row : row + 1])
        assert [record.reason for record in why] == ([report[row]] if row in report else [])
        if row not in report:
            place = int(np.searchsorted(rows, row))
            for column, expected in zip(columns, alone, strict=True):
                assert np.array_equal(column[place], expected[0])


@pytest.mark.parametrize("seed", range(20))
def test_records_of_one_length_parsed_together_equal_those_parsed_one_by_one(seed):
    # Most records have the layout of the first; bits of some are flipped, in the layout or in values.
    draws = random.Random(seed)
    records = []
    for number in range(200):
        content = {"a": floats(*[draws.random() for _ in range(3)]), "s": strings(draws.randbytes(5))}
        records.append(bytearray(example(entry("n", integers(number % 100)), **content, other=integers(number % 3))))
    for _ in range(draws.choice([0, 1, 20, 300])):
        record = records[draws.randrange(draws.choice([1, len(records)]))]
        record[draws.randrange(len(record))] ^= 1 << draws.randrange(8)
    reader = Examples(
        {"a": FixedLenFeature((3,), "float32"), "n": VarLenFeature("int64"), "s": FixedLenFeature((), bytes, b"?")}
    )
    size, gap = len(records[0]), bytes(3)
    starts, lengths = np.arange(len(records)) * (size + 3), np.full(len(records), size)
    columns, rows, refused = reader.parse(b"".join(bytes(value) + gap for value in records), starts, lengths)
    report = {record.row: record.reason for record in refused}
    for row, record in enumerate(records):
        alone, _, why = reader.parse(bytes(record), np.zeros(1, np.int64), lengths[:1])
        assert [record.reason for record in why] == ([report[row]] if row in report else [])
        if row not in report:
            place = int(np.searchsorted(rows, row))
            for column, expected in zip(columns, alone, strict=True):
                assert np.asarray(column[place]).tobytes() == np.asarray(expected[0]).tobytes() or (
                    column[place] == expected[0]
                )


def test_records_are_read_at_once(monkeypatch):
    # Records of different lengths are read at once too; only irregular ones are read one by one.
    draws = random.Random(0)
    records = [drawn(draws, 0) for _ in range(500)]
    monkeypatch.setattr(Examples, "parse_one", lambda *args: pytest.fail("a record was read alone"))
    columns, _ = parsed(records, a=FixedLenFeature((3,), "float32"), f=VarLenFeature(bytes))
    assert len(columns["f"]) == 500


def test_many_values_in_few_records():
    values, words = np.arange(200_000) - 50_000, [b"w%d" % k for k in range(20_000)]
    record = example(a=integers(*values.tolist()), b=floats(*values.tolist()), c=strings(*words))
    columns, _ = parsed([record] * 2, a=VarLenFeature("int64"), b=VarLenFeature("float32"), c=VarLenFeature(bytes))
    assert (columns["a"][1] == values).all()
    assert (columns["b"][0] == values).all()
    assert columns["c"][1].tolist() == words


# --- requested features ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLenFeature((), "float64"), "dtype is 'float64'; an example holds float32, int64 and bytes"),
        (lambda: VarLenFeature(np.int32), "an example holds float32, int64 and bytes"),
        (lambda: VarLenFeature("nonsense"), "dtype is 'nonsense'"),
        (lambda: FixedLenFeature((None,), "int64"), "shape is .* a length that differs is a VarLenFeature's"),
        (lambda: FixedLenFeature((-1,), "int64"), "give whole numbers from 0 on"),
        (lambda: FixedLenSequenceFeature((0,), "int64"), "has no values, so none can be counted"),
        (lambda: FixedLenFeature((2, 3), "float32", [1, 2, 3]), "give float32, one value or an array of shape"),
        (lambda: FixedLenFeature((2,), "float32", ["x", "y"]), "give float32"),
        (lambda: FixedLenFeature((2,), "int64", [1.5, 2.5]), "give int64"),
        (lambda: FixedLenFeature((), bytes, "text"), "give bytes"),
        (lambda: FixedLenFeature((), str, b"bytes"), "give str"),
        (lambda: FixedLenFeature((), "int64", 2**70), "give int64"),
        (lambda: TFRecord({}), "give a dict of at least one feature"),
        (lambda: TFRecord([FLOAT]), "give a dict of at least one feature"),
        (lambda: TFRecord({3: FLOAT}), "features: 3 is not a name"),
        (lambda: TFRecord({"a": "float32"}), r"features\['a'\] is 'float32'; give a FixedLenFeature"),
    ],
)
def test_invalid_features(make, message):
    with pytest.raises(errors.ArgumentError, match=message):
        make()


def test_ways_to_say_a_dtype():
    assert {VarLenFeature(value) for value in (bytes, "bytes", "string", object)} == {VarLenFeature(np.object_)}
    assert {VarLenFeature(item) for item in (str, "str", np.str_)} <= {VarLenFeature(TEXT)}
    assert VarLenFeature(float) == VarLenFeature(np.float32)
    assert VarLenFeature(int) == VarLenFeature("int64")
    assert FixedLenFeature(3, int, np.array([1, 2, 3])) == FixedLenFeature([3], "int64", (1, 2, 3))


# --- files of examples ---


FEATURES = {
    "x": FixedLenFeature((2,), "float32"),
    "label": FixedLenFeature((), "int64"),
    "name": FixedLenFeature((), str),
    "raw": FixedLenFeature((), bytes),
    "ink": VarLenFeature("int64"),
    "boxes": FixedLenSequenceFeature((2,), "float32", allow_missing=True),
}


def elements(number):
    draws = np.random.default_rng(number)
    return [
        {
            "x": draws.random(2, np.float32),
            "label": np.int64(draws.integers(-(2**40), 2**40)),
            "name": np.array(f"ü{k}" * (k % 3), TEXT)[()],
            "raw": np.array(draws.bytes(k % 4), object)[()],
            "ink": draws.integers(-5, 10**9, k % 3),
            "boxes": draws.random((k % 2, 2), np.float32),
        }
        for k in range(number)
    ]


def write_examples(path, rows):
    leaves, structure = zip(*map(Structure.flatten, rows), strict=True)
    with path.open("wb") as file:
        TFRecord().write(Bundle(structure[0], leaves), file)


class TestExamples(FormatLaws):
    check_crc = True

    def make_format(self):
        return TFRecord(FEATURES, self.check_crc)

    def write(self, directory):
        files = {}
        for name, number in (("0", 30), ("1", 0), ("2", 3)):
            path, rows = directory / f"{name}.tfrecord", elements(number)
            write_examples(path, rows) if rows else path.write_bytes(b"")
            files[str(path)] = rows
        return files

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        with dask.config.set({"daskdist.split-bytes": 500}):
            super().test_edge_cases_of_the_format_are_covered(tmp_path)


class TestExamplesUnchecked(TestExamples):
    # Without checksums, damaged bytes reach the parser of examples.
    check_crc = False


def test_a_record_without_a_requested_feature(tmp_path):
    records = [example(a=floats(k)) for k in range(50)]
    records[7] = example(a=integers(7))
    path = tmp_path / "a.tfrecord"
    write_records(path, *records)
    ds = read_tfrecord(path, {"a": FLOAT})
    expected = r"record 7 of .*a\.tfrecord bytes 0 to \d+, \d+ bytes at \d+: feature 'a' holds int64, but float32"
    with pytest.raises(errors.FileError, match=expected):
        list(ds)
    with pytest.raises(errors.FileError, match=f"^{expected}") as caught:
        list(ds.ignore_errors())
    assert type(caught.value) is errors.FileError


def write_records(path, *records):
    path.write_bytes(framed(np.frombuffer(b"".join(records), np.uint8), np.array([len(value) for value in records])))


@pytest.mark.parametrize("number", [1, 100])
@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"lable": INTEGER},
            r"feature 'lable' is missing; give it a default_value if .*; this one has 'label', 'name'$",
        ),
        ({"label": FLOAT}, "feature 'label' holds int64, but float32 is expected; give it the dtype int64, or leave"),
        (
            {"label": TWO},
            r"feature 'label' has 1 value; shape \(2,\) takes 2; give it another shape, such as \(1,\), or",
        ),
        ({"label": FixedLenSequenceFeature((2,), "int64")}, "takes 2 at a time; give it another shape, or read it as"),
        ({"label": VarLenFeature(bytes)}, "holds int64, but bytes is expected; give it the dtype int64"),
        ({"name": FixedLenFeature((), str)}, "feature 'name' is not UTF-8: invalid start byte; read it as bytes"),
    ],
)
def test_features_that_do_not_fit_are_errors_even_with_skip(tmp_path, features, message, number):
    path = tmp_path / "a.tfrecord"
    write_records(path, *[example(label=integers(1), name=strings(b"\xff"))] * number)
    with pytest.raises(errors.FileError, match=rf"^record 0 of .*a\.tfrecord .*{message}") as caught:
        list(read_tfrecord(path, features).with_options(Options(on_error="skip")))
    assert type(caught.value) is errors.FileError


@pytest.mark.parametrize("other", [example(b=floats(1)), example(a=integers(1)), example(a=floats(1, 2))])
def test_a_second_file_with_other_features_is_an_error_even_with_skip(tmp_path, other):
    write_records(tmp_path / "0.tfrecord", *[example(a=floats(k)) for k in range(30)])
    write_records(tmp_path / "1.tfrecord", *[other] * 30)
    kept = iter(read_tfrecord(tmp_path, {"a": FLOAT}).with_options(Options(on_error="skip")))
    assert [float(next(kept)["a"]) for _ in range(30)] == list(range(30))
    with pytest.raises(errors.FileError, match=r"record 0 of .*1\.tfrecord .*: feature 'a' ") as caught:
        next(kept)
    assert type(caught.value) is errors.FileError
    assert list(kept) == []


@pytest.mark.parametrize("broken", [b"garbage!", example(a=message(2, message(1, b"12345"))), example(a=b"\xff\xff")])
def test_records_that_are_no_examples_are_left_out(tmp_path, broken):
    write_records(tmp_path / "a.tfrecord", example(a=floats(0)), broken, example(a=floats(2)))
    kept = iter(read_tfrecord(tmp_path, {"a": FLOAT}).with_options(Options(on_error="skip")))
    assert [float(row["a"]) for row in kept] == [0, 2]
    assert kept.stats()["num_skipped"] == 1


# --- writing ---


def test_files_that_tensorflow_reads(tmp_path):
    # TensorFlow 2.21 writes the same bytes for these features, and reads the same values from them.
    leaves, structure = Structure.of(
        {"f": np.float32([[1.5, 2]]), "i": np.array([[300, -1]]), "s": np.array([[b"x", b""]], object)}
    )
    path = tmp_path / "a.tfrecord"
    with path.open("wb") as file:
        TFRecord().write(Block(structure, leaves), file)
    (record,) = read_tfrecord(path)
    assert bytes(record) == example(f=floats(1.5, 2), i=integers(300, -1), s=strings(b"x", b""))


def test_columns_of_all_kinds(tmp_path):
    number = 300
    draws = np.random.default_rng(0)
    lengths = draws.integers(0, 4, number)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    words = np.empty(splits[-1], object)
    words[:] = [bytes([65 + k % 26]) * (k % 200) for k in range(splits[-1])]
    columns = {
        "f": draws.standard_normal((number, 2, 3)).astype("float32"),
        "d": draws.standard_normal(number),
        "half": draws.standard_normal(number).astype("float16"),
        "i": draws.integers(-(2**63), 2**63 - 1, number),
        "small": draws.integers(0, 200, number).astype("uint8"),
        "flag": draws.integers(0, 2, number).astype(bool),
        "t": np.array([f"ü{k}" for k in range(number)], TEXT),
        "rf": Ragged(draws.standard_normal(splits[-1]).astype("float32"), splits),
        "ri": Ragged(draws.integers(-5, 10**6, splits[-1]), splits),
        "rw": Ragged(words, splits),
        "r2": Ragged(draws.random((splits[-1], 2), np.float32), splits),
        "none": np.zeros((number, 0), "int64"),
    }
    leaves, structure = Structure.of(columns)
    with (tmp_path / "a.tfrecord").open("wb") as file:
        TFRecord().write(Block(structure, leaves), file)
    features = {
        "f": FixedLenFeature((2, 3), "float32"),
        "d": FLOAT,
        "half": FLOAT,
        "i": INTEGER,
        "small": INTEGER,
        "flag": INTEGER,
        "t": FixedLenFeature((), str),
        "rf": VarLenFeature("float32"),
        "ri": VarLenFeature("int64"),
        "rw": VarLenFeature(bytes),
        "r2": FixedLenSequenceFeature((2,), "float32"),
        "none": FixedLenFeature((0,), "int64"),
    }
    rows = list(read_tfrecord(tmp_path / "a.tfrecord", features))
    assert len(rows) == number
    for name, column in columns.items():
        kind = features[name].spec.dtype
        for row, expected in zip(rows, column, strict=True):
            assert np.array_equal(row[name], np.asarray(expected).astype(kind)), name
