"""Images in folders: which files are images, their classes, the arrays, and reading many of them together."""

from __future__ import annotations

import shutil
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import dask
import fsspec
import numpy as np
import pytest
from PIL import Image

import daskdist
from daskdist import TensorSpec, class_names_of, errors, read_images
from daskdist.core.dataset_base import node_of
from daskdist.core.primitive import Split
from daskdist.formats.images import Images
from daskdist.storage.grouped_splits import GroupedSplits
from daskdist.testing import FormatLaws


def picture(k, height=5, width=7):
    return np.random.default_rng(k).integers(0, 256, (height, width, 3), np.uint8)


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """Write five pictures of two classes, and files that are no pictures."""
    for k, name in enumerate(["dog/0.png", "dog/1.PNG", "cat/a.png", "cat/deep/b.bmp", "dog/2.png"]):
        save(tmp_path / name, picture(k))
    for name in ("dog/notes.txt", "dog/.hidden.png", ".cache/x.png", "cat/.thumbs/x.png", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    return tmp_path


class TestImages(FormatLaws):
    def make_format(self):
        return Images()

    def write(self, directory):
        return {save(directory / f"{k}.png", picture(k, 5 + k)): [picture(k, 5 + k)] for k in range(3)}

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        # The laws want an empty file, but every file here has an image.
        assert len(self.write(tmp_path)) > 1


class TestImagesOfClasses(TestImages):
    def make_format(self):
        return Images((4, 6), "L", str(self.root), ("cat", "dog"))

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path):
        self.root = tmp_path

    def write(self, directory):
        written = {}
        for k, name in enumerate(["cat", "dog"]):
            path = save(directory / name / f"{k}.jpg", picture(k, 8), quality=95)
            with Image.open(path) as image:
                gray = np.asarray(image.convert("L").resize((6, 4), Image.Resampling.BILINEAR))
            written[path] = [(gray[:, :, None], np.int64(k))]
        return written


# --- which files, and what class ---


def test_pairs_of_image_and_class(folder):
    ds = read_images(folder)
    assert ds.element_spec == (TensorSpec((None, None, 3), "uint8"), TensorSpec((), "int64"))
    rows = list(ds)
    daskdist.testing.same_elements(
        rows, [(picture(k), np.int64(label)) for k, label in [(2, 0), (3, 0), (0, 1), (1, 1), (4, 1)]]
    )
    assert class_names_of(folder) == ["cat", "dog"]
    assert ds.cardinality() == 5
    images, labels = next(iter(ds.batch(5)))
    assert (images.shape, labels.tolist()) == ((5, 5, 7, 3), [0, 0, 1, 1, 1])


def test_images_alone(folder):
    save(folder / "loose.png", picture(9))
    images = list(read_images(str(folder), labels=None))
    assert [int(image[0, 0, 0]) for image in images] == [int(picture(k)[0, 0, 0]) for k in (2, 3, 0, 1, 4, 9)]
    with pytest.raises(errors.ArgumentError, match=r"1 images, .*loose\.png.*in no folder below .*labels=None"):
        read_images(folder)
    with pytest.raises(errors.ArgumentError, match="class_names has no effect with labels=None"):
        read_images(folder, labels=None, class_names=["cat"])


def test_names_of_classes_that_are_given(folder):
    ds = read_images(folder, class_names=["bird", "dog", "cat"])
    assert [int(label) for _, label in ds] == [2, 2, 1, 1, 1]
    with pytest.raises(errors.ArgumentError, match=r"class_names is \['dog'\], but below .* also images in \['cat'\]"):
        read_images(folder, class_names=["dog"])
    with pytest.raises(errors.ArgumentError, match="a name twice"):
        read_images(folder, class_names=["dog", "cat", "dog"])


def test_extensions(folder):
    assert len(list(read_images(folder, extensions=[".bmp"]))) == 1
    assert class_names_of(folder, extensions=".BMP") == ["cat"]
    with pytest.raises(errors.ArgumentError, match="suffixes with their dots"):
        read_images(folder, extensions=["png"])
    with pytest.raises(errors.FileError, match=r"no image below .*: no name ends in '\.tif'"):
        read_images(folder, extensions=[".tif"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"labels": "inferred"}, "labels is 'inferred'; give 'folder' or None"),
        ({"mode": "BGR"}, "the mode of images is 'BGR'"),
        ({"resize": 224}, "resize is 224"),
        ({"resize": (2.0, 3)}, "resize is "),
        ({"resize": (-2, 3)}, "resize is "),
    ],
)
def test_invalid_options_are_refused(folder, options, why):
    with pytest.raises(errors.ArgumentError, match=why):
        read_images(folder, **options)


def test_paths_that_are_no_directory(folder):
    for path in (folder / "dog/0.png", str(folder / "*")):
        with pytest.raises(errors.FileError, match="is not a directory"):
            read_images(path)
    with pytest.raises(errors.FileError, match="no such file"):
        read_images(folder / "nowhere")
    with pytest.raises(errors.ArgumentError, match="expected a directory, got list"):
        read_images([folder])


def test_directories_elsewhere(folder):
    memory = fsspec.filesystem("memory")
    archive = folder.parent / f"{folder.name}.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            inside = path.relative_to(folder).as_posix()
            file.write(path, f"train/{inside}")
            memory.pipe(f"/{folder.name}/{inside}", path.read_bytes())
    for url in (f"zip://train::{archive}", f"memory://{folder.name}", f"memory://{folder.name}/", f"file://{folder}"):
        ds = read_images(url, extensions=[".png"])
        assert [int(label) for _, label in ds] == [0, 1, 1, 1], url
        assert class_names_of(url) == ["cat", "dog"]
    memory.rm(f"/{folder.name}", recursive=True)


# --- what images become ---


def test_resizing_is_pillows(tmp_path):
    paths = [save(tmp_path / "x" / f"{k}.png", picture(k, 9 + k, 5)) for k in range(4)]
    ds = read_images(tmp_path, resize=(6, 4))
    assert ds.element_spec[0] == TensorSpec((6, 4, 3), "uint8")
    images, _ = next(iter(ds.batch(4)))
    for image, path in zip(images, paths, strict=True):
        np.testing.assert_array_equal(image, Image.open(path).resize((4, 6), Image.Resampling.BILINEAR))
    with pytest.raises(errors.StackError):
        list(read_images(tmp_path).batch(4))
    assert len(next(iter(read_images(tmp_path, labels=None).ragged_batch(4)))) == 4


def test_modes(tmp_path):
    save(tmp_path / "x/0.png", picture(0)[:, :, 0])
    save(tmp_path / "x/1.png", np.dstack([picture(0), picture(1)[:, :, :1]]))
    for mode, shapes in [("RGB", [3, 3]), ("L", [1, 1]), ("RGBA", [4, 4]), (None, [1, 4])]:
        assert [image.shape[2] for image, _ in read_images(tmp_path, mode=mode)] == shapes
    deep = Image.fromarray(np.zeros((2, 2), np.uint16))
    deep.save(tmp_path / "x/2.png")
    with pytest.raises(errors.FileError, match=r"2\.png: not an image .*do not fit into 8 bits"):
        list(read_images(tmp_path))


def test_orientations_are_not_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "x/0.png", picture(0), exif=exif)
    ((image, _),) = read_images(tmp_path)
    np.testing.assert_array_equal(image, picture(0))


# --- what cannot be read ---


def test_a_broken_image_is_an_error_and_left_out_by_itself(folder, monkeypatch):
    broken = folder / "dog/1.PNG"
    broken.write_bytes(broken.read_bytes()[:60])
    save(folder / "dog/9.png", np.zeros((50, 50, 3), np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    ds = read_images(folder)
    with pytest.raises(errors.FileError, match=r"1\.PNG: not an image that Pillow can decode, of 60 bytes"):
        list(ds)
    iterator = iter(ds.ignore_errors())
    assert [int(label) for _, label in iterator] == [0, 0, 1, 1]
    skipped = {str(broken): 1, str(folder / "dog/9.png"): 1}
    assert iterator.stats()["skipped_by_file"] == skipped
    (folder / "cat/a.png").unlink()
    with pytest.raises(errors.FileError, match=r"a\.png: not found"):
        list(ds)
    # A file that is gone is not damaged, so it is an error, after which the iterator goes on.
    iterator = iter(ds.ignore_errors())
    with pytest.raises(errors.FileError, match=r"a\.png: not found"):
        next(iterator)
    assert [int(label) for _, label in iterator] == [0, 1, 1]
    assert iterator.stats()["skipped_by_file"] == skipped


def test_all_broken(tmp_path):
    for k in range(3):
        (tmp_path / f"{k}.png").write_bytes(b"")
    iterator = iter(read_images(tmp_path, labels=None).ignore_errors())
    assert list(iterator) == []
    assert iterator.stats()["num_skipped"] == 3


def test_errors_of_images_name_the_file(folder):
    ds = read_images(folder, resize=(2, 2)).map(_fails_on_the_second)
    with pytest.raises(errors.UserFunctionError, match=r"row 0 of .*dog.1\.PNG"):
        list(ds)


def _fails_on_the_second(image, label):
    if np.array_equal(image, np.asarray(Image.fromarray(picture(1)).resize((2, 2), Image.Resampling.BILINEAR))):
        raise ValueError("the second")
    return image, label


def test_without_pillow(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'daskdist\[images\]'"):
        read_images(folder)


# --- read together ---


def splits_of(sizes):
    return [Split(f"{k}", k, 1, size, k, f"/{k}") for k, size in enumerate(sizes)]


def test_neighbouring_splits_are_joined():
    with dask.config.set({"daskdist.split-bytes": 10}):
        joined = GroupedSplits(splits_of([4, 4, 4, 20, 1, 1, 1, 1]), 3)
    assert [len(joined[k].payload) for k in range(4)] == [2, 1, 1, 3]
    assert len(joined) == 5
    assert [(split.label, split.num_rows, split.num_bytes, split.file, split.path) for split in joined] == [
        ("0 to 1", 2, 8, 0, "/0"),
        ("2", 1, 4, 2, "/2"),
        ("3", 1, 20, 3, "/3"),
        ("4 to 6", 3, 3, 4, "/4"),
        ("7", 1, 1, 7, "/7"),
    ]
    assert [part.payload for split in joined for part in split.payload] == list(range(8))
    with pytest.raises(IndexError):
        joined[5]
    unknown = GroupedSplits([Split("a", 0), Split("b", 1, 1, 1)], 3)[0]
    assert (unknown.num_rows, unknown.num_bytes) == (None, None)


def test_many_files_are_few_calls_and_list_fast(tmp_path):
    content = Path(save(tmp_path / "a/0.png", picture(0))).read_bytes()
    for k in range(1, 2000):
        (tmp_path / f"a/{k:04d}.png").write_bytes(content)
    start = time.thread_time()
    ds = read_images(tmp_path, resize=(2, 2))
    assert ds.cardinality() == 2000
    assert time.thread_time() - start < 3
    assert len(node_of(ds).splits()) == 2000
    read = node_of(ds).lower(())
    assert len(read.splits()) == -(-2000 // 64)
    assert len(node_of(ds).lower(()).function(read.splits()[0])) == 64


def owner_of(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("odd", [0, 1, 70, 99])
def test_an_image_of_another_width_keeps_no_other_in_memory(tmp_path, odd):
    pictures = [picture(k, width=9 if k == odd else 7) for k in range(100)]
    for k, value in enumerate(pictures):
        save(tmp_path / f"{k:02d}.png", value)
    images = list(read_images(tmp_path, labels=None))
    daskdist.testing.same_elements(images, pictures)
    # 64 images are read together. If they have one shape, they are rows of one array; otherwise each is an array.
    is_alone = [owner_of(image).nbytes == image.nbytes for image in images]
    assert is_alone == [k // 64 == odd // 64 for k in range(100)]


def test_a_large_first_image_reserves_no_memory_for_the_others(tmp_path):
    save(tmp_path / "00.png", np.zeros((1500, 1500, 3), np.uint8))
    for k in range(1, 64):
        save(tmp_path / f"{k:02d}.png", picture(k))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_images(tmp_path, labels=None)) == 64
        # 64 images as large as the first would take 432 MB.
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


def test_each_worker_reads_its_own_files(folder):
    node = node_of(read_images(folder))
    labels = []
    for index in range(2):
        share = node.shard_of_files(index, 2, by_split=False)
        read = share.lower(())
        assert len(read.splits()) == 1
        assert [split.file for split in share.splits()] == list(range(index, 5, 2))
        labels.append([int(label) for _, label in read.function(read.splits()[0]).elements()])
    assert labels == [[0, 1, 1], [0, 1]]


def test_a_position_resumes_the_rest(folder):
    for k in range(100):
        shutil.copy(folder / "cat/a.png", folder / f"cat/{k:03d}.png")
    ds = read_images(folder, resize=(3, 3))
    iterator = iter(ds)
    taken = [next(iterator) for _ in range(70)]
    state = iterator.state_dict()
    rest = list(iterator)
    assert len(taken) + len(rest) == 105
    again = iter(ds)
    again.load_state_dict(state)
    daskdist.testing.same_elements(list(again), rest)
