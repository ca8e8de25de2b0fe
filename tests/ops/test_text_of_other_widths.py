"""Text and bytes of other widths in files, datasets that are joined, and states: never cut, never refused."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import zarr

import daskdist
from daskdist import Dataset, TensorSpec, errors

WORDS = {"U": (["a", "bbb"], ["ccccc"]), "S": ([b"a", b"bbb"], [b"ccccc"])}


@pytest.fixture(params=["U", "S"])
def kind(request):
    return request.param


@pytest.fixture(params=["short first", "long first"])
def parts(request, kind):
    short, long = map(np.array, WORDS[kind])
    return (short, long) if request.param == "short first" else (long, short)


def together(parts):
    return [word for part in parts for word in part.tolist()]


def words(ds):
    return [np.asarray(word).item() for word in ds]


def joined(parts):
    return Dataset.from_tensor_slices(parts[0]).concatenate(Dataset.from_tensor_slices(parts[1]))


def _npy(path, array):
    np.save(f"{path}.npy", array)


def _npz(path, array):
    np.savez(f"{path}.npz", word=array)


def _hdf5(path, array):
    with h5py.File(f"{path}.h5", "w") as file:
        file["word"] = array


def _zarr(path, array):
    zarr.save(f"{path}.zarr", array)


def _saved(path, array):
    Dataset.from_tensor_slices(array).save(f"{path}.saved")


READ = {
    _npy: daskdist.read_npy,
    _npz: lambda paths: daskdist.read_npy(paths, "word"),
    _hdf5: lambda paths: daskdist.read_hdf5(paths, "word"),
    _zarr: daskdist.read_zarr,
    _saved: daskdist.read_files,
}


@pytest.mark.filterwarnings("ignore:The data type")
@pytest.mark.parametrize("write", READ, ids=lambda write: write.__name__[1:])
def test_files(tmp_path, parts, kind, write):
    if write is _hdf5 and kind == "U":
        pytest.skip("HDF5 has no text of NumPy's kind")
    for number, part in enumerate(parts):
        write(tmp_path / f"{number}", part)
    ds = READ[write](sorted(map(str, tmp_path.iterdir())))
    expected = together(parts)
    assert words(ds) == expected
    (batch,) = ds.batch(4)
    assert batch.tolist() == expected
    assert words(ds.map(lambda word: np.strings.add(word, word))) == [word * 2 for word in expected]
    ds.save(tmp_path / "saved")
    assert words(Dataset.load(tmp_path / "saved")) == expected
    ds.map(lambda word: {"word": word}).to_parquet(tmp_path / "table")
    assert words(daskdist.read_parquet(tmp_path / "table", "word")) == expected


def test_other_shapes_are_still_refused(tmp_path):
    np.save(tmp_path / "0.npy", np.array([["a", "b"]]))
    np.save(tmp_path / "1.npy", np.array([["ccc"]]))
    with pytest.raises(errors.FileError, match=r"1\.npy: its elements are .*, but those of the first file"):
        list(daskdist.read_npy(tmp_path))
    np.save(tmp_path / "1.npy", np.array([[b"ccc", b"d"]]))
    with pytest.raises(errors.FileError, match=r"1\.npy: its elements are .*, but those of the first file"):
        list(daskdist.read_npy(tmp_path))


@pytest.mark.filterwarnings("ignore:The data type")
def test_joined_datasets(tmp_path, parts):
    ds, expected = joined(parts), together(parts)
    assert ds.element_spec == TensorSpec((), np.array(expected).dtype)
    assert words(ds) == words(ds.cache()) == words(ds.unique()) == expected
    assert [batch.tolist() for batch in ds.batch(4)] == [expected]
    assert sorted(words(ds.shuffle(4, seed=1))) == sorted(expected)
    first, second = map(Dataset.from_tensor_slices, parts)
    assert sorted(words(Dataset.sample_from_datasets([first, second], seed=1))) == sorted(expected)
    choices = Dataset.from_tensor_slices(np.array([1, 0]))
    assert words(Dataset.choose_from_datasets([first, second], choices)) == [part[0].item() for part in parts[::-1]]
    windows = ds.group_by_window(lambda word: 0, lambda key, window: window.batch(4), 4)
    assert [batch.tolist() for batch in windows] == [expected]
    for write, read in ((ds.save, Dataset.load), (ds.to_npy, daskdist.read_npy), (ds.to_zarr, daskdist.read_zarr)):
        write(tmp_path / write.__name__)
        assert words(read(tmp_path / write.__name__)) == expected


def test_text_and_bytes_of_any_width_join_others(tmp_path, parts):
    plain = Dataset.from_tensor_slices(parts[0].tolist())
    ds = plain.concatenate(Dataset.from_tensor_slices(parts[1]))
    assert words(ds) == together(parts)
    assert [batch.tolist() for batch in ds.batch(4)] == [together(parts)]
    ds.save(tmp_path / "saved")
    assert words(Dataset.load(tmp_path / "saved")) == together(parts)


def test_equal_words_of_other_widths_are_not_unique(parts):
    wider = [part.astype(f"{part.dtype.kind}9") for part in parts]
    plain = [part.tolist() for part in parts]
    for others in (wider, plain):
        ds = joined(parts).concatenate(joined(others))
        assert words(ds.unique()) == together(parts)
        assert [(word.item() if hasattr(word, "item") else word, int(x)) for word, x in pairs(ds).unique()] == [
            (word, 1) for word in together(parts)
        ]
        assert len(list(ds.map(lambda word: [word, word]).unique())) == len(together(parts))


def pairs(ds):
    return Dataset.zip((ds, Dataset.range(1).map(lambda x: x + 1).repeat(6)))


def test_pipelines_of_a_function_may_have_other_widths(parts):
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    numbers = iter(range(2))
    distributed = strategy.distribute_datasets_from_function(
        lambda context: Dataset.from_tensor_slices(parts[next(numbers)][:1]).batch(1),
        daskdist.InputOptions(replication_mode="PER_REPLICA"),
    )
    (step,) = distributed
    assert [part.tolist() for part in strategy.local_results(step)] == [part[:1].tolist() for part in parts]


def test_text_does_not_join_bytes():
    text, data = Dataset.from_tensor_slices(np.array(["a"])), Dataset.from_tensor_slices(np.array([b"a"]))
    with pytest.raises(errors.ArgumentError, match="dtype and rank must be the same"):
        text.concatenate(data)


def test_generators_and_states(parts):
    expected = together(parts)
    spec = TensorSpec((), parts[0].dtype)
    for elements in (expected, [*parts[0], *parts[1]]):
        assert words(Dataset.from_generator(lambda: iter(elements), output_signature=spec)) == expected  # noqa: B023
    first, last = parts[0][0], parts[1][0]
    for state in (last, last.item()):
        ds = Dataset.range(2).scan(first, lambda old, number: (state, old))  # noqa: B023
        assert words(ds) == [first.item(), last.item()]
        assert np.asarray(Dataset.range(2).reduce(first, lambda old, number: state)).item() == last.item()  # noqa: B023
    with pytest.raises(errors.UserFunctionError, match="must stay the same"):
        Dataset.range(2).reduce(first, lambda old, number: 1)
