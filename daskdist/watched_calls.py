"""Calls that end with an error if a user's function, or reading, takes longer than ``daskdist.timeouts.data``.

====================  ==================================================================================
a call in             is ended
====================  ==================================================================================
the main thread       by a signal, which interrupts the function there, as Ctrl-C does
any other thread      by not waiting for it: it is made in a further thread, which cannot be stopped
====================  ==================================================================================

The limit is for one call of a user's function, however many of them a call makes. So that no other function notices,
the main thread makes its calls itself: functions may depend on it, for example by a `torch.no_grad` around a loop.
"""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Final

from daskdist.call_progress import CallProgress, under_way
from daskdist.call_threads import CALL_THREADS, CallInThread
from daskdist.config import seconds, sent, to_send
from daskdist.errors import WaitTimeoutError
from daskdist.waiting import wait_intervals

# Seconds between two looks at the calls of the main thread, at most, and the number of looks without calls after which
# the thread that looks ends.
_LOOK_EVERY_S: Final = 1.0
_MOST_IDLE: Final = 10
# The first part of a wait for a call in another thread, in seconds.
_SHORT_S: Final = 0.01
# A signal that the system ignores unless a program uses it.
_SIGNAL: Final = getattr(signal, "SIGURG", None)


def watched(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``.

    Parameters
    ----------
    name
        The name of the call in messages, unless a user's function is being called.
    function, args
        The call.

    Raises
    ------
    WaitTimeoutError
        There was no progress for ``daskdist.timeouts.data``.
    """
    if under_way.call is not None:
        # Whoever waits for the outer call sees the progress of this one.
        return function(*args)
    call = CallProgress(name)
    if threading.get_ident() == threading.main_thread().ident and _can_interrupt():
        return _watch.make(call, function, args)
    return _made_elsewhere(call, function, args)


@dataclass(frozen=True)
class Watched:
    """A function to call as `watched` in another process, with the settings of this one, see `to_send`."""

    name: str
    function: Callable[..., Any]
    settings: tuple[Any, ...] | None = field(default_factory=to_send)

    def __call__(self, *args: Any) -> Any:
        with sent(self.settings):
            return watched(self.name, self.function, *args)


def _made_elsewhere(call: CallProgress, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def make() -> None:
        under_way.call = call
        try:
            outcome.append(function(*args))
        except BaseException as error:
            failure.append(error)
        finally:
            under_way.call = None

    thread = CallInThread(partial(contextvars.copy_context().run, make))
    CALL_THREADS.start(thread)
    # Most calls take less time than it takes to find out how long they may take.
    thread.join(_SHORT_S)
    if thread.is_alive():
        for within_s in wait_intervals(call.__str__, "timeouts.data", progress=call.look):
            thread.join(within_s)
            if not thread.is_alive():
                break
    if failure:
        raise failure.pop()
    return outcome.pop()


class _HungCallError(BaseException):
    # Not an `Exception`, which a user's function may catch.
    def __init__(self, error: WaitTimeoutError) -> None:
        super().__init__()
        self.error = error


class _MainThreadWatch:
    """A watcher of the calls that the main thread makes; its thread runs while there are such calls."""

    def __init__(self) -> None:
        # The call that the main thread makes, and the seconds that it may take.
        self.call: CallProgress | None = None
        self.limit_s = 0.0
        # A call that took longer, and its error, until the main thread has got the signal.
        self.hung: tuple[CallProgress, WaitTimeoutError] | None = None
        self._thread: threading.Thread | None = None

    def make(self, call: CallProgress, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make a call in this thread, the main one."""
        self.limit_s = seconds("timeouts.data")
        try:
            return self.made(call, function, args)
        except BaseException as error:
            # An interrupt may have come before the call was forgotten.
            under_way.call = self.call = None
            if isinstance(error, _HungCallError):
                raise error.error from None
            raise

    def made(self, call: CallProgress, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make a call; `interrupt` raises only in this function and what it calls."""
        try:
            under_way.call = self.call = call
            # After a fork there is no thread. A thread that ends sets this to None before its last look for a call.
            thread = self._thread
            if thread is None or not thread.is_alive():
                thread = self._thread = threading.Thread(target=self._look, name="daskdist watch", daemon=True)
                thread.start()
            return function(*args)
        finally:
            under_way.call = self.call = None

    def _look(self) -> None:
        num_idle = 0
        while True:
            call, limit_s = self.call, self.limit_s
            num_idle = 0 if call is not None else num_idle + 1
            if num_idle > _MOST_IDLE:
                # Before the last look: a call that begins after it starts another thread. Two threads do no harm.
                self._thread = None
                if self.call is None:
                    return
            if call is None:
                time.sleep(_LOOK_EVERY_S)
                continue
            try:
                waiting = wait_intervals(
                    call.__str__, "timeouts.data", _LOOK_EVERY_S, progress=call.look, limit_s=limit_s
                )
                while self.call is call:
                    time.sleep(next(waiting))
            except WaitTimeoutError as error:
                if self.call is call:
                    self.hung = call, error
                    signal.pthread_kill(threading.main_thread().ident, _SIGNAL)  # type: ignore[arg-type]

    def interrupt(self, _: int, frame: FrameType | None) -> None:
        """End the call of the main thread if it took too long; the handler of the signal."""
        hung, self.hung = self.hung, None
        # The call may have ended since, and another may have begun.
        while hung is not None and frame is not None:
            if frame.f_code is _MainThreadWatch.made.__code__ and frame.f_locals["call"] is hung[0]:
                raise _HungCallError(hung[1])
            frame = frame.f_back


_watch: Final = _MainThreadWatch()


def _can_interrupt() -> bool:
    # Called in the main thread: only it can set handlers of signals.
    if _SIGNAL is None or not hasattr(signal, "pthread_kill"):
        return False
    handler = signal.getsignal(_SIGNAL)
    if handler is signal.SIG_DFL:
        signal.signal(_SIGNAL, _watch.interrupt)
    return handler in (signal.SIG_DFL, _watch.interrupt)
