"""Calls in the package wait with a limit, except for those listed here with their reasons."""

from __future__ import annotations

import ast
from pathlib import Path

from syntax_trees import nodes_of, parsed

import daskdist

PACKAGE = Path(daskdist.__file__).parent

# Methods that wait when they are called without arguments.
BLOCKING = {"acquire", "communicate", "exception", "get", "join", "result", "wait"}
# Methods that wait without a limit unless they get this argument.
UNLIMITED = {"gather": "callback_timeout", "sync": "callback_timeout", "shutdown": "wait", "wait_for": "timeout"}

LISTED: dict[str, dict[str, set[str]]] = {
    "a thread waits for work from its owner": {
        "core/finalizer.py": {"self._calls.get"},
        "execute/stream/element_reader.py": {"self.changed.wait_for"},
        "execute/transfer/deferred_release.py": {"self.released.get"},
        "service/worker/producer.py": {"self._room.wait_for"},
    },
    "the user asked to wait until a server ends": {
        "cli/data_service.py": {"is_over.wait"},
        "service/servers.py": {"self._has_ended.wait"},
        "tensorflow/servers.py": {"self._thread.join"},
    },
    "the task or future has ended": {
        "checkpoint/checkpoint_manager.py": {"writing.result"},
        "execute/callers/compute_key.py": {"task.result"},
        "execute/callers/fetch.py": {"future.result", "task.result"},
        "execute/callers/sent_blocks.py": {"done.exception"},
        "execute/callers/submit.py": {"task.result"},
        "execute/messages/link.py": {"next(iter(done)).exception", "next(iter(done)).result"},
        "execute/callers/threads.py": {"handle.exception", "handle.result"},
        "service/consumer/consumer.py": {"sending.exception"},
        "service/dispatcher/scheduler_plugin.py": {"writing.exception"},
        "service/messages.py": {"done.exception"},
        "strategy/calls/stream.py": {"done.exception"},
    },
    "the coroutine has a limit, or waits for nothing": {
        "execute/callers/compute_key.py": {"client.gather"},
        "execute/callers/submit.py": {"self.client.gather"},
        "execute/callers/sent_blocks.py": {
            "asyncio.run_coroutine_threadsafe(fetching, worker.loop.asyncio_loop).result"
        },
        "service/consumer/dispatcher_connection.py": {
            "asyncio.run_coroutine_threadsafe(_asked(address, request), event_loop()).result"
        },
        "service/servers.py": {"stop.wait"},
        "strategy/placement/cluster_resolver.py": {"thread.submit(asyncio.run, greet()).result"},
        "strategy/calls/worker/data_keys.py": {"event.wait"},
    },
    "a method of this package that waits with a limit, or not at all": {
        "execute/stream/bundle_builder.py": {"interpreter.gather"},
        "execute/transfer/layout.py": {"slot.wait"},
        "strategy/function.py": {"current.wait_for"},
        "strategy/input/replica_iterator.py": {"times.wait"},
        "strategy/replica/checkpoints.py": {"self._used(manager).wait"},
        "strategy/calls/worker/worker_steps.py": {"slot.times.wait"},
        "strategy/calls/returned_values.py": {"capture.wait_for"},
        "strategy/variables/variable.py": {"leaf.result"},
        "strategy/calls/cluster_backend.py": {"leaf.result"},
        "strategy/values/encoding.py": {"leaf.result"},
        "testing/visitation.py": {"manager.wait"},
    },
    "threads copy memory, or end at once": {
        "execute/transfer/layout.py": {"self._changed.wait"},
        "strategy/calls/local_calls.py": {"self._warning_timer.join"},
    },
    "the lock is new, so that nobody holds it": {
        "strategy/collectives/rendezvous.py": {"gate.acquire"},
        "strategy/calls/worker/promises.py": {"gate.acquire"},
    },
}


def waits_of(nodes: list[ast.AST]):
    """Yield the calls of a syntax tree that may wait without limit, except awaited ones, which block no thread."""
    has_queues = any(isinstance(node, ast.Name) and node.id in ("queue", "SimpleQueue") for node in nodes)
    in_loop = {id(node.value) for node in nodes if isinstance(node, ast.Await)}
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or id(node) in in_loop:
            continue
        name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name == "get" and not has_queues:
            # This `get` is of a context variable, for example.
            continue
        if name in BLOCKING:
            is_limited = bool(node.args or keywords & {"timeout", "blocking"})
        elif name in UNLIMITED:
            is_limited = UNLIMITED[name] in keywords or (name == "wait_for" and len(node.args) > 1)
        else:
            continue
        if not is_limited:
            yield node


def test_waits_have_limits():
    listed = {(file, text) for files in LISTED.values() for file, texts in files.items() for text in texts}
    waits = {}
    files = sorted(PACKAGE.rglob("*.py"))
    with parsed(files):
        for path in files:
            for call in waits_of(nodes_of(path)):
                receiver = ast.unparse(call.func.value)
                if receiver not in ("self", "logger"):
                    waits[str(path.relative_to(PACKAGE)), f"{receiver}.{call.func.attr}"] = call.lineno
    unlisted = {place: line for place, line in waits.items() if place not in listed}
    assert not unlisted, (
        "give these a limit and a name with daskdist.waiting.wait_intervals, or list them with a reason"
    )
    assert not listed - set(waits), "remove these from the list, as they wait no longer"


def test_a_wait_without_limit_is_seen():
    text = "event.wait(); event.wait(1); thread.join(); lock.acquire(timeout=2); client.sync(f); pool.shutdown()"
    nodes = list(ast.walk(ast.parse(text)))
    assert [call.func.attr for call in waits_of(nodes)] == ["wait", "join", "sync", "shutdown"]
