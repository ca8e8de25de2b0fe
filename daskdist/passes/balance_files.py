"""Distribution of files to workers by size, with large files split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from daskdist.core.file_backed_source import FileBackedSource, FileShare
from daskdist.sharding.balance import Numbers, excess, largest_first

# The most a worker has is this at most, as a multiple of the mean, unless what cannot be cut is larger: a unit of a
# tenth of the mean or less is never given to one that has more than the mean.
_ENOUGH: Final = 1.1


@dataclass(frozen=True)
class Shares:
    """The files that each worker reads of each source.

    Parameters
    ----------
    by_source
        The share of each worker, by the id of a source.
    excess
        The bytes of the largest share as a multiple of the mean.
    """

    by_source: dict[int, list[FileBackedSource]]
    excess: float


@dataclass
class _Units:
    # The units to distribute: a file of each source in a group, or a split of it if `part` is not -1.
    group: Numbers
    file: Numbers
    part: Numbers
    sizes: Numbers


def share_files(groups: Sequence[Sequence[FileBackedSource]], num_workers: int, *, by_split: bool) -> Shares:
    """Distribute the files of all sources together, the largest first.

    Parameters
    ----------
    groups
        The sources; those of one group have the same number of files and get corresponding shares.
    num_workers
        The number of workers.
    by_split
        Whether to split files in any case, because there are fewer files than workers.
    """
    groups = _apart(groups)
    units = _files(groups)
    owners = largest_first(units.sizes, num_workers)
    most = excess(units.sizes, owners, num_workers)
    if by_split or most > _ENOUGH:
        cut = _cut(groups, units, (_ENOUGH - 1) * float(units.sizes.sum()) / num_workers, by_split=by_split)
        cut_owners = largest_first(cut.sizes, num_workers)
        cut_most = excess(cut.sizes, cut_owners, num_workers)
        if by_split or cut_most < most:
            units, owners, most = cut, cut_owners, cut_most
    shares: dict[int, list[FileBackedSource]] = {}
    for number, group in enumerate(groups):
        for worker, files in enumerate(_files_of(units, owners, number, num_workers)):
            for source in group:
                shares.setdefault(id(source), []).append(source.share_of_files(worker, num_workers, files))
    return Shares(shares, most)


def _apart(groups: Sequence[Sequence[FileBackedSource]]) -> list[list[FileBackedSource]]:
    # Merge groups that share a source, which may occur in a pipeline more than once.
    apart: list[dict[int, FileBackedSource]] = []
    for group in groups:
        joined = {id(source): source for source in group}
        for other in [tied_sources for tied_sources in apart if tied_sources.keys() & joined.keys()]:
            joined |= other
            apart.remove(other)
        apart.append(joined)
    return [list(tied_sources.values()) for tied_sources in apart]


def _files(groups: Sequence[Sequence[FileBackedSource]]) -> _Units:
    sizes = [np.sum([np.asarray(source.file_bytes(), np.int64) for source in group], axis=0) for group in groups]
    return _Units(
        np.repeat(np.arange(len(groups)), [len(group_sizes) for group_sizes in sizes]),
        np.concatenate([np.arange(len(group_sizes)) for group_sizes in sizes]),
        np.full(sum(map(len, sizes)), -1),
        np.concatenate(sizes),
    )


def _cut(groups: Sequence[Sequence[FileBackedSource]], units: _Units, most_bytes: float, *, by_split: bool) -> _Units:
    # Sources of one group correspond by files; their splits correspond only if `by_split`, which was checked before.
    can_be = np.array([all(source.is_splittable for source in group) for group in groups])
    can_be &= np.array([by_split or len(group) == 1 for group in groups])
    large = np.flatnonzero((units.sizes > most_bytes) & can_be[units.group])
    parts: list[tuple[int, int, int, int]] = []
    is_cut = np.zeros(len(units.sizes), bool)
    for unit in large.tolist():
        group, file = int(units.group[unit]), int(units.file[unit])
        sizes = _part_sizes(groups[group], file, int(units.sizes[unit]))
        if len(sizes) > 1:
            is_cut[unit] = True
            parts += [(group, file, number, size) for number, size in enumerate(sizes)]
    if not parts:
        return units
    added = np.array(parts, np.int64).T
    kept = (units.group[~is_cut], units.file[~is_cut], units.part[~is_cut], units.sizes[~is_cut])
    return _Units(*[np.concatenate([old, new]) for old, new in zip(kept, added, strict=True)])


def _part_sizes(group: Sequence[FileBackedSource], file: int, num_bytes: int) -> list[int]:
    # The sizes of splits are in memory; divide the bytes of the file in proportion.
    sizes = np.sum([[split.num_bytes or 0 for split in source.valid_splits_of_file(file)] for source in group], axis=0)
    if not len(sizes):
        return []
    shares = sizes / sizes.sum() if sizes.sum() else np.full(len(sizes), 1 / len(sizes))
    return [int(share * num_bytes) for share in shares]


def _files_of(units: _Units, owners: Numbers, group: int, num_workers: int) -> Iterator[FileShare]:
    chosen = np.flatnonzero(units.group == group)
    order = chosen[np.lexsort((units.part[chosen], units.file[chosen], owners[chosen]))]
    stops = np.cumsum(np.bincount(owners[chosen], minlength=num_workers))
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        mine = order[start:stop]
        parts: dict[int, list[int]] = {}
        for unit in mine[units.part[mine] >= 0].tolist():
            parts.setdefault(int(units.file[unit]), []).append(int(units.part[unit]))
        files = units.file[mine].tolist()
        yield FileShare(list(dict.fromkeys(files)) if parts else files, parts, bool((units.part >= 0).any()))
