"""Compression of elements on their way to another host."""

from __future__ import annotations

from typing import Final

from distributed.comm import Comm
from distributed.protocol.compression import compressions

from daskdist.errors import ArgumentError

# The quickest first.
_PREFERRED: Final = ("lz4", "zstd", "snappy")
_PACKAGES: Final = {"lz4": "lz4", "zstd": "zstandard", "snappy": "python-snappy"}


def readable(request: str | None, comm: Comm) -> tuple[str, ...]:
    """Return the ways in which a consumer takes elements compressed, the preferred first; none if they are not to be.

    Parameters
    ----------
    request
        ``"AUTO"``: to another host, in the quickest of those that both have; a name; or None.
    comm
        Its connection to the worker.

    Raises
    ------
    ArgumentError
        What is asked for by its name is not installed.
    """
    if request is None:
        return ()
    if request == "AUTO":
        return () if comm.same_host else tuple(name for name in _PREFERRED if name in compressions)
    name = request.lower()
    if name not in compressions:
        raise ArgumentError(
            f"compression is {request!r}, for which a package is missing here: pip install {_PACKAGES[name]}"
        )
    return (name,)


def compress(comm: Comm, names: tuple[str, ...]) -> None:
    """Let a comm compress large messages, by the first of the given methods that is installed here."""
    comm.handshake_options["compression"] = next((name for name in names if name in compressions), None)
