"""The random generators that functions refer to."""

from __future__ import annotations

import sys
import types
from typing import Any, Final

# The names with which functions create their own generators.
_MAKING_GENERATORS: Final = frozenset({"default_rng", "Generator", "RandomState", "Random", "SeedSequence"})
# Functions of PyTorch that draw from the global generator.
_OF_TORCH_NAMES: Final = """
    bernoulli multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm
"""
_OF_TORCH: Final = frozenset(_OF_TORCH_NAMES.split())


class GeneratorUses:
    """The generators that code refers to, and the names through which it may use them.

    A generator in a method or in an attribute of an object counts only if that name is used.
    """

    def __init__(self) -> None:
        # The method whose code is being examined.
        self.member: str | None = None
        self._found: list[tuple[str, str | None]] = []
        self._names: dict[str | None, set[str]] = {}
        self._of_objects: set[int] = set()

    def note_names(self, *names: str) -> None:
        """Record names that the examined code uses."""
        self._names.setdefault(self.member, set()).update(names)

    def look_at(self, value: Any, name: str) -> None:
        """Record a value if it is a generator or a method of one."""
        owner = getattr(value, "__self__", None) if isinstance(value, _METHODS) else None
        if id(value) in self._of_objects:
            return
        if owner is not None and not isinstance(owner, types.ModuleType) and _is_generator(owner):
            self._found.append((f"{name}, a method of {_kind(owner)}", self.member))
        elif _is_generator(value):
            self._found.append((f"{name}, {_kind(value)}", self.member))

    def look_in(self, value: Any) -> None:
        """Record the generators among the attributes of an object."""
        for name, attribute_value in getattr(value, "__dict__", {}).items():
            if isinstance(name, str) and _is_generator(attribute_value):
                self._of_objects.add(id(attribute_value))
                self._found.append((f"the attribute {name}, {_kind(attribute_value)}", name))

    def look_at_attributes(
        self, module: types.ModuleType, name: str, chain: tuple[str, ...], used: frozenset[str]
    ) -> None:
        """Record a generator that is used through an installed module, as in ``numpy.random.rand``.

        Parameters
        ----------
        module, name
            The module, and its name in messages.
        chain
            The attributes that are read from it.
        used
            All names in the code. If the chain ends at a module with another name, they may be read from that.
        """
        root = module.__name__.partition(".")[0]
        if root == "torch" and chain and chain[0] in _OF_TORCH:
            self._found.append((f"torch.{chain[0]}", self.member))
        if root not in ("numpy", "random"):
            return
        value: Any = module
        for attribute in chain:
            value = getattr(value, attribute, None)
            if isinstance(value, _METHODS) and _is_generator(value.__self__):
                self._found.append((".".join((name, *chain)), self.member))
        if chain and isinstance(value, types.ModuleType) and not _MAKING_GENERATORS & used:
            for attribute in sorted(used.difference(chain)):
                self.look_at_attributes(value, ".".join((name, *chain)), (attribute,), frozenset())

    def list(self) -> list[str]:
        """Return a description of each generator that is used."""
        used, members = set(self._names.get(None, ())), {name for name in self._names if name is not None}
        while reached := {name for name in members if name in used or _is_implicit(name)}:
            members -= reached
            for name in reached:
                used |= self._names[name] | {name}
        return list(dict.fromkeys(text for text, member in self._found if member is None or member in used))


def _is_implicit(name: str) -> bool:
    # Return whether a method may be called implicitly after the creation of the object.
    return name.startswith("__") and name not in (
        "__init__",
        "__new__",
        "__post_init__",
        "__getstate__",
        "__setstate__",
    )


_METHODS: Final = (types.BuiltinFunctionType, types.MethodType)


def _is_generator(value: Any) -> bool:
    kind = type(value)
    if kind.__module__ == "torch" or kind.__module__.startswith("torch."):
        return kind.__name__ == "Generator"
    return isinstance(value, _kinds())


def _kinds() -> tuple[type, ...]:
    kinds = [getattr(sys.modules.get("random"), "Random", None)]
    numpy = sys.modules.get("numpy.random")
    kinds += [getattr(numpy, name, None) for name in ("Generator", "RandomState", "BitGenerator")]
    return tuple(kind for kind in kinds if kind is not None)


def _kind(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__module__.partition('.')[0]} {kind.__name__}"
