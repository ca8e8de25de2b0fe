"""``rejection_resample``: elements dropped at random so that classes have target shares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.arguments import whole_number
from daskdist.core.block import Block, Bundle, Rows, join
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import CountingNode, Transformation
from daskdist.core.primitive import (
    Arrange,
    Compute,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Fact,
    Opener,
    Primitive,
    gathered,
)
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.randomness.seed import SeedsInCall, generator, numbers_of, state_of
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.resume_points import ResumableSource
from daskdist.core.selection.runs import Run
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, Structure
from daskdist.core.to_numpy import to_numpy
from daskdist.errors import ArgumentError, UserFunctionError

logger: Final = logging.getLogger("daskdist")

# The least difference between a share of the result and its target that is logged, if it is not chance.
_LARGE_DEVIATION: Final = 0.02
_PAIR = Structure.of((0, 0))[1]


@dataclass(frozen=True, eq=False)
class RejectionResample(CountingNode, Transformation):
    """Pairs ``(class, element)`` of the elements that are kept.

    Parameters
    ----------
    class_function
        Returns an element's class, an integer.
    target
        The target share of each class; they sum to 1.
    initial
        The share of each class in the input; None to estimate it from the elements so far.
    seed
        Determines which elements are kept.
    """

    class_function: UserFunction
    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seed: int

    name = "rejection_resample"

    def __post_init__(self) -> None:
        whole_number(self.name, "seed", self.seed, at_most=None)
        check_shares(self.name, "target_dist", self.target)
        if self.initial is not None:
            check_shares(self.name, "initial_dist", self.initial)
            if len(self.initial) != len(self.target):
                raise ArgumentError(
                    f"rejection_resample: initial_dist has {len(self.initial)} classes, target_dist {len(self.target)}"
                )
            for number, (target_share, initial_share) in enumerate(zip(self.target, self.initial, strict=True)):
                if target_share and not initial_share:
                    raise ArgumentError(
                        f"rejection_resample: class {number} has target share {target_share:g}, but initial share 0"
                    )

    @property
    def spec(self) -> ElementSpec:
        number = ElementSpec(LONE, (TensorSpec((), np.dtype(np.int32)),))
        return ElementSpec.nest(_PAIR, [number, self.source.spec])

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        with_class = WithClass(self.class_function, len(self.target))
        pairs = Compute(gathered(inputs[0]), with_class, self.name, factor=1, costly=self.class_function)
        classes = Fact(pairs, classes_of, f"{self.name}-classes")
        rows = ResampleRows(self.target, self.initial, self.seed, 1 + self.passes.stream, self.passes)
        return Arrange((classes,), rows, grouped=0, name=self.name)


def check_shares(operation: str, name: str, shares: Sequence[float]) -> None:
    """Check that shares are non-negative numbers that sum to 1.

    Raises
    ------
    ArgumentError
        There are none, one is negative, or they do not sum to 1.
    """
    total = float(np.sum(shares))
    if not shares or min(shares) < 0 or not np.isclose(total, 1, atol=1e-4):
        raise ArgumentError(f"{operation}: {name} is {list(shares)}; give shares of 0 or more that sum to 1")


@dataclass(frozen=True)
class WithClass:
    """A function that returns pairs of a class and an element."""

    function: UserFunction
    num_classes: int

    def __call__(self, rows: Rows) -> Rows:
        classes = np.zeros(len(rows), np.int32)
        with SeedsInCall() as seeds:
            for index, element in enumerate(rows.elements()):
                seeds.argument, seeds.number = element, 0
                classes[index] = self._class(element, lambda index=index: rows.where(index))  # type: ignore[misc]
        if not len(rows):
            return Bundle(_PAIR.nest([LONE, rows.structure]), [])
        return join([Block(LONE, [classes]), rows], _PAIR)

    def _class(self, element: Any, where: Callable[[], str]) -> Any:
        value = self.function(element, where)
        number = to_numpy(value)
        if number.shape or number.dtype.kind not in "iu" or not 0 <= number < self.num_classes:
            raise UserFunctionError(
                f"rejection_resample: {self.function} returned {value!r:.80} on {where()}; "
                f"a class is an integer from 0 to {self.num_classes - 1}"
            )
        return number


def classes_of(pairs: Rows) -> Index:
    """Return the classes of pairs of a class and an element, shape ``(num_rows,)``, int32."""
    if isinstance(pairs, Block):
        classes: Index = pairs.leaves[0]
        return classes
    return np.array([pairs.item(index)[0] for index in range(len(pairs))], np.int32)


@dataclass(frozen=True)
class ResampleRows:
    """Row arithmetic that keeps elements at random; its input is a stream with each element's class."""

    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seed: int
    stream: int
    passes: PassNumber

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        seen, num_kept = np.zeros((2, len(self.target)), np.int64)
        rng = generator(self.seed, self.stream, self.passes.of(epoch))
        return ResampleCursor(ResumableSource(inputs[0](epoch), context), self, rng, seen, num_kept)


@dataclass
class ResampleCursor:
    """A cursor that keeps elements at random.

    Parameters
    ----------
    source
        The elements with their classes.
    rows
        The shares and the seed.
    rng
        The random numbers.
    seen, num_kept
        The number of elements of each class so far, and of those that were kept; counted if the initial shares are
        estimated.
    """

    source: ResumableSource
    rows: ResampleRows
    rng: np.random.Generator
    seen: Index
    num_kept: Index
    num_elements: int = 0
    is_over: bool = False

    def skip(self, num_elements: int) -> int:
        """Skip elements: those before the last resume point, where the generator and the counts are as they were."""
        point = self.source.resume(num_elements)
        if point is None:
            return 0
        state, seen, num_kept = point.state
        self.rng.bit_generator.state = state_of(self.rng.bit_generator.state, state)
        self.seen, self.num_kept = np.array(seen, np.int64), np.array(num_kept, np.int64)
        self.num_elements = point.place
        return point.place

    def pull(self) -> Run:
        while True:
            try:
                noted = self.source.pull()
            except Exhausted:
                self._tell_of_other_shares()
                raise
            kept = np.flatnonzero(self.rng.random(len(noted.fact)) < self._chances(noted.fact))
            if self.rows.initial is None:
                self.num_kept += np.bincount(noted.fact[kept], minlength=len(self.num_kept))
            if len(kept):
                self.num_elements += len(kept)
                if self.source.is_due:
                    state = numbers_of(self.rng.bit_generator.state)
                    counts = tuple(self.seen.tolist()), tuple(self.num_kept.tolist())
                    self.source.note(self.num_elements, self.source.num_pulled, (state, *counts))
                run: Run = noted.run.take(kept)
                return run

    def _tell_of_other_shares(self) -> None:
        # Shares are estimated from the elements so far, so they are wrong if the first elements differ from the others.
        number, is_over, self.is_over = int(self.num_kept.sum()), self.is_over, True
        if is_over or not number:
            return
        target, shares = np.asarray(self.rows.target), self.num_kept / number
        missing = np.flatnonzero((target > 0) & (self.seen == 0)).tolist()
        if missing:
            logger.warning(
                "rejection_resample: no element is of class %s, of which target_dist has a share; look at what the "
                "function of classes returns",
                ", ".join(map(str, missing)),
            )
            return
        deviations = np.abs(shares - target)
        if np.any((deviations > _LARGE_DEVIATION) & (deviations > 5 * np.sqrt(target * (1 - target) / number))):
            initial = ", ".join(f"{share:.4g}" for share in self.seen / self.seen.sum())
            logger.warning(
                "rejection_resample: the classes of the result have the shares %s instead of %s, as the first elements "
                "are unlike the others and the shares of this dataset were estimated from the elements so far; shuffle "
                "it before, or give initial_dist=[%s]",
                ", ".join(f"{share:.1%}" for share in shares),
                ", ".join(f"{share:.1%}" for share in target),
                initial,
            )

    def _chances(self, classes: Index) -> Any:
        # Return the probability of keeping each element: 1 for the class that is rarest relative to its target share.
        target = np.asarray(self.rows.target)
        if self.rows.initial is not None:
            initial = np.asarray(self.rows.initial)
            ratio = np.divide(target, initial, out=np.zeros_like(target), where=initial > 0)
            return (ratio / ratio.max())[classes]
        come = self.seen + np.cumsum(np.eye(len(target), dtype=np.int64)[classes], axis=0)
        self.seen = come[-1] if len(come) else self.seen
        ratio = np.divide(target, come, out=np.zeros(come.shape), where=come > 0)
        most = ratio.max(axis=1)
        ratios = ratio[np.arange(len(classes)), classes]
        return np.divide(ratios, most, out=np.zeros(len(ratios)), where=most > 0)
