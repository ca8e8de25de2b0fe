"""Connections to databases: URLs and their secrets, engines, and connections that are closed after use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from dask.base import normalize_token

from daskdist.config import setting
from daskdist.errors import ArgumentError, DamagedFileError, DaskdistError, FileError, MissingPackageError
from daskdist.storage.failures import failures
from daskdist.storage.filesystem import is_remote, local
from daskdist.storage.libraries import LazyModule

sa: Final = LazyModule("sqlalchemy", "databases are read by SQLAlchemy: pip install 'daskdist[sql]' ({})")
# Parts of the names of secret options.
_SECRET: Final = ("pass", "pwd", "secret", "token", "cred", "odbc_connect", "private")
# SQLite's names of errors for a file whose content is not that of a database.
_DAMAGED: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
# Driver -> its option for the connection timeout in seconds.
_TIMEOUTS: Final = {
    "mariadbconnector": "connect_timeout",
    "mysqldb": "connect_timeout",
    "psycopg": "connect_timeout",
    "psycopg2": "connect_timeout",
    "pymysql": "connect_timeout",
}
# Detects servers that disappeared without closing the connection.
_ALIVE: Final = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


@dataclass(frozen=True, repr=False)
class Login:
    """The credentials and options of a database that is not an SQLite file. Secrets are pickled but never shown.

    Parameters
    ----------
    url
        The SQLAlchemy URL.
    options
        Arguments of ``sqlalchemy.create_engine``, by name.
    """

    url: str | None = None
    options: Mapping[str, Any] | None = None

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        url = _url(self.url or "")
        query = {name: "***" if _is_secret(name) else value for name, value in url.query.items()}
        text: str = url.set(query=query).render_as_string(hide_password=True)
        return text.replace("%2A%2A%2A", "***")

    def without_secrets(self, text: str) -> str:
        """Return a driver's message with secrets removed."""
        for secret in _secrets(self.options or {}):
            text = text.replace(secret, "***")
        if self.url is not None:
            url = _url(self.url)
            for secret in (str(url.password or ""), *_secrets(url.query)):
                # Very short secrets would match parts of other words.
                text = text.replace(secret, "***") if len(secret) > 3 else text
        return text

    def __repr__(self) -> str:
        url = "" if self.url is None else self.shown
        return f"Login({url}{', options: ' + ', '.join(self.options) if self.options else ''})"

    def __hash__(self) -> int:
        return hash((self.url, tuple(sorted(self.options or ()))))

    def __dask_tokenize__(self) -> Any:
        return ("Login", None if self.url is None else self.shown, normalize_token(_blanked(self.options)))


@contextmanager
def connected(login: Login, path: str, label: str) -> Iterator[Any]:
    """Open an SQLAlchemy connection in a context; nothing is ever committed.

    Raises
    ------
    FileError
        The database cannot be reached, or an operation on the connection fails.
    """
    engine = _engine_at(login, path)
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("PRAGMA query_only = ON")
            yield connection
    except DaskdistError:
        raise
    # The driver's error may contain the password, so it is not chained as the cause.
    except Exception as error:
        cause = getattr(error, "orig", None) or error
        message = login.without_secrets(" ".join(str(cause).split())) or type(cause).__name__
        kind = DamagedFileError if getattr(cause, "sqlite_errorname", "") in _DAMAGED else FileError
        raise kind(f"{label}: cannot be read: {message}") from None


def _engine_at(login: Login, path: str) -> Any:
    if login.url is not None:
        url = _url(login.url)
        if url.get_backend_name() == "sqlite" and not str(url.database).startswith("file:"):
            _check_file(str(url.database))
        return _engine(login, url)
    if is_remote(path):
        raise FileError(f"{path}: SQLite can only read local files; copy it to a local disk first")
    _check_file(path)
    # Do not create a missing database, but allow SQLite to write back a pending log.
    database = Path(local(path)).as_uri().replace("file://", "file:", 1)
    url = sa.engine.URL.create("sqlite", database=database, query={"mode": "rw", "uri": "true"})
    return _engine(login, url)


def path_of(connection: Any, options: Mapping[str, Any] | None = None) -> tuple[str, Login]:
    """Return the path that stands for a database, and its login.

    Parameters
    ----------
    connection
        An SQLAlchemy URL, or the path of an SQLite file.
    options
        Further arguments of ``sqlalchemy.create_engine``.

    Raises
    ------
    ArgumentError
        The connection is neither.
    """
    if not isinstance(connection, (str, os.PathLike)):
        raise ArgumentError(
            f"read_sql: connection is of type {type(connection).__name__}, which cannot be sent to workers; give the "
            "URL as text, such as engine.url.render_as_string(hide_password=False)"
        )
    connection = os.fspath(connection)
    url = _url(connection) if is_remote(connection) else sa.engine.URL.create("sqlite", database=local(connection))
    if url.get_backend_name() == "sqlite" and not str(url.database).startswith("file:"):
        if url.database in (None, "", ":memory:") or connection in ("", ":memory:"):
            raise ArgumentError(
                "read_sql: an SQLite database in memory is visible only to its connection; write it to a file"
            )
        url = url.set(database=local(str(url.database)))
        if not url.query and not options and url.get_driver_name() == "pysqlite":
            return str(url.database), Login()
    login = Login(url.render_as_string(hide_password=False), options)
    return login.shown, login


@lru_cache(maxsize=16)
def _engine(login: Login, url: Any) -> Any:
    # Each read opens a connection: none is pooled, so none is left open or shared by threads.
    options = dict(login.options or {})
    name = url.drivername.partition("+")[0]
    try:
        dialect = url.get_dialect()
        arguments = dict(options.pop("connect_args", {}))
        if dialect.driver in _TIMEOUTS and "connect_timeout" not in url.query:
            arguments.setdefault(_TIMEOUTS[dialect.driver], int(setting("timeouts.connect")))
        if dialect.driver in ("psycopg", "psycopg2"):
            arguments = {**_ALIVE, **arguments}
        engine = sa.create_engine(url, **{"poolclass": sa.pool.NullPool, **options, "connect_args": arguments})
    except sa.exc.NoSuchModuleError:
        raise ArgumentError(f"read_sql: SQLAlchemy knows no database {name!r}; see its list of dialects") from None
    except ImportError as error:
        raise MissingPackageError(
            f"read_sql: the driver of {url.drivername!r} is not installed: {error.name}"
        ) from None
    except (TypeError, ValueError, sa.exc.ArgumentError) as error:
        raise ArgumentError(f"read_sql: engine_options: {login.without_secrets(str(error))}") from None
    if engine.dialect.is_async:
        raise ArgumentError(f"read_sql: {url.drivername!r} is an asynchronous driver; use one that is not")
    return engine


def _url(url: str) -> Any:
    try:
        return sa.engine.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        # The text is not shown: there may be a password in it.
        raise ArgumentError(
            "read_sql: connection is no SQLAlchemy URL; write it as 'postgresql+psycopg://user:password@host/database'"
            " or 'sqlite:///path', with characters such as @ in a password quoted by urllib.parse.quote"
        ) from None


def _check_file(path: str) -> None:
    with failures(path, "cannot be looked up"):
        num_bytes = os.stat(path).st_size
    if not num_bytes:
        raise DamagedFileError(f"{path}: has 0 bytes, and so no tables")


def _is_secret(name: str) -> bool:
    return any(part in name.lower() for part in _SECRET)


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif _is_secret(name) and isinstance(value, str) and value:
            yield value


def _blanked(options: Any) -> Any:
    if not isinstance(options, Mapping):
        return options
    return {name: "***" if _is_secret(name) else _blanked(value) for name, value in options.items()}
