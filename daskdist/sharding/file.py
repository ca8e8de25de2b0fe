"""FILE: each worker reads its own files, and nothing is sent between workers.

File i goes to worker i mod n. Where there are fewer files than workers, the splits below the files are dealt
in the same way.
"""

from __future__ import annotations

from daskdist.errors import ShardingError
from daskdist.sharding import AutoShardPolicy, Decision, Outlook

_ALTERNATIVES = "Use AutoShardPolicy.DATA, which shards any dataset, or OFF"


def decide(outlook: Outlook) -> Decision:
    workers = outlook.num_pipelines
    by_split = False
    for source in outlook.sources:
        if source.num_files is None:
            raise ShardingError(f"FILE: {source.name} reads no files. {_ALTERNATIVES}")
    if outlook.obstacles:
        names = ", ".join(dict.fromkeys(outlook.obstacles))
        raise ShardingError(f"FILE: {names} would mean something else on each worker's files. {_ALTERNATIVES}")
    for source in outlook.sources:
        num_files = source.num_files or 0
        if num_files >= workers:
            continue
        if not source.is_splittable:
            raise ShardingError(
                f"FILE: {source.name} has {num_files} files for {workers} workers, and its files cannot be split. "
                f"Write at least {workers} files, or use fewer workers. {_ALTERNATIVES}"
            )
        num_splits = source.num_splits()
        if num_splits < workers:
            raise ShardingError(
                f"FILE: {source.name} has {num_files} files of {num_splits} splits in all for {workers} workers. "
                f"Write more files or smaller row groups, or use fewer workers. {_ALTERNATIVES}"
            )
        by_split = True
    files = ", ".join(f"{source.num_files} files" for source in outlook.sources)
    if by_split:
        return Decision(AutoShardPolicy.FILE, f"{files} for {workers} workers, so sharded by splits within files", True)
    return Decision(AutoShardPolicy.FILE, f"{files} for {workers} workers")
