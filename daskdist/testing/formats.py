"""Laws of file formats."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dask.base import tokenize

from daskdist.core.primitive import Split
from daskdist.errors import FileError
from daskdist.formats import Format
from daskdist.testing.equality import check, same_elements


class FormatLaws:
    """Laws of a format. Subclass it, and say how the format is made and what files it is to be tried on."""

    def make_format(self) -> Format:
        """The format, made anew."""
        raise NotImplementedError

    def write(self, directory: Path) -> Mapping[str, Sequence[Any]]:
        """Write some files of one schema into an empty directory.

        Returns
        -------
        Mapping
            Each file's path, in order, and its elements. One has none, and where the format is splittable
            one has several splits.
        """
        raise NotImplementedError

    def test_files_try_what_they_should(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        check(len(files) > 1, "write two files or more")
        check(any(not rows for rows in files.values()), "write a file without elements too")
        if form.is_splittable:
            check(any(len(splits) > 1 for splits in _splits(form, files)), "write a file of several splits")

    def test_splits_are_the_file_once(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        for (path, rows), splits in zip(files.items(), _splits(form, files), strict=True):
            given = [element for split in splits for element in form.read(split).elements()]
            same_elements(given, rows, f"{path}: its splits in order")

    def test_splits_say_what_they_are(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        listed = _splits(form, files)
        for number, (path, splits) in enumerate(zip(files, listed, strict=True)):
            for split in splits:
                check(path in split.label, f"{split.label!r} does not name its file {path}")
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

    def test_reads_after_a_journey(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        for split in (split for splits in _splits(form, files) for split in splits):
            there, moved = pickle.loads(pickle.dumps((form, split)))
            same_elements(_read(there, moved), _read(form, split), f"{split.label}: read by a pickled format")

    def test_token_is_deterministic(self) -> None:
        tokens = {tokenize(self.make_format(), ensure_deterministic=True) for _ in range(2)}
        check(len(tokens) == 1, "made again, the format has another token")

    def test_missing_file_is_a_file_error(self, tmp_path: Path) -> None:
        path = str(tmp_path / "not-there")
        _refuses(lambda: self.make_format().spec(path), path)

    def test_file_gone_since_is_a_file_error(self, tmp_path: Path) -> None:
        form, files = self.make_format(), self.write(tmp_path)
        path, split = next(
            (path, splits[0]) for path, splits in zip(files, _splits(form, files), strict=True) if splits
        )
        Path(path).unlink() if Path(path).is_file() else shutil.rmtree(path)
        _refuses(lambda: form.read(split), path)


def _splits(form: Format, files: Mapping[str, Any]) -> list[Sequence[Split]]:
    first = next(iter(files))
    return [form.list_splits(path, number, first) for number, path in enumerate(files)]


def _read(form: Format, split: Split) -> list[Any]:
    return list(form.read(split).elements())


def _refuses(read: Any, path: str) -> None:
    try:
        read()
    except FileError as error:
        check(path in str(error), f"the error does not name the file: {error}")
    else:
        check(False, f"{path} is not there, and no FileError was raised")
