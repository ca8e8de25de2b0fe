"""Laws of file formats."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
from dask.base import tokenize

from daskdist.core.block import Bundle
from daskdist.core.primitive import Split
from daskdist.dataset import Dataset
from daskdist.errors import DamagedFileError, FileError
from daskdist.formats import DirectoryFormat, Format, ReadsValidRows, WritableFormat
from daskdist.ops.read_files import read_node
from daskdist.ops.with_options import Options
from daskdist.storage.first_file import FirstFile
from daskdist.testing.equality import check, same_elements


class FormatLaws:
    """Laws of a format; a subclass defines `make_format` and `write`.

    Attributes
    ----------
    split_bytes
        The setting ``daskdist.split-bytes`` at which a file of `write` has several splits; None for the default.
    """

    split_bytes: int | str | None = None

    def make_format(self) -> Format:
        """Return a new instance of the format."""
        raise NotImplementedError

    def write(self, directory: Path) -> Mapping[str, Sequence[Any]]:
        """Write some files of one schema into an empty directory.

        Returns
        -------
        Mapping
            The elements of each file by its path, in order. One file has no elements, and if the format is splittable
            one has several splits.
        """
        raise NotImplementedError

    def make_reader_of_written(self) -> Format:
        """Return a format that reads the files that this one writes, if its options apply only to those of `write`."""
        return self.make_format()

    def test_edge_cases_of_the_format_are_covered(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        check(len(files) > 1, "write two files or more")
        check(any(not rows for rows in files.values()), "write a file without elements too")
        if form.is_splittable:
            setting = {} if self.split_bytes is None else {"daskdist.split-bytes": self.split_bytes}
            with dask.config.set(setting):
                check(any(len(splits) > 1 for splits in _splits(form, files)), "write a file of several splits")

    def test_splits_cover_the_file_once(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        for (path, rows), splits in zip(files.items(), _splits(form, files), strict=True):
            elements = [element for split in splits for element in form.read(split).elements()]
            same_elements(elements, rows, f"{path}: its splits in order")

    def test_splits_of_any_size_cover_the_file_once(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        seen = set()
        for split_bytes in (1, 7, 64, 1000):
            with dask.config.set({"daskdist.split-bytes": split_bytes}):
                listed = _splits(form, files)
            # Formats whose splits have a least size list the same ones for all that are below it.
            if (pickled := pickle.dumps(listed)) in seen:
                continue
            seen.add(pickled)
            for (path, rows), splits in zip(files.items(), listed, strict=True):
                # Read backwards, so that reading a split cannot use facts learned from those before it.
                parts = [list(form.read(split).elements()) for split in reversed(splits)]
                elements = [element for part in reversed(parts) for element in part]
                same_elements(elements, rows, f"{path}: its splits of {split_bytes} bytes, read from the last on")

    def test_guess_recognises_its_files(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        for path in files:
            if isinstance(form, DirectoryFormat) and Path(path).is_dir():
                mark = next(Path(path, name) for name in form.marks if Path(path, name).is_file())
                check(form.guess(str(mark), mark.read_bytes()[:64]), f"{path} is not taken for one of the format")
            elif Path(path).is_file():
                check(form.guess(path, Path(path).read_bytes()[:64]), f"{path} is not taken for a file of the format")
        check(
            not form.guess(str(tmp_path / "x.unheard-of"), b"\x01\x02\x03"), "any file is taken for one of the format"
        )

    def test_writes_what_it_reads(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        if not isinstance(form, WritableFormat):
            return
        reader = self.make_reader_of_written()
        form.check(form.spec(next(iter(files))))
        for number, (path, rows) in enumerate(files.items()):
            blocks = [form.read(split) for split in form.list_splits(path, number, _first(form, path))]
            blocks = [block for block in blocks if len(block)]
            for place, block in enumerate(blocks):
                # A writer takes rows in both forms: columns, and a list of elements.
                listed = Bundle(block.structure, [block.item(index) for index in range(len(block))], block.label)
                for block_or_list in (block, listed):
                    written = tmp_path / f"written-{number}-{place}-{type(block_or_list).__name__}{form.suffixes[0]}"
                    with written.open("wb") as file:
                        form.write(block_or_list, file)
                        check(not file.closed, f"{path}: the file that was written to is closed")
                    splits = reader.list_splits(str(written), 0, _first(reader, str(written)))
                    again = [element for split in splits for element in reader.read(split).elements()]
                    same_elements(again, list(block.elements()), f"{path}: written and read again")
            check(sum(map(len, blocks)) == len(rows), f"{path}: not all of it was read")

    def test_garbage_is_a_file_error(self, tmp_path: Path) -> None:
        """Check that a truncated, altered or partly overwritten file gives elements or a `FileError`, nothing else."""
        form, files = self.make_format(), self.write(tmp_path)
        sizes = {file: (file.stat().st_size, path) for path in files for file in _files_of(path)}
        file = max(sizes, key=lambda file: sizes[file][0])
        path, content = sizes[file][1], file.read_bytes()
        first = _first(form, path)
        for seed in range(64):
            file.write_bytes(spoiled(content, random.Random(seed)))
            _try_all_of(form, path, first, f"seed {seed}")

    def test_a_damaged_first_file_is_left_out_like_any_other(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        path = next(iter(files))
        damaged = tmp_path / f"first-{Path(path).name}"
        shutil.copytree(path, damaged) if Path(path).is_dir() else shutil.copy(path, damaged)
        for file in _files_of(str(damaged)):
            file.write_bytes(b"")
        try:
            form.spec(str(damaged))
        except DamagedFileError:
            pass
        else:
            # An empty file is a valid one of this format without elements.
            return
        elements = [element for rows in files.values() for element in rows]
        dataset, skip = Dataset(read_node(form, (str(damaged), *files))), Options(on_error="skip")
        same_elements(list(dataset.with_options(skip)), elements, f"{damaged}: left out, as it is damaged")
        same_elements(
            list(Dataset(read_node(form, (*files, str(damaged)))).with_options(skip)),
            elements,
            "the same as the last file",
        )
        try:
            list(dataset)
        except DamagedFileError as error:
            check(str(damaged) in str(error), f"the error does not name the file: {error}")
        else:
            check(False, f"{damaged} is damaged, and no DamagedFileError was raised")

    def test_splits_have_valid_descriptions(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        listed = _splits(form, files)
        for number, (path, splits) in enumerate(zip(files, listed, strict=True)):
            for split in splits:
                check(path in split.label, f"{split.label!r} does not name its file {path}")
                check(split.path == path, f"{split.label}: says its path is {split.path!r}, not {path}")
                check(split.file == number, f"{split.label}: says it is of file {split.file}, not {number}")
                rows = len(form.read(split))
                check(split.num_rows in (None, rows), f"{split.label}: says {split.num_rows} rows, has {rows}")
        labels = [split.label for splits in listed for split in splits]
        check(len(set(labels)) == len(labels), f"two splits have one label: {labels}")

    def test_rows_are_of_the_spec(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        for path, splits in zip(files, _splits(form, files), strict=True):
            spec = form.spec(path)
            for split in splits:
                rows = form.read(split)
                check(rows.structure == spec.structure, f"{split.label}: {rows.structure} is not {spec.structure}")
                for index in range(len(rows)):
                    for leaf, expected in zip(rows.item(index), spec.leaves, strict=True):
                        check(
                            expected.is_compatible_with(leaf),
                            f"{rows.where(index)} has {leaf.dtype}{list(leaf.shape)}, its spec is {expected}",
                        )

    def test_all_files_have_one_spec(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        specs = {form.spec(path) for path in files}
        check(len(specs) == 1, f"files of one schema have the specs {specs}")

    def test_reading_is_pure(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        splits = [split for splits in _splits(form, files) for split in splits]
        expected = {split.label: list(form.read(split).elements()) for split in splits}
        mixed = random.Random(0).sample(splits, len(splits))
        for split in mixed:
            same_elements(_read(form, split), expected[split.label], f"{split.label}: read again, in another order")
        with ThreadPoolExecutor(4) as pool:
            for split, block in zip(splits, pool.map(form.read, splits), strict=True):
                same_elements(list(block.elements()), expected[split.label], f"{split.label}: read in a thread")

    def test_unpickled_formats_and_splits_read_the_same(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        for split in (split for splits in _splits(form, files) for split in splits):
            unpickled, moved = pickle.loads(pickle.dumps((form, split)))
            same_elements(_read(unpickled, moved), _read(form, split), f"{split.label}: read by a pickled format")

    def test_token_is_deterministic(self) -> None:
        tokens = {tokenize(self.make_format(), ensure_deterministic=True) for _ in range(2)}
        check(len(tokens) == 1, "made again, the format has another token")

    def test_missing_file_is_a_file_error(self, tmp_path: Path) -> None:
        path = str(tmp_path / "not-there")
        _refuses(lambda: self.make_format().spec(path), path)

    def test_removed_file_is_a_file_error(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        path, split = next(
            (path, splits[0]) for path, splits in zip(files, _splits(form, files), strict=True) if splits
        )
        Path(path).unlink() if Path(path).is_file() else shutil.rmtree(path)
        _refuses(lambda: form.read(split), path)


def _files_of(path: str) -> list[Path]:
    # If the files of a format are directories, return the files in them.
    return [Path(path)] if Path(path).is_file() else [file for file in Path(path).rglob("*") if file.is_file()]


def _try_all_of(form: Format, path: str, first: FirstFile, case: str) -> None:
    # Check that each call returns a valid result, or raises a FileError that names the file, however it is damaged.
    def named(error: FileError) -> None:
        check(path in str(error), f"{case}: the error does not name the file: {error}")

    try:
        form.spec(path)
    except FileError as error:
        named(error)
    try:
        splits = form.list_splits(path, 0, first)
    except FileError as error:
        named(error)
        return
    for split in splits:
        try:
            rows = len(form.read(split))
            check(split.num_rows in (None, rows), f"{case}: {split.label} says {split.num_rows} rows, has {rows}")
        except FileError as error:
            named(error)
            if isinstance(form, ReadsValidRows):
                try:
                    kept, _ = form.read_valid_rows(split)
                    is_alike = kept.structure == first.spec.structure or not len(kept)
                    check(is_alike, f"{case}: the valid rows of {split.label} have another structure")
                except FileError as error:
                    named(error)


def spoiled(data: bytes, draws: random.Random) -> bytes:
    """Return a file's content with random damage."""
    kind = draws.choice(["cut", "flip", "overwrite", "insert", "garbage"])
    at = draws.randrange(len(data) + 1)
    if kind == "cut":
        return data[:at]
    if kind == "flip":
        flipped = bytearray(data)
        for _ in range(draws.choice([1, 1, 3, 20])):
            flipped[draws.randrange(len(flipped))] ^= 1 << draws.randrange(8)
        return bytes(flipped)
    noise = draws.randbytes(draws.choice([1, 4, 40]))
    if kind == "insert":
        return data[:at] + noise + data[at:]
    return data[:at] + noise + data[at + len(noise) :] if kind == "overwrite" else draws.randbytes(len(data))


def _first(form: Format, path: str) -> FirstFile:
    return FirstFile(path, form.spec(path))


def _splits(form: Format, files: Mapping[str, Any]) -> list[Sequence[Split]]:
    first = _first(form, next(iter(files)))
    return [form.list_splits(path, number, first) for number, path in enumerate(files)]


def _read(form: Format, split: Split) -> list[Any]:
    return list(form.read(split).elements())


def _refuses(read: Any, path: str) -> None:
    try:
        read()
    except FileError as error:
        check(path in str(error), f"the error does not name the file: {error}")
        # Damaged files are left out where errors are skipped, but a missing one must not be.
        check(not isinstance(error, DamagedFileError), f"a missing file is reported as damaged: {error}")
    else:
        check(False, f"{path} is not there, and no FileError was raised")
