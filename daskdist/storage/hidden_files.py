"""Names of files and directories that are not part of a dataset: they begin with ``_`` or ``.``.

Examples are ``_SUCCESS``, ``_temporary/``, ``_delta_log/``, ``.cache/`` and this package's write manifests. As in
pandas and pyarrow they are skipped in directories, and as in Spark in globs too, unless the path spells them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def is_hidden(name: str) -> bool:
    """Return whether one component of a path begins with ``_`` or ``.``.

    >>> is_hidden("_SUCCESS"), is_hidden(".cache"), is_hidden("part-0.csv")
    (True, True, False)
    """
    return name.startswith(("_", "."))


def is_hidden_below(path: str, root: str) -> bool:
    """Return whether a path has a hidden component below a directory.

    >>> is_hidden_below("/_data/x/a.csv", "/_data"), is_hidden_below("/_data/_x/a.csv", "/_data")
    (False, True)
    """
    root = root.rstrip("/")
    return path.startswith(root) and any(map(is_hidden, path[len(root) :].split("/")))


def is_hidden_from(path: str, pattern: str) -> bool:
    """Return whether a path that a glob matches has a hidden component that the glob does not spell out.

    >>> is_hidden_from("/d/_temporary/a.csv", "/d/**/*.csv"), is_hidden_from("/d/_x/a.csv", "/d/_*/*.csv")
    (True, False)
    """
    return any(map(is_hidden, path.split("/"))) and not is_spelled(path, pattern)


def is_spelled(path: str, pattern: str) -> bool:
    """Return whether a glob matches a path, and spells out its hidden components.

    >>> is_spelled("/d/a/b/x.csv", "/d/**/*.csv"), is_spelled("/d/_a/x.csv", "/d/**/*.csv")
    (True, False)
    """
    return _is_spelled(path.strip("/").split("/"), pattern.strip("/").split("/"))


def _is_spelled(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        is_more = bool(parts) and not is_hidden(parts[0]) and _is_spelled(parts[1:], patterns)
        return is_more or _is_spelled(parts, patterns[1:])
    if not parts or not (parts[0] == patterns[0] or fnmatchcase(parts[0], patterns[0])):
        return False
    # A leading bracket spells out the character; a star or a question mark does not.
    return not (is_hidden(parts[0]) and patterns[0][0] in "*?") and _is_spelled(parts[1:], patterns[1:])
