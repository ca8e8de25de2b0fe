"""AUTO: FILE where that is possible, else DATA, with the reason."""

from __future__ import annotations

from dataclasses import replace

from daskdist.sharding import AutoShardPolicy, Decision, Outlook
from daskdist.sharding.file import try_to

_MEANT = "use AutoShardPolicy.DATA to say that this is meant"


def decide(outlook: Outlook) -> Decision:
    decision = try_to(outlook)
    if decision.policy is AutoShardPolicy.FILE or not decision.is_costly:
        return replace(decision, advice="")
    return replace(decision, advice=f"{decision.advice}, or {_MEANT}" if decision.advice else f"U{_MEANT[1:]}")
