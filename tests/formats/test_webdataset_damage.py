"""Hostile and damaged archives."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import dask
import numpy as np
import pytest
from PIL import Image
from webdataset_archives import archive, npy, picture, png, save

from daskdist import Options, errors, read_webdataset
from daskdist.core.dataset_base import node_of

SKIP = Options(on_error="skip")

# --- hostile and damaged archives ---


def link(name, kind=tarfile.SYMTYPE, target="/etc/passwd"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/etc/x.cls", "has an absolute name"),
        ("\\x.cls", "has an absolute name"),
        ("C:/x.cls", "has an absolute name"),
        ("c:x.cls", "has an absolute name"),
        ("../x.cls", "points outside the archive"),
        ("a/../../x.cls", "points outside the archive"),
        ("a\\..\\x.cls", "points outside the archive"),
        ("..", "points outside the archive"),
        ("/README", "has an absolute name"),
        (link("x.cls"), "is a symbolic link"),
        (link("x.cls", tarfile.LNKTYPE), "is a hard link"),
        (link("x.cls", tarfile.CHRTYPE), "is a device"),
        (link("x.cls", tarfile.FIFOTYPE), "is a pipe"),
        (link("x.cls", b"Z"), "is of the type 'Z'"),
        (link("x", tarfile.SYMTYPE), "is a symbolic link"),
    ],
    ids=lambda value: value.name + value.type.decode() if isinstance(value, tarfile.TarInfo) else value,
)
def test_hostile_members(tmp_path, name, why):
    path = save(tmp_path, [("a.cls", b"1"), (name, b""), ("z.cls", b"2")])
    before = sorted(tmp_path.rglob("*"))
    shown = (name.name if isinstance(name, tarfile.TarInfo) else name).replace("\\", "\\\\")
    with pytest.raises(errors.FileError) as caught:
        list(read_webdataset(path, "cls"))
    assert path in str(caught.value)
    assert f"the member '{shown}'" in str(caught.value)
    assert why in str(caught.value)
    kept = list(iterator := iter(read_webdataset(path, "cls").ignore_errors()))
    assert [int(cls) for cls in kept] == [1, 2]
    assert iterator.stats()["skipped_by_file"] == {path: 1}
    assert sorted(tmp_path.rglob("*")) == before


def test_names_in_extra_headers_are_checked(tmp_path):
    for name, why in [
        ("a\0b.cls", "that contains a NUL"),
        ("b\udcff.cls", "that is not UTF-8"),
        ("x/../y.cls", "points outside"),
    ]:
        plain = tarfile.TarInfo("plain.cls")
        plain.pax_headers = {"path": name}
        path = save(tmp_path, [("a.cls", b"1"), (plain, b"3"), ("z.cls", b"2")])
        with pytest.raises(errors.FileError, match=why):
            list(read_webdataset(path, "cls"))
        assert [int(cls) for cls in read_webdataset(path, "cls").ignore_errors()] == [1, 2]


def test_sparse_members_and_two_of_one_field(tmp_path):
    sparse = tarfile.TarInfo("b.cls")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    path = save(tmp_path, [("a.cls", b"1"), (sparse, b"3"), ("c.cls", b"4"), ("c.CLS", b"5"), ("z.cls", b"2")])
    with pytest.raises(errors.FileError, match=r"'b.cls' is a sparse file"):
        list(read_webdataset(path))
    assert [int(cls) for cls in read_webdataset(path, "cls").ignore_errors()] == [1, 2]
    path = save(tmp_path, [("c.cls", b"4"), ("c.CLS", b"5")])
    with pytest.raises(errors.FileError, match=r"the member 'c.CLS' is a second one for the field 'cls'"):
        read_webdataset(path)


@pytest.mark.parametrize("split_bytes", [1000, "16 MiB"])
def test_a_damaged_header_costs_its_sample(tmp_path, split_bytes):
    path = save(tmp_path, [(f"{k}.{end}", b"5" * 700) for k in range(6) for end in ("txt", "bin")])
    content = bytearray(Path(path).read_bytes())
    at = content.index(b"3.bin\0")
    content[at + 2] ^= 4
    Path(path).write_bytes(content)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_webdataset(path)
        with pytest.raises(errors.FileError, match=r"the checksum does not match|has no field 'bin'"):
            list(ds)
        iterator = iter(ds.ignore_errors())
        assert [row["__key__"] for row in iterator] == ["0", "1", "2", "4", "5"]
        assert iterator.stats()["num_skipped"] >= 2
        first = next(split for split in node_of(ds).splits() if split.payload.range.stop > content.index(b"3.txt\0"))
        with pytest.raises(errors.FileError, match=f"at byte {at}: a member has no valid header|lacks|has no field"):
            node_of(ds).format.read(first)


@pytest.mark.parametrize("cut", [-10240, -20000, -10241, 30_000, 512, 700])
@pytest.mark.parametrize("split_bytes", [1000, "16 MiB"])
def test_an_archive_cut_short(tmp_path, cut, split_bytes):
    whole = archive([(f"{k}.{end}", b"5" * 700) for k in range(20) for end in ("txt", "bin")])
    whole = whole[: -(-(whole.rindex(b"5") + 1) // 512) * 512] + bytes(10240)
    path = tmp_path / "a.tar"
    path.write_bytes(whole[:cut])
    num_whole = len(whole[:cut]) // (2 * 1536)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        if not num_whole:
            with pytest.raises(errors.FileError, match=r"a\.tar: not a tar archive, or damaged"):
                read_webdataset(path)
            return
        ds = read_webdataset(path)
        with pytest.raises(errors.FileError, match=r"a\.tar bytes .*damaged or cut short: at byte \d+: the "):
            list(ds)
        iterator = iter(ds.ignore_errors())
        assert [row["__key__"] for row in iterator] == [str(k) for k in range(num_whole)]
        assert iterator.stats()["num_skipped"] >= 1


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_archive_cut_short(tmp_path, compress):
    noise = np.random.default_rng(0)
    num_bytes = 10_000 if compress is gzip.compress else 500
    whole = compress(archive([(f"{k:03d}.bin", noise.bytes(num_bytes)) for k in range(200)]))
    path = tmp_path / f"a.tar.{ {gzip.compress: 'gz', bz2.compress: 'bz2', lzma.compress: 'xz'}[compress] }"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.FileError, match=r"a\.tar\..*damaged or cut short|access denied|damaged"):
        list(read_webdataset(path, decode=False))
    if compress is gzip.compress:
        with dask.config.set({"daskdist.split-bytes": "200 kB"}):
            kept = [row["__key__"] for row in read_webdataset(path).ignore_errors()]
        assert kept == [f"{k:03d}" for k in range(len(kept))]
        assert 50 < len(kept) < 150


def test_files_that_are_not_archives(tmp_path):
    (tmp_path / "a.tar").write_text("words " * 1000)
    with pytest.raises(errors.FileError, match=r"a\.tar: not a tar archive, or damaged.*checksum"):
        read_webdataset(tmp_path / "a.tar")
    (tmp_path / "b.tgz").write_bytes(gzip.compress(archive([("a.cls", b"1")]))[:-20] + b"garbage")
    with pytest.raises(errors.FileError, match=r"b\.tgz"):
        list(read_webdataset(tmp_path / "b.tgz"))


def test_damaged_images_are_left_out_by_themselves(tmp_path, monkeypatch):
    good = png(picture(0, 20, 20))
    deep = io.BytesIO()
    Image.fromarray(np.zeros((2, 2), np.uint16)).save(deep, "PNG")
    bad = {
        "a": good[: len(good) // 2],
        "b": b"not an image",
        "c": good.replace(b"IDAT", b"IDAX", 1),
        "d": b"",
        "e": deep.getvalue(),
        "f": png(np.zeros((100, 100, 3))),
        "g": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n",
    }
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    members = [m for key, content in bad.items() for m in [(f"{key}.png", content), (f"0{key}.png", good)]]
    path = save(tmp_path, members)
    for key, error in [
        ("b", "UnidentifiedImageError"),
        ("f", "DecompressionBombError"),
        ("e", "8 bits"),
        ("g", "Unid"),
    ]:
        with pytest.raises(errors.FileError, match=rf"sample '{key}': the member '{key}\.png' at byte \d+ .*{error}"):
            list(read_webdataset(save(tmp_path, [("0.png", good), (f"{key}.png", bad[key])], "b.tar")))
    iterator = iter(read_webdataset(path).ignore_errors())
    assert [row["__key__"] for row in iterator] == [f"0{key}" for key in bad]
    assert iterator.stats()["skipped_by_file"] == {path: len(bad)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (npy(np.array([{}], object), allow_pickle=True), "an array of Python objects"),
        (npy(np.zeros(9))[:-1], "has 72 bytes, but there are 71"),
        (npy(np.zeros(9)) + b"x", "has 72 bytes, but there are 73"),
        (b"\x93NUMPY\x09\x00" + npy(np.zeros(1))[8:], "of the format is unknown"),
        (b"numbers", "does not begin like a NumPy array"),
        (npy(np.zeros(3)).replace(b"(3,)", b"(-3,", 1), "cannot be decoded"),
        (npy(np.zeros(3)).replace(b"<f8", b"<q8", 1), "cannot be decoded"),
    ],
)
def test_damaged_arrays(tmp_path, content, why):
    path = save(tmp_path, [("a.npy", npy(np.zeros(2))), ("b.npy", npy(np.zeros(2)))] * 32 + [("c.npy", content)])
    with pytest.raises(errors.FileError, match=rf"sample 'c': the member 'c\.npy' at byte \d+ .*{why}"):
        list(read_webdataset(path))


@pytest.mark.parametrize("split_bytes", [600, "16 MiB"])
@pytest.mark.parametrize("number", range(6))
def test_only_samples_beside_a_damaged_header_may_lack_a_member(tmp_path, number, split_bytes):
    # Each number damages another header, of the first or the second member of a sample.
    path = save(tmp_path, [(f"{k}.{end}", b"5" * 100) for k in range(3) for end in ("txt", "bin")])
    content = bytearray(Path(path).read_bytes())
    content[number * 1024] ^= 4
    Path(path).write_bytes(content)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        kept = [row["__key__"] for row in read_webdataset(path, ["txt", "bin", "__key__"]).with_options(SKIP)]
    assert kept == [str(k) for k in range(3) if k != number // 2]


@pytest.mark.parametrize("split_bytes", [600, "16 MiB"])
@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ({"cls": b"1", "txt": b"x"}, {"cls": b"1"}, "sample '0' at byte 0: has no field 'txt'"),
        ({"cls": b"1"}, {"cls": b"1", "txt": b"x"}, "sample '0' at byte 0: has a field 'txt', which the first samples"),
        ({"json": b"1"}, {"json": b'"a"'}, "the field 'json' of sample '0' is 'a', which does not match"),
        ({"json": b'{"a": 1}'}, {"json": b'{"b": 1}'}, "of sample '0' is .*: it lacks 'a'; get text with"),
        ({"npy": npy(np.zeros(1))}, {"npy": npy(np.arange(2))}, r"'0\.npy' is int64\[2\], but those of the first"),
        (
            {"npy": npy(np.zeros(1))},
            {"npy": npy(np.array([{}], object), allow_pickle=True)},
            r"'0\.npy' at byte 0 cannot be .* an array of Python objects",
        ),
        (
            {"cls": b"1"},
            {"cls": b"cat"},
            r"its first 'cls' is 'cat', but a field of .* is an integer; .*decode=",
        ),
        ({"cls": b"1"}, {"cls": b"0.5\n"}, r"its first 'cls' is '0\.5', but a field of that name is an integer"),
    ],
)
def test_a_second_archive_with_another_schema_is_an_error_even_with_skip(tmp_path, first, other, message, split_bytes):
    for name, fields in (("0.tar", first), ("1.tar", other)):
        save(tmp_path, [(f"{k}.{end}", content) for k in range(4) for end, content in fields.items()], name)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        kept = iter(read_webdataset(tmp_path).with_options(SKIP))
        assert [next(kept)["__key__"] for _ in range(4)] == ["0", "1", "2", "3"]
        with pytest.raises(errors.FileError, match=rf"1\.tar bytes .*{message}") as caught:
            next(kept)
    assert type(caught.value) is errors.FileError


def test_labels_that_are_all_text_are_an_error_even_with_skip(tmp_path):
    path = save(tmp_path, [(f"{k}.cls", b"cat") for k in range(20)])
    with dask.config.set({"daskdist.split-bytes": 3000}):
        kept = iter(read_webdataset(path).with_options(SKIP))
        for _ in range(7):
            with pytest.raises(errors.FileError, match="is 'cat', but a field of that name is an integer") as caught:
                next(kept)
            assert type(caught.value) is errors.FileError
        assert list(kept) == []


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("cls", b"1", b"x1"),
        ("cls", b"1", str(2**63).encode()),
        ("json", b"1", b"{"),
        ("npy", npy(np.zeros(2)), npy(np.zeros(2))[:-1]),
        ("png", png(picture(0)), png(picture(0))[:-30]),
        ("txt", b"a", b"\xff"),
    ],
)
def test_values_that_do_not_parse_are_left_out(tmp_path, name, good, bad):
    save(tmp_path, [(f"0.{name}", good)], "0.tar")
    path = save(tmp_path, [(f"{k}.{name}", bad if k in (2, 4) else good) for k in range(1, 6)])
    kept = iter(read_webdataset(tmp_path).with_options(SKIP))
    assert [row["__key__"] for row in kept] == ["0", "1", "3", "5"]
    assert kept.stats()["skipped_by_file"] == {path: 2}


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"1\x00"])
def test_a_first_label_that_is_no_text_is_damage(tmp_path, content):
    path = save(tmp_path, [("0.cls", content), ("1.cls", b"1")])
    assert [row["__key__"] for row in read_webdataset(path).with_options(SKIP)] == ["1"]


def test_numbers_beyond_int64_are_an_error(tmp_path):
    path = save(tmp_path, [("a.cls", b"1"), ("b.cls", str(2**63).encode())])
    with pytest.raises(errors.FileError, match=r"'b\.cls' at byte \d+ .*does not fit into 64 bits"):
        list(read_webdataset(path))
