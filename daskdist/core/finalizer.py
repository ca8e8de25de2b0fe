"""Closing what nobody refers to any more, in a thread where that is safe."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

logger: Final = logging.getLogger("daskdist")


class Finalizer:
    """Calls a function once: when it is called itself, or after its owner is gone.

    The garbage collector runs in any thread, wherever memory is allocated, also while that thread holds a lock: of the
    standard library's ``threading`` for one. A function that takes such a lock, or starts or joins a thread, would
    wait for its own thread forever. So a thread that is kept for this calls the functions of owners that are gone.

    Parameters
    ----------
    owner
        The object to watch.
    function
        What to call. It must not refer to the owner.
    args
        Its arguments.
    """

    def __init__(self, owner: Any, function: Callable[..., Any], *args: Any) -> None:
        _closing.ensure_running()
        self._finalize = weakref.finalize(owner, _closing.call_later, function, args)
        self._function = function
        self._args = args

    @property
    def alive(self) -> bool:
        """True until the function has been called."""
        return self._finalize.alive

    def detach(self) -> bool:
        """Never call the function; return whether it was still to be called."""
        return self._finalize.detach() is not None

    def __call__(self) -> None:
        """Call the function now, in this thread, unless that was done before."""
        if self.detach():
            self._function(*self._args)


class _ClosingThread:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; a process that was forked has no thread of its parent."""
        # Its `put` may be interrupted by another one in the same thread.
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def ensure_running(self) -> None:
        """Start the thread unless it runs; never called by the garbage collector."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="daskdist-closing", daemon=True)
                    thread.start()
                    self._thread = thread

    def call_later(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call a function in the closing thread; at the end of the program, call it now."""
        if threading.main_thread().is_alive():
            self._calls.put((function, args))
        else:
            function(*args)

    def _run(self) -> None:
        while True:
            function, args = self._calls.get()
            try:
                function(*args)
            except Exception:
                logger.warning("what nobody refers to any more could not be closed", exc_info=True)
            del function, args


_closing: Final = _ClosingThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_closing.forget)
