"""Secrets in URLs: hidden where a URL is shown, and left out where it identifies a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

# The start of a URL, and the quote before it if it is quoted.
_START: Final = re.compile(r"(['\"]?)(?<![\w+.-])(?=[A-Za-z][\w+.-]*://)")
_URL: Final = re.compile(r"([A-Za-z][\w+.-]*)://([^/?#]*)([^?#]*)(.*)", re.DOTALL)
# The separator of chained URLs, as in zip://a.csv::https://host/b.zip
_CHAIN: Final = re.compile(r"(?<=::)(?=[A-Za-z][\w+.-]*(?:::|://))")
# What may follow a URL that is not quoted: the number of a line, and punctuation.
_AFTER: Final = re.compile(r"(?::\d+)?[:,;.)\]}'\"`]*$")
# A name and value in a query or fragment. Paths with / are no names: ? may also be a wildcard.
_PAIR: Final = re.compile(r"([?#&;][^/?#&;=]+=)([^&;]+)")
_HTTP: Final = ("http", "https")
# Protocols whose paths may have any character.
_LOCAL: Final = ("file", "local")
# Protocols with a container or repository before @.
_WITHOUT_USERS: Final = frozenset({"abfs", "abfss", "adl", "az", "gist", "git", "github", "wasb", "wasbs"})
# Names in queries, in lower case and without - and _, whose values differ between signed URLs of one file.
_SIGNATURES: Final = re.compile(
    "access(key|keyid|token)|apikey|auth(orization|token)|(aws|oss)accesskeyid|googleaccessid|passwd|password|pwd|"
    "sastoken|secret|secretkey|securitytoken|sig|signature|token|"
    "x(amz|goog|oss)(algorithm|credential|date|expires|securitytoken|signature|signatureversion|signedheaders)"
)
# Names that belong to a signature if there is one: of Azure, and of others.
_BESIDE: Final = {
    "sig": re.compile("s[eiprsvtr]|srt|spr|sip|sdd|ske|sk[stv]|skoid|sktid|saoid|scid"),
    "signature": re.compile("expires|expiry|hashalgorithm|keypairid|policy"),
}


def without_secrets(text: str) -> str:
    """Return a text with the users, passwords and values of queries in its URLs replaced.

    >>> print(without_secrets("no file at ftp://me:secret@host/x, nor at 'https://host/x?sig=secret&se=9'"))
    no file at ftp://***@host/x, nor at 'https://host/x?sig=***&se=***'
    """
    if "://" not in text:
        return text
    shown, end = [], 0
    while start := _START.search(text, end):
        begin = start.end()
        shown.append(text[end:begin])
        end = _end_of_url(text, begin, start[1])
        shown.append(_changed(text[begin:end], _hidden))
    return "".join(shown) + text[end:]


def shown_cause(error: BaseException) -> BaseException | None:
    """Return an error as the cause of another one; None if its text, or that of its causes, has secrets of URLs."""
    cause: BaseException | None = error
    while cause is not None:
        text = f"{cause} {cause!r}"
        if without_secrets(text) != text:
            return None
        cause = cause.__cause__ or cause.__context__
    return error


def without_signatures(value: Any) -> Any:
    """Return nested lists and tuples with each URL replaced by what all URLs of its file have in common.

    That leaves out passwords, tokens and signatures, but not other parts, which may distinguish files.

    >>> without_signatures(["https://token@host/x?id=7&sig=secret&se=9"])
    ['https://host/x?id=7']
    """
    if isinstance(value, str):
        return _changed(value, _unsigned) if "://" in value else value
    if type(value) in (list, tuple):
        return type(value)(map(without_signatures, value))
    return value


class _Parts(NamedTuple):
    scheme: str
    # The text before @; None without one.
    user: str | None
    # The host and the path.
    place: str
    # The query and the fragment, with their separators.
    query: str


def _changed(url: str, change: Callable[[_Parts], str]) -> str:
    links = ((link, _URL.fullmatch(link)) for link in _CHAIN.split(url))
    return "".join(link if match is None else change(_parts(*match.groups())) for link, match in links)


def _parts(scheme: str, host: str, path: str, query: str) -> _Parts:
    port = host.rpartition(":")[2] if ":" in host and not host.startswith("arn:") else ""
    if "@" not in host and port and not port.isdigit() and not port.endswith("]"):
        # This may be the first part of a password, with characters that should have been quoted.
        user, at, rest = (host + path + query).rpartition("@")
        if at:
            match = _URL.fullmatch(f"{scheme}://{rest}")
            return _Parts(scheme, user, match[2] + match[3], match[4]) if match else _Parts(scheme, user, rest, "")
    user, at, host = host.rpartition("@")
    return _Parts(scheme, user if at else None, host + path, query)


def _hidden(url: _Parts) -> str:
    if url.scheme in _LOCAL:
        return _joined(url.scheme, url.user, url.place, url.query)
    user = url.user if url.user is None or url.scheme in _WITHOUT_USERS else "***"
    query = _PAIR.sub(r"\1***", url.query)
    if url.scheme in _HTTP and len(url.query) > 1 and "=" not in url.query:
        query = f"{url.query[0]}***"
    return _joined(url.scheme, user, url.place, query)


def _unsigned(url: _Parts) -> str:
    # A user without a password is a token on HTTP servers, and has a directory of its own on others.
    user = url.user
    if user is not None and url.scheme not in (*_WITHOUT_USERS, *_LOCAL):
        name, colon, password = user.partition(":")
        user = name if password or not (colon or url.scheme in _HTTP) else None
    query = url.query
    if url.scheme in _HTTP and query:
        pairs = {pair: _plain(pair.partition("=")[0]) for pair in re.split("[&;]", query[1:])}
        left_out = [_SIGNATURES, *(beside for name, beside in _BESIDE.items() if name in pairs.values())]
        kept = [pair for pair, name in pairs.items() if not any(names.fullmatch(name) for names in left_out)]
        query = query if len(kept) == len(pairs) else "&".join(kept) and query[0] + "&".join(kept)
    return _joined(url.scheme, user, url.place, query)


def _joined(scheme: str, user: str | None, place: str, query: str) -> str:
    return f"{scheme}://{'' if user is None else f'{user}@'}{place}{query}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _end_of_url(text: str, begin: int, quote: str) -> int:
    closing = re.compile(rf"(?<!\\){quote}").search(text, begin) if quote else None
    if closing is not None:
        return closing.start()
    space = re.compile(r"[\s<>]").search(text, begin)
    end = space.start() if space else len(text)
    after = _AFTER.search(text[begin:end])
    return begin + after.start() if after else end
