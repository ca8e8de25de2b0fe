"""Damage, which can be left out, and all other reasons why a file cannot be read, which cannot."""

from __future__ import annotations

import builtins
import errno
import json
import re
import shutil
import sqlite3
import struct
import zlib
from dataclasses import dataclass
from itertools import chain

import dask
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

import daskdist
from daskdist import Dataset, Options, TensorSpec, errors
from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE
from daskdist.ops.read_files import read_node
from daskdist.storage.failures import damage, proves_damage

SKIP = Options(on_error="skip")


def write_zarr(path, values):
    zarr.open_group(path, mode="w").create_array("x", data=values)


def write_hdf5(path, values):
    with h5py.File(path, "w") as file:
        file["x"] = values


def write_arrow(path, values):
    table = pa.table({"x": values})
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


def lines(head, form):
    return lambda path, values: path.write_text(head + "".join(form.format(value) + "\n" for value in values))


# The end of the name -> a function that writes numbers to a file, and the reader.
FORMATS = {
    ".csv": (lines("x\n", "{}"), daskdist.read_csv),
    ".jsonl": (lines("", '{{"x": {}}}'), daskdist.read_json),
    ".txt": (lines("", "{}"), daskdist.read_text),
    ".bin": (lambda path, values: values.tofile(path), lambda path: daskdist.read_fixed_length(path, 8, "<i8")),
    ".npy": (lambda path, values: np.save(path, values), daskdist.read_npy),
    ".parquet": (lambda path, values: pq.write_table(pa.table({"x": values}), path), daskdist.read_parquet),
    ".arrow": (write_arrow, daskdist.read_arrow),
    ".h5": (write_hdf5, daskdist.read_hdf5),
    ".zarr": (write_zarr, daskdist.read_zarr),
}


@pytest.fixture(params=FORMATS)
def written(request, tmp_path):
    """Write the numbers 0 to 29 to three files; return them, a function that writes one, and a dataset of them."""
    write, read = FORMATS[request.param]
    paths = [tmp_path / f"{k}{request.param}" for k in range(3)]
    for k, path in enumerate(paths):
        write(path, np.arange(10 * k, 10 * k + 10))
    return paths, write, read(list(map(str, paths))).with_options(SKIP)


def numbers_and_errors(ds):
    """Return the numbers that an iterator hands out, and its errors."""
    iterator, numbers, raised = iter(ds), [], []
    while True:
        try:
            element = next(iterator)
        except StopIteration:
            return numbers, raised
        except Exception as error:
            raised.append(error)
            assert len(raised) < 5
            continue
        numbers.append(int(element["x"] if isinstance(element, dict) else element))


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def other(path, write):
    remove(path)
    write(path, np.arange(20))


CHANGES = {"gone": lambda path, write: remove(path), "replaced": other}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_changed_are_no_damage(written, change):
    paths, write, ds = written
    assert numbers_and_errors(ds) == (list(range(30)), [])
    CHANGES[change](paths[1], write)
    numbers, raised = numbers_and_errors(ds)
    assert numbers == [*range(10), *range(20, 30)]
    assert [type(error) for error in raised] == [errors.FileError]
    assert str(paths[1]) in str(raised[0])


@pytest.mark.parametrize("change", CHANGES)
def test_operations_after_the_reader_do_not_leave_them_out(written, change):
    paths, write, ds = written
    ds = ds.map(lambda element: element).filter(lambda element: True).ignore_errors()
    assert len(list(ds)) == 30
    CHANGES[change](paths[1], write)
    numbers, raised = numbers_and_errors(ds)
    assert numbers == [*range(10), *range(20, 30)]
    assert {type(error) for error in raised} == {errors.FileError}


def test_files_that_are_there_again_are_read_in_the_next_pass(written, tmp_path):
    paths, _, ds = written
    for options in (SKIP, Options(on_error="raise")):
        away = paths[1].rename(tmp_path / "away")
        numbers, raised = numbers_and_errors(ds.with_options(options))
        assert numbers == [*range(10), *range(20, 30)]
        assert [type(error) for error in raised] == [errors.FileError]
        away.rename(paths[1])
        assert numbers_and_errors(ds.with_options(options)) == (list(range(30)), [])


def test_images_that_are_there_again_are_read_in_the_next_pass(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(folder / f"{number}.png")
    ds = daskdist.read_images(str(folder), labels=None).map(lambda image: image[0, 0, 0])
    away = (folder / "1.png").rename(tmp_path / "away")
    numbers, raised = numbers_and_errors(ds)
    assert (numbers, [type(error) for error in raised]) == ([0, 2], [errors.FileError])
    away.rename(folder / "1.png")
    assert numbers_and_errors(ds) == ([0, 1, 2], [])


def test_a_first_file_that_is_gone_is_no_reason_to_take_the_next_one(tmp_path):
    for reader in (daskdist.read_parquet, daskdist.read_csv, daskdist.read_npy):
        with pytest.raises(errors.FileError, match="no such file") as caught:
            reader([str(tmp_path / "none.x"), str(tmp_path / "other.x")])
        assert type(caught.value) is errors.FileError


@pytest.mark.parametrize("end", [".npy", ".parquet", ".arrow", ".h5", ".zarr"])
def test_another_dtype_is_no_damage(tmp_path, end):
    write, read = FORMATS[end]
    for k, values in enumerate([np.arange(3), np.arange(3) / 2, np.arange(6, 9)]):
        write(tmp_path / f"{k}{end}", values)
    numbers, raised = numbers_and_errors(read([str(tmp_path / f"{k}{end}") for k in range(3)]).with_options(SKIP))
    assert numbers == [0, 1, 2, 6, 7, 8]
    assert [type(error) for error in raised] == [errors.FileError]
    assert "but those of the first file" in str(raised[0])


def test_what_libraries_do_not_support_is_no_damage(tmp_path):
    write_zarr(tmp_path / "a.zarr", np.arange(5))
    metadata = tmp_path / "a.zarr" / "x" / "zarr.json"
    content = json.loads(metadata.read_text())
    content["codecs"] = [{"name": "bytes"}, {"name": "not-installed", "configuration": {}}]
    metadata.write_text(json.dumps(content))
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(5))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    # The method of compression, in the local header and in the directory.
    for place in (8, content.index(b"PK\1\2") + 10):
        content[place : place + 2] = struct.pack("<H", 97)
    (tmp_path / "a.npz").write_bytes(content)
    for read, name in ((daskdist.read_zarr, "a.zarr"), (daskdist.read_npy, "a.npz")):
        with pytest.raises(errors.FileError, match=r"a\.(zarr|npz): cannot be read: ") as caught:
            list(read(tmp_path / name).with_options(SKIP))
        assert type(caught.value) is errors.FileError


def test_damage_is_left_out(written, tmp_path):
    paths, _, ds = written
    if paths[1].suffix in (".txt", ".bin", ".npy"):
        pytest.skip("any bytes are valid, or damage is not noticed")
    files = [paths[1]] if paths[1].is_file() else [file for file in paths[1].rglob("*") if file.is_file()]
    for file in files:
        file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(errors.DamagedFileError):
        list(ds.with_options(Options(on_error="raise")))
    assert numbers_and_errors(ds) == ([*range(10), *range(20, 30)], [])


def write_nulls(path):
    pq.write_table(pa.table({"x": pa.array([0, 1, None, 3, 4, None, 6])}), path)


def write_table(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x INTEGER)")
        connection.executemany("INSERT INTO t VALUES (?)", [(k,) for k in (0, 1, None, 3, 4, None, 6)])
    connection.close()


def write_records(path):
    Dataset.from_list([{"x": k} for k in range(7)]).to_tfrecord(path.parent / "records")
    content = bytearray(next((path.parent / "records").iterdir()).read_bytes())
    record_bytes = len(content) // 7
    for k in (2, 5):
        # The checksum of the record.
        content[(k + 1) * record_bytes - 1] ^= 1
    path.write_bytes(content)


# Seven rows, of which 2 and 5 are damaged: the name -> a function that writes them, the reader, and the first error.
DAMAGED_ROWS = {
    "a.csv": (
        lambda path: path.write_text("x\n0\n1\nb\n3\n4\nc\n6\n"),
        lambda path: daskdist.read_csv(path, dtypes={"x": int}),
        r"its row 2, .*'b' is not int64; give dtypes",
    ),
    "a.jsonl": (
        lambda path: path.write_text("".join(f'{{"x": {k}}}\n' for k in (0, 1, "[", 3, 4, "]", 6))),
        daskdist.read_json,
        r"a\.jsonl.*line 2",
    ),
    "a.txt": (
        lambda path: path.write_bytes(b"0\n1\n\xff\n3\n4\n\xfe\n6\n"),
        daskdist.read_text,
        r"its line 2, b'\\xff', is not utf-8.*give the right encoding",
    ),
    "a.parquet": (write_nulls, daskdist.read_parquet, r"'x'.*null"),
    "a.arrow": (
        lambda path: write_arrow(path, pa.array([0, 1, None, 3, 4, None, 6])),
        daskdist.read_arrow,
        "'x'.*null",
    ),
    "a.db": (write_table, lambda path: daskdist.read_sql("t", path), "'x'.*null"),
    "a.tfrecord": (
        write_records,
        lambda path: daskdist.read_tfrecord(path, {"x": daskdist.FixedLenFeature((), "int64")}),
        r"record 2 of .*checksum",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_ROWS)
def test_damaged_rows_fail_in_their_places_also_if_they_are_not_left_out(tmp_path, name):
    write, read, error = DAMAGED_ROWS[name]
    write(tmp_path / name)
    ds = read(str(tmp_path / name))
    numbers, raised = numbers_and_errors(ds)
    assert numbers == [0, 1, 3, 4, 6]
    assert [type(error) for error in raised] == [errors.DamagedFileError] * 2
    # The first one says what to do, as reading all rows together does.
    assert re.search(error, str(raised[0])), raised[0]
    pairs = Dataset.zip((ds, Dataset.range(7))).map(lambda x, number: number)
    assert numbers_and_errors(pairs)[0] == numbers
    assert numbers_and_errors(ds.with_options(SKIP)) == (numbers, [])


def test_databases(tmp_path):
    for name in ("a.db", "b.db"):
        with sqlite3.connect(tmp_path / name) as connection:
            connection.execute("CREATE TABLE t (x INTEGER PRIMARY KEY)")
            connection.executemany("INSERT INTO t VALUES (?)", [(k,) for k in range(1000)])
        connection.close()
    ds = daskdist.read_sql("t", tmp_path / "a.db").with_options(SKIP)
    assert len(list(ds)) == 1000
    whole = (tmp_path / "a.db").read_bytes()
    (tmp_path / "a.db").write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    assert len(list(ds)) < 1000
    with pytest.raises(errors.DamagedFileError, match=r"a\.db"):
        list(ds.with_options(Options(on_error="raise")))
    lost = daskdist.read_sql("t", tmp_path / "b.db").with_options(SKIP)
    with sqlite3.connect(tmp_path / "b.db") as connection:
        connection.execute("DROP TABLE t")
    connection.close()
    with pytest.raises(errors.FileError, match=r"b\.db.*'t'") as caught:
        list(lost)
    assert type(caught.value) is errors.FileError


def test_files_that_functions_read_fail_with_their_elements(tmp_path):
    for k in (0, 2):
        (tmp_path / f"{k}.txt").write_text(str(k))
    ds = Dataset.range(3).map(lambda k: int((tmp_path / f"{int(k)}.txt").read_text())).with_options(SKIP)
    assert [int(k) for k in ds] == [0, 2]


def test_readers_within_flat_map(tmp_path):
    paths = [tmp_path / f"{k}.parquet" for k in range(3)]
    for k, path in enumerate(paths):
        pq.write_table(pa.table({"x": np.arange(3) + 3 * k}), path)
    datasets = {str(path): daskdist.read_parquet(path, "x") for path in paths}
    ds = Dataset.from_tensor_slices(list(datasets)).flat_map(lambda path: datasets[str(path)]).with_options(SKIP)
    assert [int(x) for x in ds] == list(range(9))
    paths[1].unlink()
    numbers, raised = numbers_and_errors(ds)
    assert numbers == [0, 1, 2, 6, 7, 8]
    assert [type(error) for error in raised] == [errors.FileError]


NO_DAMAGE = [
    *(OSError(number, "x") for number in (errno.ENOSPC, errno.ENOMEM, errno.EIO, errno.EMFILE, errno.ESTALE)),
    *(TimeoutError(), ConnectionError(), PermissionError(), FileNotFoundError(), MemoryError(), ImportError("x")),
    *(NotImplementedError("x"), pa.ArrowNotImplementedError("x"), errors.FileError("x"), errors.ArgumentError("x")),
    *(OSError("decoder jpeg2k not available"), OSError("required filter 'x' is not registered")),
    SystemError("AST constructor recursion depth mismatch (before=60, after=58)"),
]
DAMAGE = [
    *(OSError("Couldn't deserialize thrift"), EOFError(), ValueError("x"), KeyError("x"), struct.error("x")),
    *(zlib.error("x"), pa.ArrowInvalid("x"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), OverflowError("x")),
    *(sqlite3.Error("x"), errors.DamagedFileError("x"), IndexError()),
]


@pytest.mark.parametrize("error", [*NO_DAMAGE, *DAMAGE], ids=repr)
def test_which_errors_prove_damage(error):
    is_damage = error in DAMAGE
    assert proves_damage(error) is is_damage
    if isinstance(error, errors.DaskdistError):
        return
    with pytest.raises(errors.FileError, match=r"^a file: ") as caught, damage("a file"):
        raise error
    assert (type(caught.value) is errors.DamagedFileError) is is_damage


def test_errors_of_the_system_are_all_no_damage():
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, OSError)]
    of_errno = {type(OSError(number, "x")) for number in errno.errorcode}
    for kind in chain(of_errno - {OSError}, set(kinds) - {OSError}):
        assert not proves_damage(kind()), kind


@dataclass(frozen=True)
class Theirs:
    """A format of others, whose reader raises errors of its library as they are."""

    error: Exception
    where: str

    name = "theirs"
    suffixes = (".theirs",)
    is_splittable = False

    def guess(self, path, head):
        return False

    def _fail(self, where, path):
        if where == self.where and path.endswith("1.theirs"):
            raise self.error

    def spec(self, path):
        self._fail("spec", path)
        return ElementSpec(LONE, (TensorSpec((), "int64"),))

    def list_splits(self, path, file, first):
        self._fail("list", path)
        return [Split(f"{path} as a whole", path, None, None, file, path)]

    def read(self, split):
        self._fail("read", split.payload)
        return Block(LONE, [np.arange(3)], split.label)


@pytest.mark.parametrize("where", ["spec", "list", "read"])
@pytest.mark.parametrize("error", [KeyError("x"), struct.error("x"), zlib.error("x"), TimeoutError(), OverflowError()])
def test_errors_of_any_library_name_the_file(where, error):
    paths = ("1.theirs",) if where == "spec" else ("0.theirs", "1.theirs")
    with pytest.raises(errors.FileError, match=r"1\.theirs.*: ") as caught:
        list(Dataset(read_node(Theirs(error, where), paths)))
    assert (type(caught.value) is errors.DamagedFileError) is (type(error) is not TimeoutError)
    assert caught.value.__cause__ is error


# --- values of another type ---


def write_text(folder, content, name):
    (folder / name).write_text(content)
    return str(folder / name)


# A schema that differs and a type of the user's that does not fit are no damage.
@pytest.mark.parametrize("split_bytes", [200, 10_000])
@pytest.mark.parametrize(
    ("first", "second", "dtypes", "message"),
    [
        (
            "{k}",
            "{k}.5",
            None,
            r"its \d+ values, such as '\d+.5', are float64, not int64; give dtypes={'n': 'float64'}",
        ),
        ("{k}", "20{k}-01-01", None, r"datetime64\[D\], not int64; give dtypes={'n': 'datetime64\[D\]'}"),
        ("{k}.5", "20{k}-01-01", None, r"datetime64\[D\], not float64; give dtypes={'n': 'datetime64\[D\]'}"),
        ("true", "{k}", None, "are int64, not bool; give dtypes={'n': 'int64'}"),
        ("{k}", "{k}.5", {"n": "int64"}, "are float64, not int64; give dtypes={'n': 'float64'}"),
        ("1", "10{k}", {"n": "int8"}, "are int64, not int8; give dtypes={'n': 'int64'}"),
        ("{k}", "true", {"n": "int64"}, "are bool, not int64; give dtypes={'n': 'bool'}"),
        ("{k}", "q{k}", None, r"its \d+ values, such as 'q\d+', are str, not int64; give dtypes={'n': 'str'}"),
        ("{k}", "007", None, "are str, not int64; give dtypes={'n': 'str'}"),
        ("true", "yes", {"n": "bool"}, "are str, not bool; give dtypes={'n': 'str'}"),
        ("2020-12-31", "31/12/2020", {"n": "datetime64[D]"}, r"are str, not datetime64\[D\]"),
        ("1.5", '"1,5"', {"n": "float64"}, "such as '1,5', are str, not float64"),
        ("{k}", "1{k}0000000000000000000", {"n": "int64"}, "are str, not int64"),
    ],
)
def test_values_of_another_type_are_an_error_also_when_damage_is_left_out(
    tmp_path, split_bytes, first, second, dtypes, message
):
    write_text(tmp_path, "n,s\n" + "".join(f"{first.format(k=k)},a\n" for k in range(30)), "a.csv")
    # Rows without a value, and one of another length, do not matter.
    rows = "".join(f"{second.format(k=k)},b\n" for k in range(30, 60))
    path = write_text(tmp_path, f"n,s\n{rows}NA,c\n1,2,3\n", "b.csv")
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        skipping = daskdist.read_csv(tmp_path, dtypes=dtypes).with_options(SKIP)
        with pytest.raises(errors.FileError, match=rf"column 'n': .*{message}") as caught:
            list(skipping)
    assert type(caught.value) is errors.FileError
    assert path in str(caught.value)


def test_single_values_of_another_type_are_damage(tmp_path):
    write_text(tmp_path, "n,m\n" + "".join(f"{k},{k}\n" for k in range(30)), "a.csv")
    write_text(tmp_path, "n,m\nx1,2\n,2\n", "b.csv")
    # Each column has a valid value.
    write_text(tmp_path, "n,m\n1.5,1\n2,x\n2.5,3\n", "c.csv")
    write_text(tmp_path, "n,m\n1.5,2\nNA,2\n", "d.csv")
    kept = iter(daskdist.read_csv(tmp_path).with_options(SKIP))
    assert [(int(row["n"]), int(row["m"])) for row in kept] == [(k, k) for k in range(30)]
    assert kept.stats()["num_skipped"] == 2 + 3 + 2


# --- other encodings and other formats ---

TEXTS = {
    ".csv": ("x\n", "{}\n", daskdist.read_csv),
    ".jsonl": ("", '{{"x": "{}"}}\n', daskdist.read_json),
    ".txt": ("", "{}\n", daskdist.read_text),
}


def write_words(path, words, encoding="utf-8"):
    head, form, _ = TEXTS[path.suffix]
    path.write_bytes((head + "".join(map(form.format, words))).encode(encoding))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-32"])
@pytest.mark.parametrize("suffix", TEXTS)
def test_a_file_in_another_encoding_is_an_error_even_with_skip(tmp_path, suffix, encoding):
    for number, used in enumerate(["utf-8", encoding]):
        write_words(tmp_path / f"{number}{suffix}", ["Zürich", "Bern"] * 20, used)
    with pytest.raises(errors.FileError, match=r"is utf-8: .*latin-1|: rewrite it in UTF-8") as caught:
        list(TEXTS[suffix][2](tmp_path).with_options(SKIP))
    assert type(caught.value) is errors.FileError
    assert f"1{suffix}" in str(caught.value)


@pytest.mark.parametrize("suffix", [".csv", ".txt"])
def test_an_encoding_that_does_not_fit_is_an_error_even_with_skip(tmp_path, suffix):
    write_words(tmp_path / f"a{suffix}", ["Zürich", "Bern"] * 20)
    with pytest.raises(errors.FileError, match=r"none of 20 texts .* is ascii: give encoding='utf-8'") as caught:
        list(TEXTS[suffix][2](tmp_path, encoding="ascii").with_options(SKIP))
    assert type(caught.value) is errors.FileError


def test_a_header_in_another_encoding_is_an_error_even_with_skip(tmp_path):
    for number, encoding in enumerate(["utf-8", "latin-1"]):
        (tmp_path / f"{number}.csv").write_bytes("x,ü\n1,2\n".encode(encoding))
    with pytest.raises(errors.FileError, match=r"1\.csv: its header, .* is not utf-8: .*; give its encoding") as caught:
        list(daskdist.read_csv(tmp_path).with_options(SKIP))
    assert type(caught.value) is errors.FileError


@pytest.mark.parametrize("others", [["Bern"] * 20, ["Zürich", "Bern"]])
@pytest.mark.parametrize("suffix", TEXTS)
def test_single_lines_in_another_encoding_are_damage(tmp_path, suffix, others):
    path = tmp_path / f"b{suffix}"
    write_words(tmp_path / f"a{suffix}", ["Basel"])
    write_words(path, others)
    _, form, read = TEXTS[suffix]
    with path.open("ab") as file:
        file.write(form.format("Zürich").encode("latin-1") * (1 + ("Zürich" in others)))
    assert len(list(read(tmp_path).with_options(SKIP))) == 1 + len(others)


MAGIC = {
    "a ZIP archive": b"PK\x03\x04\x14\0\0\0\x08\0",
    "a Parquet file": b"PAR1\x15\x04\x15\xa0",
    "an encrypted Parquet file": b"PARE,\0\0\0",
    "an Arrow file": b"ARROW1\0\0\xff\xff\xff\xff",
    "an HDF5 file": b"\x89HDF\r\n\x1a\n",
}


@pytest.mark.parametrize("kind", MAGIC)
def test_a_file_of_another_format_is_an_error_even_with_skip(tmp_path, kind):
    for suffix in (".csv", ".jsonl", ".txt", ".npy", ".parquet", ".arrow", ".h5"):
        write, read = FORMATS[suffix]
        write(tmp_path / f"a{suffix}", np.arange(10))
        is_own = MAGIC[kind].startswith((tmp_path / f"a{suffix}").read_bytes()[:4])
        (tmp_path / "b").write_bytes(MAGIC[kind] + bytes(range(256)))
        for names in ([f"a{suffix}", "b"], ["b", f"a{suffix}"]):
            if not is_own:
                with pytest.raises(errors.FileError, match=f"b: is {kind}, which this reader does not read") as caught:
                    list(read([str(tmp_path / name) for name in names]).with_options(SKIP))
                assert type(caught.value) is errors.FileError


def test_text_may_begin_like_a_format_or_be_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("PAR1 is the beginning\nPK\n")
    assert len(list(daskdist.read_text(tmp_path))) == 2
    (tmp_path / "a.txt").write_bytes(b"\xff\xfea\n")
    assert len(list(daskdist.read_text(tmp_path, None))) == 1
