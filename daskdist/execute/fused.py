"""Calls that are made one after the other in one task of a cluster, each with an outcome of its own."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import cloudpickle
from distributed.protocol import dask_deserialize, dask_serialize

from daskdist.config import sent
from daskdist.errors import ArgumentError, DaskdistError
from daskdist.execute.pickling import culprit, dumps_on_host
from daskdist.execute.sizes import size_of

# Stands for the task itself where an input is what an earlier call of it gave.
OWN: Final = -1
_ENDS_A_PROCESS: Final = (SystemExit, KeyboardInterrupt)

# Where an input comes from: which of the results that the task is given, and which of the outputs of that; None
# where it is the result itself.
Input: TypeAlias = tuple[int, int | None]


@dataclass(frozen=True)
class Failure:
    """What came of a call that raised, or that was to be given what another one could not make.

    Parameters
    ----------
    pickled
        The error, with its traceback.
    """

    pickled: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """That an error was raised."""
        try:
            if isinstance(error, _ENDS_A_PROCESS):
                raise TypeError("raised where a worker looks at it, it would end that")
            pickled = dumps_on_host((error, error.__traceback__), by_value=True)
            cloudpickle.loads(pickled)
        except Exception:
            # What cannot travel is told.
            told = DaskdistError(f"{type(error).__name__}: {error}")
            for note in getattr(error, "__notes__", ()):
                told.add_note(note)
            told.add_note("".join(traceback.format_exception(error)).rstrip())
            pickled = cloudpickle.dumps((told, None))
        return cls(pickled)

    def error(self) -> BaseException:
        """The error, made anew each time."""
        error, trace = cloudpickle.loads(self.pickled)
        raised: BaseException = error.with_traceback(trace)
        return raised


class Call(NamedTuple):
    """One call of a task.

    Parameters
    ----------
    function
        Called as ``function(inputs, *args)``.
    inputs
        Where each input comes from.
    args
        What else it is given.
    is_on_lane
        Whether it is given what its lane gives, too.
    settings
        Those of the program that count in it, as `to_send` has them.
    """

    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    args: tuple[Any, ...]
    is_on_lane: bool = False
    settings: Any = None


class OfLane(Protocol):
    """What a lane gives to its calls."""

    def not_made(self, function: Callable[..., Any], args: tuple[Any, ...], error: BaseException) -> None:
        """Be told that a call is not made there, since what it was to be given failed."""


@dataclass(frozen=True)
class Outputs:
    """What is wanted of the calls of a task.

    Parameters
    ----------
    made
        By the number of the call, what it gave, or a `Failure`.
    """

    made: dict[int, Any]

    def __getitem__(self, number: int) -> Any:
        """What a call gave; raises what it raised."""
        value = self.made[number]
        if isinstance(value, Failure):
            raise value.error()
        return value

    def since(self, first: int) -> Outputs:
        """Those of calls from one on, counted from there."""
        return Outputs({number - first: value for number, value in self.made.items() if number >= first})

    def __sizeof__(self) -> int:
        # Dask asks for it, several times, and knows the sizes of what there is in it.
        return self._num_bytes

    @cached_property
    def _num_bytes(self) -> int:
        return object.__sizeof__(self) + sum(map(size_of, self.made.values()))


@dataclass(frozen=True)
class PickOutput:
    """A part of what one call of a task gave."""

    number: int
    pick: Callable[[Any], Any]

    def __call__(self, result: Outputs) -> Any:
        return self.pick(result[self.number])


def _to_frames(outputs: Outputs) -> tuple[dict[str, Any], list[Any]]:
    with contextlib.suppress(Exception):
        pickled, buffers = pickled_apart(outputs.made)
        views = [buffer.raw() for buffer in buffers]
        return {"layout": [(None, [not view.readonly for view in views])]}, [pickled, *views]
    # What does not pickle is a failure elsewhere, and stays of use where it is.
    frames: list[Any] = []
    layout = []
    for number, value in outputs.made.items():
        try:
            pickled, buffers = pickled_apart(value)
        except Exception as error:
            buffers = []
            told = ArgumentError(
                f"what a replica returned does not pickle, and so cannot leave its worker{culprit(value)}: {error}"
            )
            pickled = cloudpickle.dumps(Failure.of(told))
        views = [buffer.raw() for buffer in buffers]
        layout.append((number, [not view.readonly for view in views]))
        frames += [pickled, *views]
    return {"layout": layout}, frames


def _from_frames(header: dict[str, Any], frames: Sequence[Any]) -> Outputs:
    left = iter(frames)
    made = {}
    for number, are_writeable in header["layout"]:
        pickled = next(left)
        buffers = [_like_its_own(next(left), is_writeable) for is_writeable in are_writeable]
        found = pickle.loads(pickled, buffers=buffers)
        if number is None:
            return Outputs(found)
        made[number] = found
    return Outputs(made)


dask_serialize.register(Outputs)(_to_frames)
dask_deserialize.register(Outputs)(_from_frames)


def pickled_apart(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A pickle and its buffers; as Dask does it, what the program itself defines goes by value."""
    for by_value in (False, True):
        buffers: list[pickle.PickleBuffer] = []
        try:
            pickled = dumps_on_host(value, by_value=by_value, buffer_callback=buffers.append)
        except Exception:
            if by_value:
                raise
            continue
        if b"__main__" not in pickled:
            break
    return pickled, buffers


def _like_its_own(frame: Any, is_writeable: bool) -> Any:
    view = memoryview(frame)
    if view.readonly and is_writeable:
        return memoryview(bytearray(view))
    return view if is_writeable else view.toreadonly()


def pickled_calls(calls: Sequence[Call]) -> bytes:
    """Calls as `run_calls` takes them."""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(calls, protocol=5)
        if b"__main__" not in pickled:
            return pickled
    return cloudpickle.dumps(calls, protocol=5)  # type: ignore[no-any-return]


class Segment(NamedTuple):
    """Calls of a task that were noted together.

    Parameters
    ----------
    pickled
        The calls.
    num_calls
        How many they are.
    wanted
        The numbers of those whose results are.
    num_results
        How many of the results that the task is given are theirs.
    begins
        Which of those are outputs of several segments, and where in them begin those of the one that is meant.
    """

    pickled: bytes
    num_calls: int
    wanted: Sequence[int]
    num_results: int
    begins: Sequence[tuple[int, int]]


def run_calls(results: Sequence[Any], segments: Sequence[Segment], own: tuple[OfLane, ...]) -> Outputs:
    """Make calls in order.

    Parameters
    ----------
    results
        What other tasks gave.
    segments
        The calls.
    own
        What calls on this lane are given after their arguments.

    Returns
    -------
    Outputs
        With the numbers of calls counted over all segments.
    """
    found: dict[int, Any] = {}
    first = begin = 0
    for segment in segments:
        given = list(results[begin : begin + segment.num_results])
        for place, number in segment.begins:
            given[place] = given[place].since(number)
        for number, value in _made(segment, given, own):
            found[first + number] = value
        first += segment.num_calls
        begin += segment.num_results
    return Outputs(found)


def _made(segment: Segment, results: Sequence[Any], own: tuple[OfLane, ...]) -> Iterator[tuple[int, Any]]:
    calls: list[Call] = pickle.loads(segment.pickled)
    wanted = segment.wanted
    last_use = {place: number for number, call in enumerate(calls) for index, place in call.inputs if index == OWN}
    made: list[Any] = []
    kept = frozenset(wanted)
    for number, call in enumerate(calls):
        made.append(_outcome(call, results, made, own))
        for index, place in call.inputs:
            if index == OWN and place is not None and last_use[place] == number and place not in kept:
                made[place] = None
    return ((number, made[number]) for number in wanted)


def _outcome(call: Call, results: Sequence[Any], made: Sequence[Any], own: tuple[OfLane, ...]) -> Any:
    inputs = [
        made[place] if index == OWN else results[index] if place is None else results[index].made[place]  # type: ignore[index]
        for index, place in call.inputs
    ]
    for each in inputs:
        if isinstance(each, Failure):
            for one in own if call.is_on_lane else ():
                one.not_made(call.function, call.args, each.error())
            return each
    try:
        with contextlib.nullcontext() if call.settings is None else sent(call.settings):
            return call.function(inputs, *call.args, *own) if call.is_on_lane else call.function(inputs, *call.args)
    except BaseException as error:
        # Dask would end the worker because of some, and forget the other calls because of the rest.
        return Failure.of(error)


def failure_of(outputs: Outputs, numbers: Sequence[int]) -> Failure | None:
    """What came of the first of some calls of a task that raised, if one did."""
    return next((found for number in numbers if isinstance(found := outputs.made.get(number), Failure)), None)


def some_outputs(results: Sequence[Outputs], wanted: Sequence[int], most_bytes: int) -> Outputs:
    """Some of the outputs of the one task there is; all of them where they are small together."""
    (outputs,) = results
    return outputs if size_of(outputs) <= most_bytes else Outputs({number: outputs.made[number] for number in wanted})
