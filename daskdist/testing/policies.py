"""Laws of sharding policies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from daskdist.errors import ShardingError
from daskdist.sharding import AutoShardPolicy, Decision, FileSource, Pairing, ShardingInput
from daskdist.testing.equality import check


class PolicyLaws:
    """Laws of a policy; a subclass defines `decide`, which is tested on every kind of pipeline."""

    def decide(self, sharding_input: ShardingInput) -> Decision:
        """Return the decision of the policy."""
        raise NotImplementedError

    def sharding_inputs(self) -> Iterator[ShardingInput]:
        """Yield the inputs to test the policy on."""
        for num_pipelines in (2, 3, 8):
            for number in (1, 2):
                for sources in itertools.combinations(_sources(), number):
                    for obstacles in ((), ("take",), ("take", "skip", "take")):
                        yield ShardingInput(num_pipelines, sources, obstacles)
                    for pairing in _pairings():
                        yield ShardingInput(num_pipelines, sources, (), (pairing,))
            for num_hints in (1, 2):
                yield ShardingInput(num_pipelines, _sources()[:1], (), num_hints=num_hints)

    def _outcomes(self) -> Iterator[tuple[ShardingInput, Decision | ShardingError]]:
        for sharding_input in self.sharding_inputs():
            try:
                yield sharding_input, self.decide(sharding_input)
            except ShardingError as error:
                yield sharding_input, error

    def test_is_pure(self) -> None:
        for (sharding_input, first), (_, again) in zip(self._outcomes(), self._outcomes(), strict=True):
            same = str(first) == str(again) if isinstance(first, Exception) else first == again
            check(same, f"{sharding_input}: first {first}, then {again}")

    def test_decisions_can_be_carried_out(self) -> None:
        for sharding_input, outcome in self._outcomes():
            if isinstance(outcome, Exception):
                continue
            check(isinstance(outcome, Decision), f"{sharding_input}: {outcome!r} is not a Decision")
            check(outcome.policy is not AutoShardPolicy.AUTO, f"{sharding_input}: AUTO is no decision")
            check(
                outcome.policy is AutoShardPolicy.FILE or not outcome.by_split,
                f"{sharding_input}: only FILE shards by split, not {outcome.policy.name}",
            )

    def test_decisions_have_a_reason(self) -> None:
        for sharding_input, outcome in self._outcomes():
            text = str(outcome) if isinstance(outcome, Exception) else outcome.reason
            check(text and "\n" not in text, f"{sharding_input}: {text!r} is not a line")
            if isinstance(outcome, Decision):
                check(not text.endswith("."), f"{sharding_input}: {text!r} is a sentence, and should be a clause")

    def test_errors_give_advice(self) -> None:
        for sharding_input, outcome in self._outcomes():
            if isinstance(outcome, Exception):
                check(
                    "Use " in str(outcome) or "use " in str(outcome),
                    f"{sharding_input}: no way out in {str(outcome)!r}",
                )

    def test_file_is_chosen_only_if_each_worker_has_files(self) -> None:
        for sharding_input, outcome in self._outcomes():
            if isinstance(outcome, Exception) or outcome.policy is not AutoShardPolicy.FILE:
                continue
            check(not sharding_input.obstacles, f"{sharding_input}: FILE in spite of {sharding_input.obstacles}")
            for pairing in sharding_input.pairings:
                why = pairing.mismatch(outcome.by_split)
                check(why is None, f"{sharding_input}: FILE although {pairing.name} would pair other rows: {why}")
            for source in sharding_input.sources:
                parts = source.num_splits() if outcome.by_split and source.is_splittable else source.num_files
                check(
                    parts is not None and parts >= sharding_input.num_pipelines,
                    f"{sharding_input}: FILE gives {parts} parts of {source.name} to "
                    f"{sharding_input.num_pipelines} workers",
                )

    def test_splits_are_counted_only_if_files_are_few(self) -> None:
        def refuse() -> int:
            raise AssertionError("splits were counted although there is a file for every worker")

        for num_files in (8, 9):
            source = FileSource("read_many", num_files, True, refuse)
            try:
                self.decide(ShardingInput(8, (source,), ()))
            except ShardingError:
                continue


def _pairings() -> list[Pairing]:
    return [
        Pairing("zip", lambda by_split: None),
        Pairing("zip", lambda by_split: "one has 3 rows and the other 4"),
        Pairing("zip", lambda by_split: "their splits differ" if by_split else None),
    ]


def _sources() -> tuple[FileSource, ...]:
    return (
        FileSource("range", None, False, lambda: 0),
        FileSource("read_few_splittable", 1, True, lambda: 12),
        FileSource("read_few_short", 1, True, lambda: 1),
        FileSource("read_few_whole", 2, False, lambda: 2),
        FileSource("read_many", 9, True, lambda: 90),
        FileSource("read_many_whole", 9, False, lambda: 9),
    )
