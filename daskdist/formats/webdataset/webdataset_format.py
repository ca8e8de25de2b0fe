"""WebDataset: tar archives in which consecutive members of one key are a sample; a split is a byte range of samples.

The key of a member is its name up to the first dot after the last slash, and the field is the rest after that dot, in
lower case, which determines how it is decoded (see ``decoding.py`` in this folder). Directories, members without that
dot or that begin with one, and those in a top folder ``__...__`` are ignored. Nothing is unpacked to a disk, but
members with paths that lead out of the archive are refused.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final

import numpy as np
import optree

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Block, Bundle, Rows
from daskdist.core.primitive import Split
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, TEXT, Structure, as_array
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.formats.image_codec import ImageOptions, pillow
from daskdist.formats.json.json_types import arrow_of
from daskdist.formats.webdataset.decoding import Decoding
from daskdist.formats.webdataset.samples import KEY, Sample, Samples, parts_of, samples_of, why_no_key
from daskdist.storage.byte_ranges import ByteRange, ByteRanges, RangeRecords
from daskdist.storage.compression import has_suffix
from daskdist.storage.failures import DamagedPart, proves_damage
from daskdist.storage.filesystem import Storage
from daskdist.storage.first_file import FirstFile
from daskdist.storage.libraries import pa
from daskdist.tables.columns import Columns
from daskdist.tables.from_arrow import leaves_of, spec_of
from daskdist.tables.replacements import Place
from daskdist.url_secrets import shown_cause

# The spec is inferred from the first file: bytes read at first (more until there is a sample), and the most samples.
_HEAD_BYTES: Final = 2**16
_MOST_SAMPLES: Final = 64
# The number of zero bytes at the end of an archive.
_END_BYTES: Final = 1024
# The approximate ratio of the size of an image in memory to that in its file.
_GROWTH: Final = 8


@dataclass(frozen=True, slots=True)
class WebDatasetSplit:
    """The part of an archive that a split reads."""

    range: ByteRange
    spec: ElementSpec


@dataclass(frozen=True)
class WebDataset:
    """The reader, with its options, and the writer.

    Parameters
    ----------
    columns
        The fields and their structure: see `Columns.of`; the key is ``"__key__"``.
    decode
        How to decode fields: see `Decoding`.
    image_mode, resize
        How to convert images: see `ImageOptions`.
    missing
        The replacements of missing members, by field.
    compression
        The compression of the files: ``"infer"``, a name, or None.
    storage
        The options of the file system.
    """

    columns: Any = None
    decode: bool | Mapping[str, str] = True
    image_mode: str | None = "RGB"
    resize: tuple[int, int] | None = None
    missing: Mapping[str, Any] | None = None
    compression: str | None = "infer"
    storage: Storage = field(default_factory=Storage)

    name = "webdataset"
    suffixes = (".tar", ".tgz")
    is_splittable = True

    def __post_init__(self) -> None:
        self.decoding()

    def guess(self, path: str, head: bytes) -> bool:
        return has_suffix(path, self.suffixes)

    def spec(self, path: str) -> ElementSpec:
        decoding = self.decoding()
        samples, is_sound = self._first_samples(path)
        members = [name for sample, _ in samples for name in sample.members]
        known = list(dict.fromkeys([KEY, *members, *(self.missing or ())]))
        if not samples:
            named = [] if self.columns is None else optree.tree_leaves(self.columns)
            if not named or any(name != KEY and decoding.spec(name) is None for name in named if isinstance(name, str)):
                raise DamagedFileError(
                    f"{path}: has no samples to infer the fields of an element from; leave the file out, or name the "
                    "fields, other than json and npy ones, with columns=[...]"
                )
            known = [name for name in named if isinstance(name, str)]
        for name in self.missing or ():
            if name not in members and decoding.spec(name) is None:
                raise ArgumentError(f"missing: none of the first samples has {name!r}; they have {members}")
        try:
            columns = Columns.of(self.columns, known)
        except ArgumentError as error:
            if is_sound:
                raise
            raise DamagedFileError(f"{path}: damaged or cut short: {error}, in the readable part") from None
        for leaf in columns.leaves:
            if isinstance(leaf, tuple) and any(name == KEY or decoding.kind(name) != "int" for name in leaf):
                raise ArgumentError(f"columns: {list(leaf)}: only integer fields can be joined in an array")
        if any(name != KEY and decoding.kind(name) == "image" for name in columns.names):
            pillow()
        specs = {name: self._field_spec(name, samples, path) for name in columns.names}
        for name in specs.keys() & (self.missing or {}).keys():
            self.replacement(name, specs[name])
        return columns.spec(specs.__getitem__)

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        decoding, names = self.decoding(), self.columns_of(first.spec).names
        has_images = any(name != KEY and decoding.kind(name) == "image" for name in names)
        listed = self._ranges.list(path, file, _GROWTH if has_images else 1)
        if not listed:
            raise DamagedFileError(f"{path}: has 0 bytes; an archive without members has at least 1024 zeros")
        return [replace(split, payload=WebDatasetSplit(split.payload, first.spec)) for split in listed]

    def read(self, split: Split) -> Block | Bundle:
        part: WebDatasetSplit = split.payload
        piece = self._ranges.read(replace(split, payload=part.range))
        if not piece.data:
            return Bundle(part.spec.structure, [], split.label)
        reading = _Reading(self, split.label, piece, part.spec)
        return reading.rows(list(map(reading.values, reading.samples)))

    def read_valid_rows(self, split: Split) -> tuple[Block | Bundle, list[DamagedPart]]:
        part: WebDatasetSplit = split.payload
        piece = self._ranges.read(replace(split, payload=part.range), is_lenient=True)
        reading = _Reading(self, split.label, piece, part.spec)
        kept: list[Any] = []
        damaged: list[DamagedPart] = []
        for number, sample in enumerate(reading.samples):
            try:
                kept.append(reading.values(sample))
            except DamagedFileError as error:
                damaged.append(DamagedPart(number, f"sample {sample.key!r} of {split.label}", str(error)))
        return reading.rows(kept), piece.with_rest(damaged, len(kept), split)

    def check(self, spec: ElementSpec) -> None:
        element = spec.packed
        if not isinstance(element, dict):
            raise ArgumentError(
                f"an element is {element}, but a sample is a dict whose keys are file extensions: "
                'map it to a dict first, such as {"png": image, "cls": label}'
            )
        decoding = self.decoding()
        for name, nest in element.items():
            leaves, structure = Structure.of(nest)
            field_spec = ElementSpec(structure, leaves)
            if name == KEY:
                why = "" if field_spec == _KEY_SPEC else f"is {field_spec.packed}, but keys are text"
            elif not isinstance(name, str) or parts_of(f"0.{name}") != ("0", name):
                why = "is not a file extension; give lower-case letters without a slash"
            else:
                why = decoding.why_not(name, field_spec)
            if why:
                raise ArgumentError(f"the field {name!r} {why}")
        if not element.keys() - {KEY}:
            raise ArgumentError("an element has no fields besides its key, but a sample needs at least one member")

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        decoding, keys = self.decoding(), set()
        with tarfile.open(mode="w|", fileobj=file, format=tarfile.PAX_FORMAT) as archive:
            for number, element in enumerate(rows.elements()):
                members = {
                    name: _encoded(decoding, name, value, number) for name, value in element.items() if name != KEY
                }
                key = str(element[KEY]) if KEY in element else _key_of(number, members)
                why = why_no_key(key) or ("another row has the same key" if key in keys else "")
                if why:
                    raise ArgumentError(f"row {number} has the invalid key {key!r}: {why}")
                keys.add(key)
                for name, content in members.items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))

    @property
    def _ranges(self) -> ByteRanges:
        return ByteRanges(Samples(), self.storage, self.compression)

    def decoding(self) -> Decoding:
        """Return the decoding of fields that the options ask for."""
        return Decoding(self.decode, ImageOptions(self.image_mode, self.resize))

    def columns_of(self, spec: ElementSpec) -> Columns:
        """Return the columns that the user names, or all fields of a spec."""
        names = list(spec.packed) if self.columns is None else optree.tree_leaves(self.columns)
        return Columns.of(self.columns, names)

    def _first_samples(self, path: str) -> tuple[list[tuple[Sample, bytes]], bool]:
        # Return the samples, each with the bytes that contain it, and whether there was nothing else.
        num_bytes = _HEAD_BYTES
        while True:
            data, is_all = self._ranges.head(path, num_bytes)
            samples = samples_of(data)
            # The last sample may continue after these bytes.
            whole = [sample for sample in (samples if is_all else samples[:-1]) if sample.end <= len(data)]
            sound = [(sample, data) for sample in whole if not sample.broken]
            if sound or is_all or whole:
                break
            num_bytes *= 4
        if sound or (data and not data.strip(b"\0")):
            is_sound = len(sound) == len(whole) and not (is_all and data[-_END_BYTES:].strip(b"\0"))
            return sound[:_MOST_SAMPLES], is_sound
        why = whole[0].broken if whole else f"it has {len(data)} bytes"
        raise DamagedFileError(f"{path}: not a tar archive, or damaged or cut short: {why}")

    def _field_spec(self, name: str, samples: list[tuple[Sample, bytes]], path: str) -> ElementSpec:
        if name == KEY:
            return _KEY_SPEC
        decoding = self.decoding()
        known = decoding.spec(name)
        if known is not None:
            return known
        values = []
        for sample, data in samples:
            if name in sample.members:
                member = sample.members[name]
                try:
                    values.append(decoding.decode(name, data[member.start : member.stop]))
                except Exception as error:
                    raise _unreadable(path, sample.key, member.name, member.begin, error) from shown_cause(error)
        if decoding.kind(name) == "json":
            return _spec_of_json(values, f"{path}: field {name!r}", name)
        kinds = {(array.dtype, array.ndim) for array in values}
        if len(kinds) > 1:
            kind_names = ", ".join(f"{dtype} of {rank} axes" for dtype, rank in sorted(kinds, key=str))
            raise FileError(f"{path}: the field {name!r} is {kind_names}; {_as_bytes(name)}")
        dtype, rank = kinds.pop()
        # The other samples may have axes of other lengths.
        return ElementSpec(LONE, (TensorSpec((None,) * rank, dtype),))

    def replacement(self, name: str, spec: ElementSpec) -> Any:
        """Return the decoded value of a field for samples that lack it.

        Raises
        ------
        ArgumentError
            The value in ``missing`` is not of the field's type.
        """
        value = (self.missing or {})[name]
        kind = self.decoding().kind(name)
        try:
            if kind == "json":
                _leaves_of_json([value], spec)
                return value
            (leaf,) = spec.conform(value)
        except (ArgumentError, FileError, ValueError, TypeError) as error:
            raise ArgumentError(f"missing: {value!r:.80} cannot be a value of {name!r}: {error}") from None
        return leaf if kind in ("image", "npy") else leaf[()]


_KEY_SPEC: Final = ElementSpec(LONE, (TensorSpec((), TEXT),))


class _Reading:
    # The reader of a range.
    def __init__(self, form: WebDataset, label: str, piece: RangeRecords, spec: ElementSpec) -> None:
        self.label = label
        self.spec = spec
        self.columns = form.columns_of(spec)
        self.samples = samples_of(piece.data)
        if self.samples and piece.broken is not None:
            self.samples[-1].is_beside_damage = True
        self._piece = piece
        self._decoding = form.decoding()
        self._is_all = form.columns is None
        self._specs: dict[str, ElementSpec] = {}
        for leaf, nest in zip(self.columns.leaves, self.columns.structure.leaves_of(spec.packed), strict=True):
            leaves, structure = Structure.of(nest)
            for name in leaf if isinstance(leaf, tuple) else (leaf,):
                field_spec = None if name == KEY else self._decoding.spec(name)
                self._specs[name] = field_spec or ElementSpec(structure, leaves)
        self._kinds = {name: "" if name == KEY else self._decoding.kind(name) for name in self._specs}
        replacements = self._specs.keys() & (form.missing or {}).keys()
        self._replacements = {name: form.replacement(name, self._specs[name]) for name in replacements}

    def values(self, sample: Sample) -> dict[str, Any]:
        """Return the key and the values of a sample, by field.

        Raises
        ------
        FileError
            The sample is damaged, lacks a field, has an additional one, or one of another type.
        """
        where = f"{self.label}: sample {sample.key!r} at byte {self._piece.offset + sample.begin}"
        if sample.broken:
            raise DamagedFileError(f"{where}: {sample.broken}")
        if self._is_all:
            for name in sample.members:
                if name not in self._specs:
                    raise FileError(
                        f"{where}: has a field {name!r}, which the first samples of the first file do not have; "
                        f"select fields with columns=[...], of {sorted(self._specs)}"
                    )
        return {KEY: sample.key} | {name: self._value(sample, name, where) for name in self._specs}

    def _value(self, sample: Sample, name: str, where: str) -> Any:
        if name == KEY:
            return sample.key
        member = sample.members.get(name)
        if member is None:
            if name in self._replacements:
                return self._replacements[name]
            kind = DamagedFileError if sample.is_beside_damage else FileError
            raise kind(
                f"{where}: has no field {name!r}, only {sorted(sample.members)}; give a value for it with "
                f"missing={{{name!r}: ...}}, or leave the field out with columns=[...]"
            )
        try:
            value = self._decoding.decode(name, self._piece.data[member.start : member.stop])
        # Errors of libraries for damaged data share no base class but Exception: Pillow alone raises six.
        except Exception as error:
            begin = self._piece.offset + member.begin
            if self._kinds[name] == "int":
                self._refuse_text(name)
            raise _unreadable(self.label, sample.key, member.name, begin, error) from shown_cause(error)
        if self._kinds[name] == "npy":
            spec = self._specs[name].leaves[0]
            if value.dtype != spec.dtype or value.ndim != len(spec.shape):
                raise FileError(
                    f"{where}: the array {member.name!r} is {value.dtype}{list(value.shape)}, but those of the first "
                    f"samples are {spec.dtype} with {len(spec.shape)} axes; {_as_bytes(name)}"
                )
        return value

    def _refuse_text(self, name: str) -> None:
        # Raise an error if integers are other text at the beginning of the archive, or in all samples: that is another
        # schema rather than damage. A single one elsewhere may be damaged.
        members = (sample.members[name] for sample in self.samples if name in sample.members)
        texts = (self._decoding.other_text(name, self._piece.data[member.start : member.stop]) for member in members)
        first = next(texts)
        if first and (self._piece.offset == 0 or (next(texts, "") and all(texts))):
            raise FileError(
                f"{self.label}: its first {name!r} is {first!r:.60}, but a field of that name is an integer; "
                f"{_as_text(name)}"
            )

    def rows(self, samples: list[dict[str, Any]]) -> Block | Bundle:
        """Convert samples to rows.

        Raises
        ------
        FileError
            JSON values do not match those of the first samples.
        """
        structure = self.spec.structure
        if not samples:
            return Bundle(structure, [], self.label)
        leaves = self.columns.arrays(lambda name: self._column(name, samples), self.label)
        if not any(isinstance(leaf, list) for leaf in leaves):
            return Block(structure, leaves, self.label)
        # Arrays that differ in more than their lengths.
        items = [tuple(as_array(leaf[row]) for leaf in leaves) for row in range(len(samples))]
        return Bundle(structure, items, self.label)

    def _column(self, name: str, samples: list[dict[str, Any]]) -> list[Any]:
        values = [sample[name] for sample in samples]
        kind, spec = self._kinds[name], self._specs[name]
        if kind == "json":
            return self._json(name, samples, spec)
        if kind in ("image", "npy"):
            return [_together(values)]
        column = np.empty(len(values), spec.leaves[0].dtype)
        column[:] = values
        return [column]

    def _json(self, name: str, samples: list[dict[str, Any]], spec: ElementSpec) -> list[Any]:
        values = [sample[name] for sample in samples]
        try:
            return _leaves_of_json(values, spec)
        except (FileError, ValueError, TypeError, OverflowError, RecursionError) as whole:
            for sample, value in zip(samples, values, strict=True):
                try:
                    _leaves_of_json([value], spec)
                except Exception as error:
                    raise FileError(
                        f"{self.label}: the field {name!r} of sample {sample[KEY]!r} is {value!r:.200}, which does not "
                        f"match those of the first samples, {spec.packed}: {error}; {_as_text(name)}"
                    ) from shown_cause(error)
            raise FileError(f"{self.label}: the field {name!r}: {whole}; {_as_text(name)}") from whole


def _together(arrays: list[np.ndarray[Any, Any]]) -> Any:
    # One array for values of one shape, `Ragged` if only lengths differ, otherwise the values.
    first = arrays[0].shape
    if all(array.shape == first for array in arrays):
        return np.stack(arrays, out=pooled_empty((len(arrays), *first), arrays[0].dtype))
    if first and all(array.shape[1:] == first[1:] for array in arrays):
        return Ragged.of(arrays)
    return arrays


def _unreadable(label: str, key: str, member: str | None, begin: int, error: Exception) -> FileError:
    kind = DamagedFileError if proves_damage(error) else FileError
    return kind(
        f"{label}: sample {key!r}: the member {member!r} at byte {begin} cannot be decoded: "
        f"{type(error).__name__}: {error}"
    )


def _as_bytes(name: str) -> str:
    return f"get bytes with decode={{{name!r}: 'raw'}}, or leave the field out with columns=[...]"


def _as_text(name: str) -> str:
    return f"get text with decode={{{name!r}: 'text'}}, or leave the field out with columns=[...]"


def _encoded(decoding: Decoding, name: str, value: Any, number: int) -> bytes:
    try:
        return decoding.encode(name, value)
    except (ValueError, TypeError, OSError, OverflowError) as error:
        raise ArgumentError(f"row {number}: the field {name!r} cannot be written: {error}") from shown_cause(error)


def _key_of(number: int, members: Mapping[str, bytes]) -> str:
    # Other files have rows with the same numbers, so add a digest to the key.
    digest = hashlib.blake2b(digest_size=6)
    for name, content in members.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return f"{number:06d}-{digest.hexdigest()}"


# --- JSON, as Arrow's types ---


def _spec_of_json(values: Sequence[Any], where: str, name: str) -> ElementSpec:
    try:
        return spec_of(arrow_of(values), Place(where))
    except (FileError, ValueError) as error:
        reason = str(error).removeprefix(f"{where} ")
        raise FileError(f"{where} cannot be converted to arrays: {reason}; {_as_text(name)}") from shown_cause(error)


def _leaves_of_json(values: Sequence[Any], spec: ElementSpec) -> list[Any]:
    for value in values:
        _refuse_others(value, spec.packed, len(getattr(spec.packed, "shape", ())), "it")
    return leaves_of(pa.array(values, _arrow_of(spec.packed)), Place("it"))


def _refuse_others(value: Any, packed: Any, rank: int, name: str) -> None:
    # Refuse values that Arrow would silently round or leave out.
    if isinstance(packed, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r:.60}, but an object is expected")
        for key in packed:
            if key not in value:
                raise ValueError(f"{name} lacks {key!r}")
        for key, item in value.items():
            if key not in packed:
                raise ValueError(f"{name} has {key!r} besides {sorted(packed)}")
            _refuse_others(item, packed[key], len(getattr(packed[key], "shape", ())), repr(key))
    elif rank:
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r:.60}, but a list is expected")
        for item in value:
            _refuse_others(item, packed, rank - 1, f"a value in {name}")
    elif not _FITS[packed.dtype.kind](value):
        raise ValueError(f"{name} is {value!r:.60}, but {packed.dtype} is expected")


# Kind of a dtype -> whether it can hold a JSON value.
_FITS: Final[dict[str, Callable[[Any], bool]]] = {
    "b": lambda value: isinstance(value, bool),
    "i": lambda value: isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63,
    "u": lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64,
    "f": lambda value: value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)),
    "T": lambda value: isinstance(value, str),
}


def _arrow_of(packed: Any) -> Any:
    # The Arrow type of a spec.
    if isinstance(packed, dict):
        return pa.struct([pa.field(name, _arrow_of(item)) for name, item in packed.items()])
    kind = pa.string() if packed.dtype == TEXT else pa.from_numpy_dtype(packed.dtype)
    for _ in packed.shape:
        kind = pa.list_(kind)
    return kind
