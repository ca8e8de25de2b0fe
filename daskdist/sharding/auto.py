"""AUTO: FILE where that is possible, else DATA, with the reason."""

from __future__ import annotations

from daskdist.errors import ShardingError
from daskdist.sharding import AutoShardPolicy, Decision, Outlook
from daskdist.sharding.file import decide as decide_file


def decide(outlook: Outlook) -> Decision:
    try:
        return decide_file(outlook)
    except ShardingError as error:
        reason = str(error).removeprefix("FILE: ").partition(". ")[0]
        reads_files = any(source.num_files is not None for source in outlook.sources)
        return Decision(AutoShardPolicy.DATA, reason, is_costly=reads_files)
