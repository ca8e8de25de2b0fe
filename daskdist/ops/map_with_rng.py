"""``map`` with ``rng=``: a function of each element and its own random generator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daskdist.cached_property import cached_property
from daskdist.core.arguments import whole_number
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import CountingNode, Facts, SpecFromCalls
from daskdist.core.primitive import Compute, Primitive
from daskdist.core.randomness.seed import generator_of
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError
from daskdist.ops.element_random import PAIR, WORDS, paired
from daskdist.ops.map import MapRows, spec_after


class SeededFunction(UserFunction):
    """A user's function of an element and a generator, called with the words that seed the generator."""

    def of_items(self) -> Callable[..., Any]:
        """Return a function of a pair of an element and its words."""
        return self._of_pair

    def __call__(self, element: Any, where: Callable[[], str]) -> Any:
        """Call the function with a pair of an element and its words; ``where()`` names the element in messages."""
        try:
            return self._of_pair(*element)
        except Exception as error:
            raise self.failed(error, where()) from error

    def _of_pair(self, element: Any, words: Any) -> Any:
        items = element if type(element) is tuple else (element,)
        if self._takes_by_name:
            return self.function(*items, rng=generator_of(words))
        return self.function(*items, generator_of(words))

    @cached_property
    def _takes_by_name(self) -> bool:
        try:
            rng = inspect.signature(self.function).parameters.get("rng")
        except (TypeError, ValueError):
            return False
        return rng is not None and rng.kind is rng.KEYWORD_ONLY

    def advice(self, error: Exception) -> str:
        """Return the end of a message about an error, if it is a wrong call: what to write instead."""
        if not (isinstance(error, TypeError) and "positional argument" in str(error) and "given" in str(error)):
            return ""
        return (
            ". With rng=, it is called with a random generator after the items of the element: give it that parameter"
        )


@dataclass(frozen=True, eq=False)
class MapWithRng(CountingNode, SpecFromCalls):
    """The result of a function for each element and its own random generator.

    The seed, the pass and the number of the element determine a generator.

    Parameters
    ----------
    function
        Returns an element for an element and a `numpy.random.Generator`.
    rng
        The seed.
    in_order
        Whether elements keep the order of the input; otherwise blocks come as they finish.
    """

    function: SeededFunction
    rng: int
    in_order: bool = True

    name = "map_with_rng"
    # Not `per_worker`: on a worker's share of the files, the global numbers of elements are unknown.
    facts = Facts(keeps_count=True)
    may_have_ragged_rows = False

    def __post_init__(self) -> None:
        whole_number("map", "rng", self.rng, at_most=None)

    def learn_spec(self) -> ElementSpec:
        return spec_after(self.function, ElementSpec.nest(PAIR, [self.source.spec, WORDS]))

    @property
    def note(self) -> str:
        return "row by row: each has its own generator"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        pairs = paired(inputs[0], "draw", self.rng, self.passes)
        rows = MapRows(self.function)
        return Compute(
            pairs, rows, self.name, factor=1, in_order=self.in_order, costly=self.function, may_be_large=True
        )


def check_by_row(*, vectorized: bool | None, device: bool) -> None:
    """Check that ``map`` has no option besides ``rng`` that conflicts with one call for each element, in place.

    Raises
    ------
    ArgumentError
        Another option is given.
    """
    for argument, value in (("vectorized", vectorized), ("device", device)):
        if value:
            raise ArgumentError(
                f"map: {argument}=True conflicts with rng, which gives each element its own generator. "
                f"Leave {argument} out"
            )
