"""Compression of elements that are sent to another host."""

from __future__ import annotations

from typing import Final

from distributed.comm import Comm
from distributed.protocol.compression import compressions

from daskdist.errors import MissingPackageError

# The fastest first.
_PREFERRED: Final = ("lz4", "zstd", "snappy")
_PACKAGES: Final = {"lz4": "lz4", "zstd": "zstandard", "snappy": "python-snappy"}


def readable(request: str | None, comm: Comm) -> tuple[str, ...]:
    """Return the compressions that a consumer accepts, the preferred one first; empty for no compression.

    Parameters
    ----------
    request
        ``"AUTO"`` for the fastest one that both sides have, between hosts only; the name of a compression; or None.
    comm
        The consumer's connection to the worker.

    Raises
    ------
    MissingPackageError
        The requested compression is not installed.
    """
    if request is None:
        return ()
    if request == "AUTO":
        return () if comm.same_host else tuple(name for name in _PREFERRED if name in compressions)
    name = request.lower()
    if name not in compressions:
        raise MissingPackageError(
            f"compression is {request!r}, which needs a package that is missing here: pip install {_PACKAGES[name]}"
        )
    return (name,)


def compress(comm: Comm, names: tuple[str, ...]) -> None:
    """Compress large messages of a connection with the first of the given compressions that is installed here."""
    comm.handshake_options["compression"] = next((name for name in names if name in compressions), None)
