"""Files on any file system of fsspec: paths and globs resolved to lists of files, and files opened."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from os.path import basename, dirname
from pathlib import Path
from typing import IO, Any, Final

from daskdist.cached_property import cached_property
from daskdist.errors import ArgumentError, FileError
from daskdist.storage.failures import failures, reading
from daskdist.storage.hidden_files import is_hidden, is_hidden_below, is_hidden_from
from daskdist.storage.http_files import HttpFiles, is_http, num_bytes, without_query
from daskdist.storage.libraries import fsspec
from daskdist.storage.listing import files_below, matches, with_suffix, without_directories
from daskdist.storage.retries import fetched, refusal, retried
from daskdist.storage.write_manifest import PATTERN, WriteManifest, is_manifest_name

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
StorageOptions = Mapping[str, Any] | None


@dataclass(frozen=True, repr=False)
class Storage:
    """File systems, and the options to access them.

    Parameters
    ----------
    options
        Arguments of fsspec's file system by name: credentials, an endpoint, ``anon``. They are pickled with the
        pipeline, and never shown.
    """

    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.options is not None and not isinstance(self.options, Mapping):
            raise ArgumentError(f"storage_options is {type(self.options).__name__}; give a dict by name")

    def __repr__(self) -> str:
        return f"Storage(options for {', '.join(self.options)})" if self.options else "Storage()"

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.options or ())))

    def __getstate__(self) -> dict[str, Any]:
        # Another process looks files up by itself.
        return {"options": self.options}

    @cached_property
    def _http(self) -> HttpFiles:
        return HttpFiles()

    def expand(self, paths: Paths, suffixes: Sequence[str]) -> tuple[str, ...]:
        """Return the files that paths, globs and directories name, in that order; those of one pattern are sorted.

        Parameters
        ----------
        paths
            Local paths or fsspec URLs, each a file, a glob or a directory.
        suffixes
            Files in a directory are taken if their names end in any of these, in upper or lower case.

        Raises
        ------
        FileError
            A path or pattern names no file, or a directory whose write is unfinished or whose files were changed after
            they were written.

        Notes
        -----
        Names that begin with ``_`` or ``.`` and the contents of such directories are skipped, in directories and by the
        wildcards of globs, unless a path or a glob spells them out. Links to directories are followed, except to a
        directory that the link is in. Other files of a directory are logged, and directories that a glob matches.
        """
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        if not isinstance(paths, Sequence):
            raise ArgumentError(f"expected a path, a glob, or a list of them, got {type(paths).__name__}")
        if not paths:
            raise FileError("the list of files is empty; give a path, a glob, or a list of them")
        for path in paths:
            if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                raise ArgumentError(f"the list of files has {path!r:.80}; give paths and globs")
        ends = tuple(map(str.lower, suffixes))
        return tuple(file for path in paths for file in self._expand_one(os.fspath(path), ends))

    def _expand_one(self, path: str, suffixes: tuple[str, ...]) -> list[str]:
        try:
            files = self._finished(self._listed(path, suffixes), path, suffixes)
        except _ChangedError:
            # List again: the listing may be older than the end of a write.
            if is_remote(path):
                self.located(path)[0].invalidate_cache()
            files = self._finished(self._listed(path, suffixes), path, suffixes)
        if files:
            return files
        if not is_remote(path) and os.path.isdir(local(path)):
            plain = [end for end in suffixes if not any(end.startswith(f"{other}.") for other in suffixes)]
            ends = " or ".join(map(repr, plain)) + (", also compressed" if len(plain) < len(suffixes) else "")
            raise FileError(
                f"no file matches: the directory {path!r} has none whose name ends in {ends}; names that begin with "
                "'_' or '.', and the contents of such directories, are skipped"
            )
        kind = "no file matches" if has_wildcards(path) else "no such file:"
        where = "" if is_remote(path) else f" (looked in {Path(local(path)).parent})"
        raise FileError(f"{kind} {path!r}{where}")

    def _listed(self, path: str, suffixes: tuple[str, ...]) -> Listing:
        return self._listed_remote(path, suffixes) if is_remote(path) else _listed_local(path, suffixes)

    def _listed_remote(self, path: str, suffixes: tuple[str, ...]) -> Listing:
        fs, inner = self.located(path)
        chained = path.removeprefix(first_link(path))
        manifests: list[str] = []
        with failures(repr(path), "cannot be looked up", (OSError, ValueError)):
            try:
                kind = self._kind(fs, inner, suffixes)
                is_glob = kind is None and has_wildcards(inner)
                if kind == "directory":
                    root = str(fs._strip_protocol(inner))
                    names = [name for name in retried(fs.find, inner) if not is_hidden_below(dirname(name), root)]
                    manifests = [name for name in names if is_manifest_name(basename(name))]
                    # Object stores may have empty objects that stand for folders.
                    folders = set(map(dirname, names))
                    names = [name for name in names if name not in folders and not name.endswith("/")]
                    names = with_suffix([name for name in names if not is_hidden(basename(name))], suffixes, path)
                elif is_glob:
                    names = without_directories(self._matches(fs, inner), partial(retried, fs.isdir), path)
                    manifests = self._matches(fs, _manifests_beside(inner))
                else:
                    names = [] if kind is None else [inner]
            except FileNotFoundError as error:
                if refusal(error) is not error:
                    raise
                return Listing([], [])

        def urls(inner_paths: Sequence[str]) -> list[str]:
            return sorted(fs.unstrip_protocol(name) + chained for name in inner_paths)

        return Listing(urls(names), urls(manifests), is_glob)

    def is_file(self, path: str) -> bool:
        """Return whether a path or URL is that of a file, and not of a directory."""
        if not is_remote(path):
            return os.path.isfile(local(path))
        with failures(repr(path), "cannot be looked up", (OSError, ValueError)):
            return self._kind(*self.located(path), ()) == "file"

    def _kind(self, fs: Any, inner: str, suffixes: tuple[str, ...]) -> str | None:
        # Return what a name stands for itself, "file" or "directory"; None if there is no such name.
        if is_http(inner) and "*" in without_query(inner):
            # Some servers answer with a page to any name.
            return None
        try:
            info = self._http.info(fs, inner) if is_http(inner) else retried(fs.info, inner)
        except FileNotFoundError as error:
            if refusal(error) is not error:
                raise
            # A folder of an object store, or of an archive, may have no entry itself.
            return "directory" if not is_http(inner) and retried(fs.isdir, inner) else None
        if not is_http(inner):
            return str(info["type"])
        # Only pages list directories, and asking whether one does downloads it.
        is_page = info.get("mimetype") in ("text/html", None) and "?" not in inner
        has_suffix = without_query(inner).lower().endswith(tuple(filter(None, suffixes)))
        return "directory" if is_page and not has_suffix and retried(fs.isdir, inner) else "file"

    def _matches(self, fs: Any, pattern: str) -> list[str]:
        stripped = str(fs._strip_protocol(pattern))
        return [name for name in retried(fs.glob, pattern) if not is_hidden_from(name, stripped)]

    def _finished(self, listing: Listing, pattern: str, suffixes: tuple[str, ...]) -> list[str]:
        # Apply the manifests: leave out the files they ignore, and require those they list.
        ignored, listed = set(), dict[str, int]()

        def is_wanted(name: str) -> bool:
            if not listing.is_glob:
                return name.lower().endswith(suffixes)
            last = first_link(pattern).rpartition("/")[2]
            return "**" in last or fnmatch(name, last)

        for path in listing.manifests:
            manifest = WriteManifest.from_bytes(self.read(path), path)
            inner = first_link(path)
            chained = path.removeprefix(inner)
            directory = inner.rpartition("/")[0]
            if manifest.is_unfinished and any(map(is_wanted, manifest.ignored)):
                raise FileError(
                    f"{directory}: the write to this directory has not finished: "
                    f"{os.path.basename(inner)} lists no complete file; write it again"
                )
            ignored |= {f"{directory}/{name}{chained}" for name in manifest.ignored}
            listed |= {f"{directory}/{name}{chained}": size for name, size in manifest.files.items() if is_wanted(name)}
        names = set(listing.files)
        for (path, size), actual_size in zip(listed.items(), self.sizes(list(listed)) if listed else (), strict=True):
            if path not in names or actual_size != size:
                raise _ChangedError(
                    f"{path}: {f'has {actual_size} bytes' if path in names else 'missing'}, but the manifest of the "
                    f"write lists it with {size} bytes; restore it, or, if it was changed on purpose, delete "
                    f"{PATTERN} beside it to read the directory as it is"
                )
        return [name for name in listing.files if name not in ignored]

    def located(self, path: str) -> tuple[Any, str]:
        """Return the file system of a path, and the path within it.

        Raises
        ------
        FileError
            The file system is unknown, or its library is not installed.
        """
        try:
            if "::" in path and first_link(path) == path:
                # The name itself has these characters, which would begin another link of a chain.
                protocol = path.partition("://")[0] if is_remote(path) else "file"
                fs = fsspec.filesystem(protocol, **(self.options or {}))
                return fs, str(fs._strip_protocol(path))
            fs, inner = fsspec.core.url_to_fs(path, **(self.options or {}))
        # The file systems of archives also raise errors of their libraries.
        except Exception as error:
            raise FileError(f"{path!r} cannot be opened: {error}") from None
        return fs, inner

    @contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file for reading.

        Raises
        ------
        FileError
            The file is missing, or access is denied.
        """
        with reading(path):
            if is_remote(path):
                fs, inner = self.located(path)
                with self._http.open(fs, inner) if is_http(path) else opened_remote(fs, inner) as file:
                    yield file
            else:
                with open(path, "rb") as file:
                    yield file

    def version(self, path: str, *, is_current: bool = False) -> Version:
        """Look up a file without reading it.

        Parameters
        ----------
        path
            Its path or URL.
        is_current
            Whether a file of an HTTP server is looked up again, if it was before.

        Raises
        ------
        FileError
            The file is missing, or access is denied.
        """
        if not is_remote(path):
            # There may be very many files: the context manager is entered only after a failure.
            try:
                known = os.stat(path)
            except OSError:
                with failures(path, "cannot be looked up"):
                    raise
            return Version(path, known.st_size, str(known.st_mtime_ns))
        with failures(path, "cannot be looked up"):
            fs, inner = self.located(path)
            if is_http(path):
                info = self._http.info(fs, inner, is_current=is_current)
                return Version(path, num_bytes(fs, inner, info), _tag(info))
            info = retried(fs.info, inner)
            # File systems differ in the name of the tag, and not all know the size without reading the file.
            tag = _tag(info)
            if info.get("size") is None:
                with opened_remote(fs, inner) as file:
                    return Version(path, file.seek(0, os.SEEK_END), tag)
            return Version(path, int(info["size"]), tag)

    def check_unchanged(self, version: Version, label: str) -> None:
        """Check that a file is as it was listed; ``label`` is its name in messages.

        Raises
        ------
        FileError
            It was changed, is missing, or access is denied.
        """
        if self.version(version.path, is_current=True) != version:
            raise FileError(f"{label}: the file was changed since it was listed; create the dataset again")

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """Return the bytes of each file; 0 for a missing one, which raises when it is read.

        Notes
        -----
        Remote files in one directory are looked up with one listing.
        """
        sizes = [0] * len(paths)
        for number, path in enumerate(paths):
            if not is_remote(path):
                with suppress(OSError):
                    sizes[number] = os.stat(path.removeprefix("file://")).st_size
        for number, entry in self._remote_entries(paths, is_current=False):
            size = entry.get("size")
            sizes[number] = self._size(paths[number]) if size is None else size
        return sizes

    def states(self, paths: Sequence[str]) -> list[Any]:
        """Return for each file a value that changes with its content; for a directory, the values of its files.

        For a local file these are its size and the times of the last change of its content and of its metadata; for a
        remote one its size and the tag or time that its file system has for it. None if the lookup fails.
        """
        states: list[Any] = [None if is_remote(path) else _local_state(path) for path in paths]
        alone = []
        for number, entry in self._remote_entries(paths, is_current=True):
            if _tag(entry):
                states[number] = entry.get("size"), _tag(entry)
            else:
                alone.append(number)
        if alone:
            with ThreadPoolExecutor(min(len(alone), _LOOKED_UP_AT_ONCE)) as pool:
                looked_up = pool.map(self._remote_state, [paths[number] for number in alone])
                for number, state in zip(alone, looked_up, strict=True):
                    states[number] = state
        return states

    def _remote_entries(self, paths: Sequence[str], *, is_current: bool) -> Iterator[tuple[int, Mapping[str, Any]]]:
        # Yield the number of each remote file and its entry in its directory, which is listed if several files are in
        # it; an empty entry if it is unknown.
        folders: dict[str, list[int]] = {}
        for number, path in enumerate(paths):
            if is_remote(path):
                folders.setdefault(path.rpartition("/")[0], []).append(number)
        for numbers in folders.values():
            listed = self._listed_beside(paths[numbers[0]], is_current=is_current) if len(numbers) > 1 else {}
            for number in numbers:
                yield number, listed.get(paths[number].rpartition("/")[2], {})

    def _listed_beside(self, path: str, *, is_current: bool) -> dict[str, Any]:
        # Return the entries of a directory by name; none if the file system cannot list them.
        if "::" in path or is_http(path):
            return {}
        try:
            fs, inner = self.located(path)
            folder = inner.rpartition("/")[0]
            if is_current:
                fs.invalidate_cache(folder)
            entries = retried(fs.ls, folder, detail=True)
            return {entry["name"].rpartition("/")[2]: entry for entry in entries}
        except Exception:
            # The error is reported when a file is read.
            return {}

    def _remote_state(self, path: str) -> Any:
        try:
            fs, inner = self.located(path)
            info = retried(fs.info, inner)
        except Exception:
            # The error is reported when the file is read.
            return None
        return info.get("size"), _tag(info)

    def _size(self, path: str) -> int:
        try:
            return self.version(path).num_bytes
        except FileError:
            return 0

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read the bytes of a file from ``start`` to ``stop``, fewer if it ends before."""
        if not start and stop is None and not is_remote(path):
            # There may be very many small files: the context managers are entered only after a failure.
            try:
                with open(path, "rb", buffering=0) as whole:
                    return whole.read()
            except OSError:
                with reading(path):
                    raise
        with self.open(path) as file:
            file.seek(start)
            return file.read() if stop is None else file.read(max(0, stop - start))


@dataclass(frozen=True, slots=True)
class Version:
    """The state of a file when it was listed.

    Parameters
    ----------
    path
        Its path or URL.
    num_bytes
        Its size.
    tag
        A value that changes with its content, such as a time or an ETag; empty if the file system has none.
    """

    path: str
    num_bytes: int
    tag: str


# The number of remote files to look up at the same time.
_LOOKED_UP_AT_ONCE: Final = 16
# The names that file systems use for a tag or time of a file's content, the most reliable first.
_TAGS: Final = (
    "ETag",
    "etag",
    "version_id",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "Content-MD5",
    "created",
)


def _tag(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _TAGS if info.get(key) is not None), "")


def _local_state(path: str) -> Any:
    path = local(path)
    stat = os.stat(path)
    if not os.path.isdir(path):
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    states = []
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            place = os.path.join(folder, name)
            stat = os.lstat(place)
            states.append((os.path.relpath(place, path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return states


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a path, glob or directory names, sorted."""

    files: list[str]
    manifests: list[str]
    is_glob: bool = False


class _ChangedError(FileError):
    # A file that differs from its manifest.
    pass


def _listed_local(path: str, suffixes: tuple[str, ...]) -> Listing:
    path = local(path)
    if os.path.isfile(path):
        return Listing([path], [])
    if not os.path.isdir(path):
        if not glob.has_magic(path):
            return Listing([], [])
        files = without_directories(matches(path), os.path.isdir, path)
        return Listing(files, matches(_manifests_beside(path)), is_glob=True)
    below = list(files_below(path))
    files = [name for name in below if not is_hidden(basename(name))]
    manifests = [name for name in below if is_manifest_name(basename(name))]
    return Listing(sorted(with_suffix(files, suffixes, path)), sorted(manifests))


def _manifests_beside(pattern: str) -> str:
    # Return the glob of the manifests in the directories of a glob.
    last = pattern.rpartition("/")[2]
    head = pattern.removesuffix(last)
    return f"{head}**/{PATTERN}" if "**" in last else f"{head}{PATTERN}"


def local(path: str) -> str:
    """Return a local path as an absolute one: a worker's working directory differs from the program's."""
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def has_wildcards(path: str) -> bool:
    """Return whether a path is a glob. In a URL of an HTTP server, ? is no wildcard but begins the query."""
    return glob.has_magic(without_query(first_link(path)))


# The protocols of file systems that are in no other one, so that "::" is a part of their names.
_OUTERMOST: Final = frozenset(
    {"abfs", "abfss", "adl", "az", "gcs", "gs", "hdfs", "http", "https", "memory", "oss", "s3", "s3a", "webhdfs"}
)


def first_link(path: str) -> str:
    """Return the first part of a chain of URLs, such as ``zip://*.csv`` of ``zip://*.csv::archive.zip``."""
    protocol, separator, _ = path.partition("://")
    return path if not separator or protocol in _OUTERMOST else path.partition("::")[0]


def opened_remote(fs: Any, inner: str) -> Any:
    """Open a remote file whose requests are made again if they are refused for a moment."""
    file = fetched(fs.open, inner, "rb")
    cache: Any = getattr(file, "cache", None)
    if getattr(cache, "fetcher", None) is not None:
        cache.fetcher = partial(fetched, cache.fetcher)
    return file


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of something other than the local file system."""
    return "://" in path and not path.startswith("file://")
