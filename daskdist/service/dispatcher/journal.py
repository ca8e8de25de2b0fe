"""The state of a dispatcher, kept in a directory so that a new scheduler can continue from it."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping
from typing import Any, Final

from daskdist.errors import FileError
from daskdist.storage.atomic_file import is_on_disk, put
from daskdist.storage.filesystem import Storage
from daskdist.url_secrets import shown_cause

_SUFFIX: Final = ".daskdist-journal"
# The number of the form of the state, which a change of the recorded classes and keys increases.
_FORM: Final = 2


class Journal:
    """A state of keys and values, kept in a directory: one file for each key, which is replaced in one step.

    Parameters
    ----------
    work_dir
        The directory, local or of any file system that fsspec knows; it is created if it does not exist.

    Notes
    -----
    Datasets may hold passwords, such as storage options: on a local disk, only the user of the scheduler can read a
    directory that was created here, and the files in any.
    """

    def __init__(self, work_dir: str) -> None:
        self.work_dir = work_dir
        self._fs, self._path = Storage().located(work_dir)
        if is_on_disk(self._fs) and not os.path.exists(self._path):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            # The umask may have left out permissions of the user, too.
            os.chmod(self._path, 0o700)
        self._fs.makedirs(self._path, exist_ok=True)

    def load(self) -> dict[Any, Any]:
        """Return the state.

        Raises
        ------
        FileError
            A file is damaged, or another version wrote it.
        """
        state = {}
        for path in self._fs.ls(self._path, detail=False, refresh=True):
            if path.endswith(_SUFFIX):
                try:
                    content = pickle.loads(self._fs.cat_file(path))
                # Damage may raise any exception.
                except Exception as error:
                    raise self._unusable(f"has a damaged file, {path};") from shown_cause(error)
                if not isinstance(content, tuple) or content[:1] != (_FORM,):
                    # Elements that were read already could be others in this version, or come in another order.
                    raise self._unusable(
                        f"has a file of another version of daskdist, {path}; finish its jobs with that version, or"
                    )
                _, key, value = content
                state[key] = value
        return state

    def write(self, changes: Mapping[Any, Any]) -> None:
        """Write the new values of some keys; None for a key that was removed."""
        # If this process is killed in between, nothing was removed whose replacement is missing.
        for key, value in sorted(changes.items(), key=lambda item: item[1] is None):
            path = f"{self._path}/{hashlib.sha256(repr(key).encode()).hexdigest()}{_SUFFIX}"
            if value is not None:
                put(self._fs, path, pickle.dumps((_FORM, key, value)), is_private=True)
            elif self._fs.exists(path):
                self._fs.rm_file(path)

    def _unusable(self, problem: str) -> FileError:
        return FileError(
            f"the journal of the data service {problem} delete {self.work_dir} to start without the jobs recorded in it"
        )
