"""Messages of errors of any kind name the place at which they were raised."""

import pickle
import subprocess
import sys

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


# A program whose errors are of classes of its main module, which workers do not have.
PROGRAM = """
import sys
import {first}
import daskdist, numpy as np, threading
from dask.distributed import Client, LocalCluster
from daskdist import Dataset, Options, TensorSpec, errors

class Invalid(Exception):
    def __init__(self, what, row):
        super().__init__(what)

class Holding(ValueError):
    def __init__(self, *, row):
        super().__init__(f"row {{row}}", lambda: row)
        self.row, self.lock = row, threading.Lock()

def two_arguments(x):
    if x == 3:
        raise Invalid("bad", 3)
    return x

def with_a_lock(x):
    if x == 3:
        raise Holding(row=3)
    return x

def numbers():
    yield from map(two_arguments, range(6))

def read(strategy, steps):
    return [np.asarray(part) for step in steps for part in strategy.local_results(step)]

def main():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        for fn, kind in ((two_arguments, Invalid), (with_a_lock, Holding)):
            rows = Dataset.range(6).map(fn)
            generated = Dataset.from_generator(numbers, output_signature=TensorSpec((), np.int64))
            ways = {{
                "here": lambda: list(rows),
                "threads": lambda: list(Dataset.range(6).map(fn, num_parallel_calls=2)),
                "processes": lambda: list(rows.with_options(Options(num_processes=2))),
                "service": lambda: list(rows.serve(client)),
                "cluster": lambda: read(strategy, strategy.distribute_dataset(rows.batch(2))),
                "generator": lambda: read(strategy, strategy.distribute_dataset(generated.batch(2))),
                "own datasets": lambda: read(
                    strategy, strategy.distribute_datasets_from_function(lambda context: rows.batch(1))
                ),
                "loop": lambda: read(strategy, [strategy.run(list, (strategy.distribute_dataset(rows.batch(2)),))]),
                "compute": lambda: rows.compute(),
                "delayed": lambda: [part.compute() for part in rows.to_delayed()],
            }}
            for name, way in ways.items():
                try:
                    way()
                    print(name, "no error")
                except errors.UserFunctionError as error:
                    expected = Invalid if name == "generator" else kind
                    if type(error.__cause__) is not expected:
                        print(name, kind, repr(error.__cause__))
                except Exception as error:
                    print(name, kind, repr(error))
            for name, way in {{
                "run": lambda: read(strategy, [strategy.run(fn, args=(3,))]),
                "dataset_fn": lambda: strategy.distribute_datasets_from_function(lambda context: fn(3)).cardinality(),
            }}.items():
                try:
                    way()
                    print(name, "no error")
                except kind:
                    pass
                except Exception as error:
                    print(name, kind, repr(error))
        strategy.close()
    print("done")

if __name__ == "__main__":
    main()
"""


@pytest.mark.cluster
@pytest.mark.parametrize("first", ["daskdist.errors", "distributed"])
def test_errors_keep_their_types_wherever_a_function_ran(first, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(first=first))
    # A new interpreter, as those of other tests have imported both packages already.
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "done\n", done.stdout + done.stderr[-2000:]


@pytest.mark.cluster
def test_damaged_files_are_file_errors_on_a_cluster(on_cluster, tmp_path):
    pd.DataFrame({"x": range(100)}).to_parquet(tmp_path / "rows.parquet")
    whole = (tmp_path / "rows.parquet").read_bytes()
    rows = daskdist.read_parquet(tmp_path / "rows.parquet", "x").batch(10)
    distributed = on_cluster.distribute_dataset(rows)
    (tmp_path / "rows.parquet").write_bytes(b"x" * len(whole))
    with pytest.raises(errors.FileError, match=r"rows\.parquet"):
        [on_cluster.local_results(step)[0].numpy() for step in distributed]
