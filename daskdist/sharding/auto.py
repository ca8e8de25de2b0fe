"""AUTO: FILE if that is possible and drops at most 1 % of the rows, else DATA, with the reason."""

from __future__ import annotations

from dataclasses import replace

from daskdist.sharding import AutoShardPolicy, Decision, ShardingInput
from daskdist.sharding.file import losses, try_to

_MEANT = "use AutoShardPolicy.DATA to confirm that this is intended"


def decide(sharding_input: ShardingInput) -> Decision:
    """Shard by file if there are enough files and few rows are lost, else by rows."""
    decision = try_to(sharding_input)
    if decision.policy is AutoShardPolicy.FILE:
        losses_by_file = list(losses(sharding_input, decision.by_split))
        reasons = [loss.reason for loss in losses_by_file]
        if all(loss.is_small for loss in losses_by_file):
            return replace(decision, reason="; ".join([decision.reason, *reasons]))
        reason = "; ".join(loss.reason for loss in losses_by_file if not loss.is_small)
        advice = ", ".join(loss.advice for loss in losses_by_file if not loss.is_small)
        advice = f"{advice[0].upper()}{advice[1:]}"
        decision = Decision(AutoShardPolicy.DATA, f"by file, {reason}", is_costly=True, advice=advice)
    elif sharding_input.cuts and _is_file(_without_cuts(sharding_input)):
        decision = _changed(sharding_input, decision)
    if decision.policy is AutoShardPolicy.FILE:
        return replace(decision, advice="")
    # One pipeline reads for all workers, which those who expect a share of the files for each should know.
    advice = f"{decision.advice}, or {_MEANT}" if decision.advice else f"U{_MEANT[1:]}"
    return replace(decision, is_costly=True, advice=advice)


def _without_cuts(sharding_input: ShardingInput) -> ShardingInput:
    return replace(
        sharding_input,
        obstacles=tuple(name for name in sharding_input.obstacles if name not in sharding_input.cuts),
        cuts=(),
    )


def _is_file(sharding_input: ShardingInput) -> bool:
    decision = try_to(sharding_input)
    return decision.policy is AutoShardPolicy.FILE and all(
        loss.is_small for loss in losses(sharding_input, decision.by_split)
    )


def _changed(sharding_input: ShardingInput, decision: Decision) -> Decision:
    # Such an operation alone makes the steps differ from those of a pass without it.
    names = ", ".join(dict.fromkeys(sharding_input.cuts))
    reason = (
        f"{decision.reason}. Without {names} it would be FILE: the steps here differ from those of a pass under FILE, "
        f"so {names} does not resume such a pass"
    )
    advice = (
        "To resume a pass, use state_dict() and load_state_dict() of the dataset's iterator, or give both passes "
        f"AutoShardPolicy.DATA. {decision.advice}"
    )
    return replace(decision, reason=reason, advice=advice)
