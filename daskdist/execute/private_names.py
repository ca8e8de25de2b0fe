"""Private names of Dask that have no public equivalent; no other module uses any.

Each function says what takes its place if Dask drops the name.
"""

from __future__ import annotations

from distributed import Client, Future, Scheduler, Status, Worker

# --- in the program ---


def is_here(address: str) -> bool:
    """Return whether the scheduler at an address is in this process and running."""
    # Without it: False, and a program that ends is slower where the scheduler is in its process.
    return any(scheduler.address == address for scheduler in Scheduler._instances if scheduler.status == Status.running)


def reconnect_for(client: Client, least_s: float) -> None:
    """Let a client that has lost its scheduler try to reach another one for some seconds before it closes."""
    # Without it: users give their client the timeout.
    client._timeout = max(client._timeout, least_s)


def handles_topic(client: Client, topic: str) -> bool:
    """Return whether a client calls a function for the events of a topic."""
    # Without it: False, and the program's own function for these events is replaced.
    return topic in client._event_handlers


def follow(future: Future, other: Future) -> None:
    """Let a future stand for the task of another one."""
    # Without it: whatever refers to the future is given the other one.
    future._state = other._state


# --- on the scheduler and on workers ---


def is_reading_graphs(dask_scheduler: Scheduler) -> bool:
    """Return whether a scheduler is still reading graphs that clients have sent."""
    # Without it: wait for a task that was submitted afterwards.
    return bool(dask_scheduler._active_graph_updates)


def is_running_tasks(worker: Worker) -> bool:
    """Return whether a worker is running tasks, also those that the scheduler has forgotten."""
    # Without it: the functions of our tasks count themselves.
    return bool(worker._async_instructions)
