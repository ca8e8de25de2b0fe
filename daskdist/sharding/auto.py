"""AUTO: FILE where that is possible and drops at most 1 % of the rows, else DATA, with the reason."""

from __future__ import annotations

from dataclasses import replace

from daskdist.sharding import AutoShardPolicy, Decision, Outlook
from daskdist.sharding.file import losses, try_to

_MEANT = "use AutoShardPolicy.DATA to say that this is meant"


def decide(outlook: Outlook) -> Decision:
    decision = try_to(outlook)
    if decision.policy is AutoShardPolicy.FILE:
        found = list(losses(outlook, decision.by_split))
        reasons = [loss.reason for loss in found]
        if all(loss.is_small for loss in found):
            return replace(decision, reason="; ".join([decision.reason, *reasons]))
        reason = "; ".join(loss.reason for loss in found if not loss.is_small)
        advice = ", ".join(loss.advice for loss in found if not loss.is_small)
        advice = f"{advice[0].upper()}{advice[1:]}"
        decision = Decision(AutoShardPolicy.DATA, f"by file, {reason}", is_costly=True, advice=advice)
    elif outlook.cuts and _is_file(_without_cuts(outlook)):
        decision = _changed(outlook, decision)
    if decision.policy is AutoShardPolicy.FILE or not decision.is_costly:
        return replace(decision, advice="")
    return replace(decision, advice=f"{decision.advice}, or {_MEANT}" if decision.advice else f"U{_MEANT[1:]}")


def _without_cuts(outlook: Outlook) -> Outlook:
    return replace(outlook, obstacles=tuple(name for name in outlook.obstacles if name not in outlook.cuts), cuts=())


def _is_file(outlook: Outlook) -> bool:
    decision = try_to(outlook)
    return decision.policy is AutoShardPolicy.FILE and all(each.is_small for each in losses(outlook, decision.by_split))


def _changed(outlook: Outlook, decision: Decision) -> Decision:
    # With such an operation alone, steps are others than those of a pass without it.
    names = ", ".join(dict.fromkeys(outlook.cuts))
    reason = (
        f"{decision.reason}. Without {names} it would be FILE: the steps here are not those that a pass by FILE has, "
        f"so {names} does not resume such a pass"
    )
    advice = (
        "To resume a pass, use state_dict() and load_state_dict() of the dataset's iterator, or give both passes "
        f"AutoShardPolicy.DATA. {decision.advice}"
    )
    return replace(decision, reason=reason, advice=advice)
