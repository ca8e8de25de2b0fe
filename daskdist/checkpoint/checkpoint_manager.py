"""`CheckpointManager`: the numbered checkpoints of a run, in one directory."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from contextlib import suppress
from typing import Any, Final

from daskdist.checkpoint.checkpoint import Checkpoint, write
from daskdist.checkpoint.state_file import read_states
from daskdist.core.arguments import whole_number
from daskdist.display.missing_arguments import advises
from daskdist.display.pages import state_page
from daskdist.errors import ArgumentError, FileError
from daskdist.storage.atomic_file import put
from daskdist.storage.failures import failures
from daskdist.storage.filesystem import Storage
from daskdist.storage.http_files import check_writable
from daskdist.url_secrets import without_secrets
from daskdist.waiting import wait_intervals

logger: Final = logging.getLogger("daskdist")

_NAME: Final = re.compile(r"step-(\d+)\.ckpt")
_CLAIM: Final = re.compile(r"claim-(\d+)")


class CheckpointManager:
    """The checkpoints of a run in one directory, by step: written in the background, and the newest ones kept.

    Parameters
    ----------
    directory
        A local path or fsspec URL. It is created by the first save. One program at a time may save to it.
    keep
        The number of checkpoints to keep; older ones are deleted after each save.
    storage_options
        Options of the fsspec file system, by name.

    Raises
    ------
    ArgumentError
        ``keep`` is not a positive whole number, or the directory is neither text nor a path.

    Notes
    -----
    `save` returns once the states are copied, and a thread writes the file. A program that ends waits for it. A
    program that is killed leaves either the whole checkpoint or none.

    >>> import daskdist
    >>> checkpoint = daskdist.Checkpoint(epoch=0)
    >>> with CheckpointManager("memory://run/epochs", keep=2) as manager:
    ...     for epoch in range(4):
    ...         checkpoint.epoch = epoch
    ...         _ = manager.save(checkpoint, epoch)
    >>> manager.steps
    [2, 3]
    >>> checkpoint.epoch = 0
    >>> manager.restore(checkpoint), checkpoint.epoch
    (3, 3)
    """

    @advises("CheckpointManager")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(directory, str | os.PathLike):
            raise ArgumentError(
                f"CheckpointManager: directory is a {type(directory).__name__}; give a path or a URL, and the "
                "checkpoint to save(checkpoint, step)"
            )
        self.directory = os.fspath(directory)
        self.keep = whole_number("CheckpointManager", "keep", keep, at_least=1)
        self._storage = Storage(storage_options)
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        # The last step that was saved or restored by this manager; later ones in the directory are not of this run.
        self._step: int | None = None
        # The number of the last claim of the directory by this manager, and the content of its file.
        self._claim: tuple[int, bytes] | None = None

    def __repr__(self) -> str:
        return without_secrets(f"CheckpointManager({self.directory!r}, keep={self.keep})")

    def _repr_html_(self) -> str:
        # Do not list the directory, as that may take long.
        last = "no step saved or restored here" if self._step is None else f"last step here: {self._step:,}"
        return state_page(
            "CheckpointManager", [without_secrets(self.directory), f"keeps the newest {self.keep:,}", last], (), ()
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy on a worker continues from the same step, and saves there.
        self.wait()
        state = {**self.__dict__, "_writer": None, "_writing": None, "_claim": None}
        # Only the directory shows which steps that copy saves.
        self._step = None
        return state

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            # The exception of the block is raised, and an error of writing is only logged.
            with suppress(Exception):
                self.close()

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints are in the directory, from the first to the last; complete, but not verified."""
        return self._numbers(_NAME)

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        fs, root = self._storage.located(self.directory)
        with failures(self.directory, "cannot be listed", (OSError,)):
            fs.invalidate_cache(root)
            try:
                names = fs.ls(root, detail=False)
            except FileNotFoundError:
                return []
        matches = (pattern.fullmatch(str(name).rstrip("/").rpartition("/")[2]) for name in names)
        return sorted(int(match[1]) for match in matches if match is not None)

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step."""
        return f"{self.directory.rstrip('/')}/step-{step:08d}.ckpt"

    def save(self, checkpoint: Checkpoint, step: int | None = None) -> int:
        """Save the current states as the checkpoint of a step, in the background.

        Parameters
        ----------
        checkpoint
            The checkpoint to save.
        step
            The number of the step or epoch, larger than that of the last save; by default one more.

        Returns
        -------
        int
            The step.

        Raises
        ------
        ArgumentError
            The directory has a checkpoint of this or a later step, and `restore` did not go back to an earlier one; or
            a state cannot be saved.
        FileError
            The save before this one failed.
        RuntimeError
            A replica calls it, in a function that `Strategy.run` calls.

        Notes
        -----
        It takes as long as copying the states, and waits for the save before it if that is still being written. Once
        the file is written, checkpoints later than the restored one are deleted.
        """
        _check_type("save", checkpoint)
        return self._save_states(checkpoint._states(), step)

    def _save_states(
        self, states: dict[str, Any], step: int | None = None, check: Callable[[], None] | None = None
    ) -> int:
        """Save states that are copies as `save` does; ``check`` raises an error if they are no longer wanted."""
        check_writable(self.directory)
        last = self._step
        if last is None:
            last = max(self.steps, default=-1)
        step = last + 1 if step is None else whole_number("save", "step", step, at_least=0)
        if step <= last:
            raise ArgumentError(
                f"save: step {step} is not after step {last}, the last one in {self.directory}. Call restore to "
                "continue from a checkpoint, or use another directory for another run"
            )
        self.wait()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "daskdist-checkpoint")
        self._writing = self._writer.submit(self._write, step, states, check)
        self._step = step
        return step

    def restore(self, checkpoint: Checkpoint, step: int | None = None) -> int | None:
        """Restore a checkpoint's objects to the newest complete states in the directory.

        Parameters
        ----------
        checkpoint
            The checkpoint to restore; its objects have the names that they had when they were saved.
        step
            The step to restore; by default the newest whose file is undamaged.

        Returns
        -------
        int or None
            The step that was restored; None if the directory has no checkpoint, and then nothing changed.

        Raises
        ------
        ArgumentError
            As for `Checkpoint.restore`.
        FileError
            There are checkpoints, but all of them are damaged; or the one of the given step is, or is missing.
        """
        _check_type("restore", checkpoint)
        number, states = self._newest_states(step)
        if number is not None:
            checkpoint._set_states(states, self.path(number))
            self._step = number
        return number

    def _newest_states(self, step: int | None = None) -> tuple[int | None, dict[str, Any]]:
        """Return the newest complete states in the directory and their step, from which the next save continues.

        See `restore`.
        """
        self.wait()
        steps = self.steps if step is None else [whole_number("restore", "step", step, at_least=0)]
        damage: FileError | None = None
        for number in reversed(steps):
            try:
                states = read_states(self.path(number), self._storage)
            except FileError as error:
                damage = error
                if step is None:
                    logger.warning("restore: passed over a checkpoint that cannot be read: %s", error)
                continue
            self._step = number
            return number, states
        if damage is not None:
            raise damage
        return None, {}

    def wait(self) -> None:
        """Wait until the last save is written.

        Raises
        ------
        FileError
            The save failed.
        WaitTimeoutError
            It takes longer than ``daskdist.timeouts.data``.
        """
        writing = self._writing
        if writing is None:
            return
        for within_s in wait_intervals(f"the save of a checkpoint to {self.directory}", "timeouts.data"):
            if futures_wait([writing], within_s).done:
                break
        self._writing = None
        writing.result()

    def close(self) -> None:
        """Wait until the last save is written, and end the thread; the manager can be used again afterwards.

        Raises
        ------
        FileError
            The last save failed.
        """
        writer, self._writer = self._writer, None
        try:
            self.wait()
        finally:
            if writer is not None:
                writer.shutdown(wait=self._writing is None)

    def _claim_directory(self) -> None:
        """Refuse, from now on, the saves of managers that claimed the directory before.

        Raises
        ------
        FileError
            The directory cannot be written to.
        """
        claims = self._numbers(_CLAIM)
        number, content = max(claims, default=0) + 1, uuid.uuid4().hex.encode()
        fs, path = self._storage.located(self._claim_path(number))
        with failures(self.directory, "cannot be written", (OSError,)):
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            put(fs, path, content)
        self._claim = number, content
        for earlier in claims:
            with suppress(OSError):
                fs.rm_file(self._storage.located(self._claim_path(earlier))[1])

    def _claim_path(self, number: int) -> str:
        return f"{self.directory.rstrip('/')}/claim-{number:08d}"

    def _check_claim(self) -> None:
        if self._claim is None:
            return
        number, content = self._claim
        fs, path = self._storage.located(self._claim_path(number))
        with failures(self.directory, "cannot be read", (OSError,)):
            # Two managers that claim it at the same time may take the same number.
            is_last = max(self._numbers(_CLAIM), default=0) == number and fs.cat_file(path) == content
        if not is_last:
            raise FileError(
                f"{self.directory}: another run has begun to save checkpoints here, and those of this one are refused; "
                "only one at a time can save to a directory"
            )

    def _write(self, step: int, states: dict[str, Any], check: Callable[[], None] | None) -> None:
        def check_wanted() -> None:
            if check is not None:
                check()
            self._check_claim()

        try:
            check_wanted()
            write(self.path(step), states, self._storage, check_wanted)
        except Exception:
            # Log the error, too, since the program may not call this manager again.
            logger.exception("the checkpoint of step %d was not saved to %s", step, self.directory)
            raise
        try:
            self._delete_superfluous(step)
        except (OSError, FileError) as error:
            logger.warning("an old checkpoint in %s cannot be deleted: %s", self.directory, error)

    def _delete_superfluous(self, step: int) -> None:
        steps = self.steps
        earlier = [number for number in steps if number <= step]
        for number in [number for number in steps if number > step] + earlier[: -self.keep]:
            fs, path = self._storage.located(self.path(number))
            fs.rm_file(path)


def _check_type(operation: str, checkpoint: Any) -> None:
    if not isinstance(checkpoint, Checkpoint):
        raise ArgumentError(
            f"{operation}: expected a Checkpoint of the objects, such as Checkpoint(weights=variable), got "
            f"{type(checkpoint).__name__}"
        )
