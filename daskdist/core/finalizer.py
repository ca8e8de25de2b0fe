"""Finalizers of unreferenced objects, called in a thread where that is safe."""

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
    """A function that is called once: explicitly, or after its owner was deleted.

    The garbage collector runs in any thread that allocates memory, even while that thread holds a lock, such as one of
    the standard library's ``threading``. A function that takes such a lock, or starts or joins a thread, would then
    wait for its own thread forever. So a dedicated thread calls the functions of deleted owners.

    Parameters
    ----------
    owner
        The object to watch.
    function
        The function. It must not refer to the owner.
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
        """Cancel the call; return whether it was still pending."""
        return self._finalize.detach() is not None

    def __call__(self) -> None:
        """Call the function now, in this thread, unless it was called before."""
        if self.detach():
            self._function(*self._args)


class _ClosingThread:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the state after a fork, as the child does not have its parent's thread."""
        # SimpleQueue.put is reentrant: a garbage collection may call it within itself.
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def ensure_running(self) -> None:
        """Start the thread unless it is running; must not be called by the garbage collector."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="daskdist-closing", daemon=True)
                    thread.start()
                    self._thread = thread

    def call_later(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call a function in the closing thread, or now at the end of the program."""
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
                logger.warning("an unreferenced object could not be closed", exc_info=True)
            del function, args


_closing: Final = _ClosingThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_closing.forget)
