"""``with_options``: settings that travel with a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from daskdist.core.node import Facts, Node, Transformation
from daskdist.core.primitive import Primitive
from daskdist.errors import ArgumentError
from daskdist.sharding import AutoShardPolicy, policy_of


class _Options:
    def __setattr__(self, name: str, value: object) -> None:
        if name not in {each.name for each in fields(self)}:  # type: ignore[arg-type]
            known = ", ".join(each.name for each in fields(self))  # type: ignore[arg-type]
            raise AttributeError(f"Options has no {name!r}; there are {known}")
        object.__setattr__(self, name, policy_of(value) if name == "auto_shard_policy" and value is not None else value)


@dataclass
class Options(_Options):
    """Settings of a pipeline; None leaves one as it was.

    Parameters
    ----------
    auto_shard_policy
        How it is sharded over the workers of a cluster: an `AutoShardPolicy` or its name. AUTO if never set.

    >>> Options(auto_shard_policy="data").auto_shard_policy
    <AutoShardPolicy.DATA: 2>
    """

    auto_shard_policy: AutoShardPolicy | None = None

    @property
    def experimental_distribute(self) -> Options:
        """These options: TensorFlow keeps the sharding policy one level down."""
        return self

    def copy(self) -> Options:
        return replace(self)


@dataclass(frozen=True, eq=False)
class WithOptions(Transformation):
    """The same elements."""

    options: Options = field(default_factory=Options)

    name = "with_options"
    facts = Facts(keeps_rows=True, keeps_order=True, keeps_spec=True, per_worker=True)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Options):
            raise ArgumentError(f"with_options: expected Options, got {type(self.options).__name__}")

    def __str__(self) -> str:
        given = ((each.name, getattr(self.options, each.name)) for each in fields(self.options))
        return f"with_options({', '.join(f'{name}={value.name}' for name, value in given if value is not None)})"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return inputs[0]


def merged_options(node: Node) -> Options:
    """The options in force at a node: a field set further down the pipeline wins."""
    merged = Options()
    for source in node.inputs:
        merged = merged_options(source)
    if isinstance(node, WithOptions):
        for each in fields(node.options):
            value = getattr(node.options, each.name)
            if value is not None:
                setattr(merged, each.name, value)
    return merged
