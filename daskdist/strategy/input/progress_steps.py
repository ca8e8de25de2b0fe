"""`ProgressSteps`: a pass over a distributed dataset that shows its progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from daskdist.core.node import upstream
from daskdist.display.progress_bar import figures_in_words, progress_bar
from daskdist.execute.stream.local_iterator import times_of
from daskdist.long_work import ProgressDisplay
from daskdist.ops.split_batches import SplitBatches
from daskdist.strategy.input.iterator import DistributedIterator
from daskdist.strategy.input.pipeline import Pipeline
from daskdist.strategy.values.async_value import peek


class ProgressSteps(Iterator[Any]):
    """The steps of one pass, with progress shown on standard error; made by `DistributedDataset.progress`."""

    def __init__(
        self, steps: DistributedIterator, pipelines: Sequence[Pipeline], total: int | None, title: str
    ) -> None:
        self._steps = steps
        self._display: ProgressDisplay | None = progress_bar(total, title)
        self._num_steps = 0
        self._figures: dict[str, Any] = {}
        self._rows = _rows_of_step(pipelines)

    def report(self, **figures: Any) -> None:
        """Show values beside the progress, such as ``report(loss=loss)``.

        Values that have not arrived yet are not waited for: the previous ones stay.
        """
        for name, value in figures.items():
            known_value = peek(value)
            if known_value is not None:
                self._figures[name] = known_value[0]

    def stats(self) -> dict[str, Any]:
        """Return statistics of the pass so far, see `DistributedIterator.stats`."""
        return self._steps.stats()

    def close(self) -> None:
        """Stop reading ahead; the progress stays as it is."""
        self._steps.close()
        self._end()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._steps!r}>"

    def __next__(self) -> Any:
        try:
            step = next(self._steps)
        except BaseException:
            self._end()
            raise
        if self._display is not None:
            # The previous step is over now.
            self._show(self._display)
        self._num_steps += 1
        return step

    def _show(self, display: ProgressDisplay) -> None:
        times = times_of(self._steps)
        words = [f"{times.rate(self._num_steps):,.1f} steps/s"]
        if self._rows is not None:
            words.append(f"{times.rate(self._num_steps * self._rows):,.0f} rows/s")
        words.append(f"{times.waiting_share:.0%} waiting")
        display.update(self._num_steps, "  ".join([*words, figures_in_words(self._figures)]).strip())

    def _end(self) -> None:
        if self._display is not None:
            self._show(self._display)
            self._display.close()
            self._display = None


def _rows_of_step(pipelines: Sequence[Pipeline]) -> float | None:
    # The rows of a full step, if known before reading; the last step may have fewer.
    rows = 0.0
    for pipeline in pipelines:
        node = pipeline.node
        if not isinstance(node, SplitBatches):
            return None
        size = upstream(node.source).group_size
        if size is None:
            return None
        rows += size * len(pipeline.consumers) / node.num_pieces
    return rows
