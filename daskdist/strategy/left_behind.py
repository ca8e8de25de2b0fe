"""What strategies have left on workers whose programs are gone, or have let go of them without closing them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from distributed import Client, Scheduler

from daskdist.execute.roster import Roster
from daskdist.strategy.desk import dismiss

_AT_END_S: Final = 2.0
# By the token of a strategy of this program what makes its calls: that is there for as long as the strategy, or
# anything that came of it.
_callers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def watch(client: Client, roster: Roster, token: str, caller: Any) -> None:
    """Have workers forget a strategy when nobody has what makes its calls, and at the end of the program."""
    _callers[token] = caller
    forget = partial(_forget, client, roster, token)
    at_end = partial(_do_now, client, forget)
    # Before what strategies have done there, which may close the client.
    atexit.register(at_end)
    weakref.finalize(caller, _do_soon, client, forget, at_end).atexit = False


def sweep(client: Client, there: Mapping[str, Mapping[str, str]]) -> None:
    """Have workers forget what nobody has any more.

    Parameters
    ----------
    client
        The program's.
    there
        By the address of a worker, of each strategy that it knows the token, and the id of its program's client.
    """
    others = {token: owner for known in there.values() for token, owner in known.items() if token not in _callers}
    if not others:
        return
    clients = {*others.values()}
    # Some schedulers call no functions.
    with contextlib.suppress(Exception):
        clients = set(client.run_on_scheduler(_clients))
    gone = [token for token, owner in others.items() if owner == client.id or owner not in clients]
    if gone:
        client.run(dismiss, *gone, workers=list(there), on_error="ignore")


def _clients(dask_scheduler: Scheduler) -> list[str]:
    return list(dask_scheduler.clients)


def _do_soon(client: Client, forget: Callable[[], Any], at_end: Callable[[], None]) -> None:
    # The garbage collector comes in any thread; also in that which sends.
    atexit.unregister(at_end)
    if client.status == "running":
        client.loop.add_callback(forget)


def _do_now(client: Client, forget: Callable[[], Any]) -> None:
    if client.status == "running":
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(forget(), client.loop.asyncio_loop).result(_AT_END_S)


async def _forget(client: Client, roster: Roster, token: str) -> None:
    with contextlib.suppress(Exception):
        await client._run(dismiss, token, workers=list(roster.present), on_error="ignore")
