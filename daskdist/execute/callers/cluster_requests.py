"""The addresses of schedulers, the security of connections to them, and requests, which fail if no answer comes."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import dask.config
from distributed import Scheduler, Security, Status
from distributed.comm import CommClosedError
from distributed.utils import import_term

from daskdist.config import seconds
from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.waiting import wait_intervals

# The form of keys that `Submit.key_of` returns.
_KEY: Final = re.compile(r"-[0-9a-f]{12}-[0-9]+$")
# How often the status of a client is checked.
_LOOK_EVERY_S: Final = 0.1
# Seconds within which a client notices that its scheduler is lost, after a request failed because of that.
_NOTICED_WITHIN_S: Final = 1.0


def is_encrypted(address: str) -> bool:
    """Return whether connections to an address are encrypted."""
    return address.startswith(("tls://", "wss://"))


def check_address(operation: str, address: str) -> None:
    """Check that the address of a scheduler has no user or password, which would be ignored.

    Raises
    ------
    ArgumentError
        There is one; the message does not show it.
    """
    if "@" in address:
        raise ArgumentError(
            f"{operation}: the address of the scheduler at {address.rpartition('@')[2]!r} has a user or a password "
            "before its @, which Dask does not use; leave it out, and see security for certificates"
        )


def usable_security(address: str, security: Security | None, said_by: str, giving: str) -> Security:
    """Return the security of connections to a scheduler: if none is given, that of Dask's configuration.

    Parameters
    ----------
    address, security
        The address of the scheduler, and the security if it was given.
    said_by
        The place of the address, for messages.
    giving
        The call that takes the security, for messages.

    Raises
    ------
    ClusterError
        The certificates cannot be used, or there are none but the address or the security needs some.
    """
    if security is None:
        # A client without security does the same.
        loader: str | None = dask.config.get("distributed.client.security-loader", None)
        security = (loader and import_term(loader)({"address": address})) or Security()
    encrypts, scheme = is_encrypted(address), address.partition("://")[0]
    try:
        context = security.get_connection_args("client")["ssl_context"]
    except OSError as error:
        raise ClusterError(f"{address!r}{said_by}: the certificates of {security} cannot be used: {error}") from error
    if encrypts and context is None:
        raise ClusterError(
            f"{address!r}{said_by}: {scheme}:// needs certificates, but there are none; give {giving}, "
            "or set distributed.comm.tls in Dask's configuration"
        )
    if security.require_encryption and not encrypts and scheme != "inproc":
        raise ClusterError(
            f"{address!r}{said_by}: security requires encryption, which {scheme}:// does not have; write 'tls://...', "
            "or give security that does not require it"
        )
    return security


def security_hint(address: str) -> str:
    """Return the possible reason, in the security, why a connection to a scheduler fails; "" if there is none."""
    if address.startswith("tls://"):
        return "; the scheduler may not use TLS, or may have other certificates: see security"
    if address.startswith("tcp://"):
        return "; connect to a scheduler that uses TLS with 'tls://...' and security"
    return ""


def address_in_file(path: str) -> str:
    """Return the address of the scheduler that wrote a file.

    Raises
    ------
    ClusterError
        The file cannot be read, or has no address.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)["address"])
    except OSError as error:
        raise ClusterError(
            f"the scheduler file {path!r} cannot be read: {error}; start 'dask scheduler --scheduler-file {path}' first"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"{path!r} is not a file that 'dask scheduler --scheduler-file' wrote: it names no address"
        ) from error


def ask_scheduler(client: Any, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the scheduler's answer to a request, such as ``client.scheduler.identity``.

    Raises
    ------
    ClusterError
        The scheduler does not answer within ``daskdist.timeouts.scheduler``.
    """
    failure = f"the scheduler at {client.scheduler.address} has not answered"
    return _within("timeouts.scheduler", failure, client, request, *args, **kwargs)


def run_on_scheduler(client: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on the scheduler; see `ask_scheduler`."""
    return ask_scheduler(client, client.run_on_scheduler, function, *args)


def ask_workers(client: Any, request: Callable[..., Any], *args: Any, workers: Sequence[str], **kwargs: Any) -> Any:
    """Return the answers of workers to a request.

    Raises
    ------
    ClusterError
        A worker does not answer within ``daskdist.timeouts.silence``.
    """
    failure = " ".join(("not all of the workers", ", ".join(workers), "have answered"))
    return _within("timeouts.silence", failure, client, request, *args, **kwargs)


def run_on_workers(
    client: Any, function: Callable[..., Any], *args: Any, workers: Sequence[str] | None, on_error: str = "raise"
) -> dict[str, Any]:
    """Call a function on workers, or on all if None; return its results by address. See `ask_workers`."""
    request = partial(client.run, workers=None if workers is None else list(workers), on_error=on_error)
    answers: dict[str, Any] = ask_workers(client, request, function, *args, workers=workers or ())
    return answers


async def ask_from_worker(worker: Any, request: str, **kwargs: Any) -> Any:
    """Return the scheduler's answer to a request of a worker, such as ``who_has``.

    Raises
    ------
    ClusterError
        The scheduler is lost, or the worker is closing.
    """
    try:
        return await getattr(worker.scheduler, request)(**kwargs)
    except (CommClosedError, RuntimeError) as error:
        if worker.rpc.status is not Status.running:
            raise ClusterError(
                f"the worker at {worker.address} is closing, by request or because it lost the scheduler at "
                f"{worker.scheduler.address}; its log has the reason"
            ) from error
        if isinstance(error, RuntimeError):
            raise
        raise _lost_scheduler_error(worker.scheduler.address) from error


def wait_for_scheduler(client: Any, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait while a client looks for another scheduler at the address of the one that it lost.

    Parameters
    ----------
    client
        The client.
    meanwhile
        Called before each check.

    Raises
    ------
    WaitTimeoutError
        There is none within ``daskdist.timeouts.scheduler``.
    """
    if client.status == "connecting":
        waited_for = f"the scheduler at {client.scheduler.address}"
        for within_s in wait_intervals(waited_for, "timeouts.scheduler", _LOOK_EVERY_S):
            meanwhile()
            if client.status != "connecting":
                return
            time.sleep(within_s)


def closed_error(client: Any) -> ClusterError:
    """Return the error for a strategy that is closed, or a client that is not connected to a scheduler.

    Without a scheduler, Dask's workers end and its client drops all results.
    """
    if client.status == "connecting":
        return _lost_scheduler_error(client.scheduler.address)
    if client.status == "running":
        return ClusterError(
            "the strategy is closed, and its results on the cluster are lost; fetch results, for example with "
            "local_results, before the strategy or its client is closed, and create another strategy"
        )
    return ClusterError(
        "the connection to the cluster is closed, and the results there are lost; fetch results, for example with "
        "local_results, before the strategy or its client is closed. If the scheduler was lost, create a new client "
        "and strategy, and continue from a checkpoint"
    )


def root_cause(client: Any, error: BaseException) -> BaseException:
    """Return the error of a call, or that of the lost connection if the call failed with the cluster."""
    if client.status == "running" or not isinstance(error, (ClusterError, CollectiveError)):
        return error
    closed = closed_error(client)
    closed.__cause__ = error
    return closed


def _lost_scheduler_error(address: str) -> ClusterError:
    return ClusterError(
        f"lost the scheduler at {address}, and with it all results and all workers, which end without their scheduler; "
        "when a scheduler is started again at this address, which the strategy waits for as long as "
        "daskdist.timeouts.scheduler says, continue from a checkpoint"
    )


def _within(name: str, failure: str, client: Any, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if client.status == "connecting":
        raise closed_error(client)
    within_s = min(seconds(name), threading.TIMEOUT_MAX)
    try:
        return client.sync(request, *args, callback_timeout=within_s, **kwargs)
    except TimeoutError as error:
        raise ClusterError(f"{failure} within {within_s:g} s, which is daskdist.{name}") from error
    except CommClosedError as error:
        if client.status != "running":
            raise closed_error(client) from error
        if name == "timeouts.scheduler":
            # The client notices the loss in a moment.
            until = time.monotonic() + _NOTICED_WITHIN_S
            while client.status == "running" and time.monotonic() < until:
                time.sleep(_LOOK_EVERY_S / 10)
            raise _lost_scheduler_error(client.scheduler.address) from error
        raise


def blocking_tasks(keys: Sequence[str], token: str, *, dask_scheduler: Scheduler) -> list[str] | None:
    """Return the tasks that workers execute before those with these keys, of the caller with this token.

    It is None if a worker executes a task of the caller, or one of this package before it: calls that hang end by
    themselves. It is empty if no worker will begin one.
    """
    states = {dask_scheduler.tasks[key].state if key in dask_scheduler.tasks else "forgotten" for key in keys}
    if not states.isdisjoint(("memory", "erred", "forgotten")):
        # The program will soon be told that a task is over.
        return None
    blocking: list[str] = []
    for worker in dask_scheduler.workers.values():
        if "queued" in states or any(f"-{token}-" in str(task.key) for task in worker.processing):
            # Some of what a worker last said that it executes may be over.
            executing = [task.key for task in worker.executing if task in worker.processing]
            # A paused worker begins no task, also of those that it got before.
            will_begin = not executing and worker.status is not Status.paused
            if will_begin or any(map(is_key_of_ours, executing)):
                return None
            blocking += [f"{key} on {worker.address}" for key in executing]
    return blocking


def is_key_of_ours(key: Any) -> bool:
    """Return whether a key was created by `Submit.key_of`, of any strategy."""
    return isinstance(key, str) and _KEY.search(key) is not None
