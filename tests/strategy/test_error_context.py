"""Messages of errors of any kind name the place at which they were raised."""

import pickle

import pandas as pd
import pytest

import daskdist
from daskdist import errors
from daskdist.strategy.values.error_context import add_context


class WordedError(Exception):
    """An error that makes its message itself."""

    def __str__(self):
        return f"worded {self.args[0]}"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad"), "bad (on replica 1)"),
        (AssertionError(), "on replica 1"),
        (RuntimeError("a", "b"), "('a', 'b')"),
        (KeyError("x"), "'x'"),
        (OSError(2, "missing"), "[Errno 2] missing"),
        (WordedError("x"), "worded x"),
        (StopIteration(), ""),
    ],
)
def test_context_is_added_to_any_error(error, message):
    arguments = error.args
    add_context(error, "on replica 1")
    assert str(error) == message
    if "on replica 1" not in message:
        assert (error.args, error.__notes__) == (arguments, ["on replica 1"])
    assert str(pickle.loads(pickle.dumps(error))) == message


@pytest.mark.parametrize(
    "use",
    [
        lambda ds, path: ds.to_parquet(path),
        lambda ds, path: ds.to_tfrecord(path),
        lambda ds, path: ds.save(path),
        lambda ds, path: ds.to_pandas(),
        lambda ds, path: ds.describe(),
        lambda ds, path: list(ds.split(0.5, seed=0, by="text")[0]),
        lambda ds, path: list(ds.split(0.5, seed=0, stratify="text")[0]),
        lambda ds, path: list(ds.kfold(2, seed=0, stratify="text")[0][0]),
        lambda ds, path: list(ds.select("text")),
        lambda ds, path: list(ds.rename({"text": "words"})),
    ],
)
def test_operations_that_inspect_columns_report_failed_reading(use, tmp_path):
    pd.DataFrame({"text": ["a", None], "x": [1, 2]}).to_parquet(tmp_path / "in.parquet")
    with pytest.raises(errors.FileError, match="column 'text' of type large_string has 1 null"):
        use(daskdist.read_parquet(tmp_path / "in.parquet"), tmp_path / "out")
