"""Fingerprints of functions: of their code, and of everything that it reaches.

A fingerprint has three parts. The *code* covers the function and every function and class outside of installed packages
that it reaches: by names, attributes of modules, closures, defaults, partials, methods, and objects that it refers to;
with the plain values of global names and closures, and the versions of installed packages. The *state* covers the
contents of the lists, dicts and objects reached. The *contents* cover arrays, large containers and objects of installed
packages, which take time to hash.

No part depends on the process, on the hash seed, on file names or on line numbers.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import io
import marshal
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from daskdist.core.functions.code_references import digest_of_parts, references_of
from daskdist.core.functions.installed_packages import package_of
from daskdist.core.functions.random_generators import GeneratorUses
from daskdist.core.functions.reach import AS_A_WHOLE, NO_VALUE, ModuleUse, NoValue, Reference, is_own, references_from

# Immutable types whose text determines the value. Types are compared exactly, as a subclass may hold more.
_PLAIN: Final = frozenset({int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented)})
_LARGE: Final = 1000
_BUILTINS: Final = vars(builtins)
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()), threading.local, weakref.ReferenceType)
_DESCRIPTORS: Final = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
# Counts up whenever the same function gets another fingerprint than before.
_VERSION: Final = 2


@dataclass(slots=True)
class Fingerprint:
    """The hashes that identify a function.

    Parameters
    ----------
    code
        The hash of its code and of the code that it reaches.
    state
        The hash of the contents of the objects that it reaches.
    changes_state
        Whether some of the code may change those objects, so that their state may differ after each call.
    generators
        A description of each random generator that it uses and that outlives a call.
    """

    code: str
    state: str
    changes_state: bool
    generators: Sequence[str]
    _unread: list[Any] = field(repr=False)
    _contents: str | None = None

    @property
    def contents(self) -> str:
        """The hash of the arrays and other large objects that it reaches, computed on first use."""
        if self._contents is None:
            try:
                walk = _Walk(is_deep=True)
                for value in self._unread:
                    walk.visit(value)
                self._contents = walk.finish()
            except Exception:
                self._contents = " ".join(map(_unique, self._unread))
            self._unread = []
        return self._contents

    def is_outdated_by(self, other: Fingerprint) -> bool:
        """Return whether a later fingerprint of the same function shows that it was changed."""
        return self.code != other.code or (not other.changes_state and self.state != other.state)


def fingerprint_of(function: Callable[..., Any]) -> Fingerprint:
    """Return the current fingerprint of a function; it changes if a helper is redefined.

    It takes some 10 microseconds for each function reached; the contents of arrays are not read.
    """
    walk = _Walk()
    try:
        walk.visit(function)
    except Exception:
        # An object that it reaches cannot be inspected: the function equals only itself.
        return Fingerprint(_unique(function), "", False, [], [])
    state = digest_of_parts(walk.state).hex()
    return Fingerprint(walk.finish(), state, walk.changes_state, walk.generators.list(), walk.unread)


class _Walk:
    """A walk over everything that a function reaches.

    Parameters
    ----------
    is_deep
        Whether arrays and large objects are read too, and everything counts as code.
    """

    def __init__(self, is_deep: bool = False) -> None:
        self.is_deep = is_deep
        self.code: list[bytes] = []
        self.state: list[bytes] = self.code if is_deep else []
        self.sink = self.code
        # The name of the variable being visited, for messages, and all names in the code of the function.
        self.name = "it"
        self.used: frozenset[str] = frozenset()
        self.unread: list[Any] = []
        self.changes_state = False
        self.generators = GeneratorUses()
        # Functions, classes and modules by identity; kept alive so that no identity is reused.
        self.seen: dict[int, tuple[int, Any]] = {}
        # The containers and objects that are being visited.
        self.open: dict[int, int] = {}
        # Plain values of variables, which count only if no function that is reached assigns them.
        self.variables: list[tuple[int, int, str]] = []
        self.assigned: set[tuple[int, str]] = set()

    def finish(self) -> str:
        """Return the hash of the code."""
        for place, namespace, name in self.variables:
            if (namespace, name) in self.assigned:
                self.code[place] = b"assigned"
        return digest_of_parts([str(_VERSION).encode(), *self.code]).hex()

    def emit(self, *words: object) -> None:
        self.sink.append(" ".join(map(str, words)).encode("utf-8", "surrogatepass"))

    def visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.emit(kind.__name__, repr(value))
        elif kind is types.FunctionType:
            self._as_code(value, self._function)
        elif isinstance(value, type):
            self._as_code(value, self._class)
        elif kind is ModuleUse:
            self._module_use(value)
        elif isinstance(value, (list, tuple, dict, set, frozenset, types.MappingProxyType)) and (
            kind.__module__ == "builtins"
        ):
            self._container(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, (np.generic, np.dtype)):
            self.emit(kind.__name__, value.dtype.str if isinstance(value, np.generic) else "", repr(value))
        else:
            self._callable_or_object(value)

    def _callable_or_object(self, value: Any) -> None:
        kind = type(value)
        self.generators.look_at(value, self.name)
        if isinstance(value, types.ModuleType):
            self._module_use(ModuleUse(value, AS_A_WHOLE))
        elif kind is types.BuiltinFunctionType:
            self._builtin(value)
        elif kind is types.MethodType:
            name = getattr(value, "__name__", "")
            self.emit("method", name)
            self.generators.note_names(name)
            self._references(value)
        elif kind in (functools.partial, property) or isinstance(value, (staticmethod, classmethod)):
            self.emit(kind.__name__)
            self._references(value)
        elif kind is types.CellType or kind is NoValue:
            self.emit(kind.__name__)
        elif isinstance(value, _DESCRIPTORS):
            owner = getattr(value, "__objclass__", None)
            self.emit(kind.__name__, getattr(owner, "__name__", ""), value.__name__)
        elif kind is np.ufunc and any(getattr(module, value.__name__, None) is value for module in _ufunc_modules()):
            self.emit("ufunc", value.__name__, package_of("numpy"))
        elif isinstance(value, _LOCKS):
            # Results do not depend on their contents.
            self.emit(kind.__name__)
        else:
            self._object(value)

    # --- code ---

    def _as_code(self, value: Any, visit: Callable[[Any], None]) -> None:
        known = self.seen.get(id(value))
        if known is not None:
            self.emit("seen", known[0])
            return
        self.seen[id(value)] = len(self.seen), value
        if self.sink is not self.code:
            self.emit("code")
        before, self.sink = self.sink, self.code
        try:
            visit(value)
        finally:
            self.sink = before

    def _references(self, value: Any) -> None:
        before = self.sink
        num_attributes = 0
        for reference in references_from(value, may_import=True):
            how, name = reference.how, reference.name
            if how == "attribute":
                if name == "__wrapped__":
                    # The wrapper calls it by another reference.
                    continue
                # Attributes of functions and keywords of partials may be added, and change as counters do.
                num_attributes += 1
                self.sink = self.state
            self.sink.append(f"{how} {name}".encode("utf-8", "surrogatepass"))
            match how:
                case "variable" | "name" | "default":
                    self.name = "a default" if how == "default" else name
                    if how == "name" and type(reference.value) in _PLAIN:
                        self.variables.append((len(self.code), id(reference.holder), name))
                    # Copies with fixed values have builtins among their names.
                    is_builtin = how == "name" and reference.value is _BUILTINS.get(name, NO_VALUE)
                    self.visit(NO_VALUE if is_builtin else reference.target)
                case "import":
                    self._import(reference)
                case "member":
                    self._member(reference)
                case "attribute" | "part":
                    self.visit(reference.target)
            self.sink = before
        # So that what follows is not taken for a part of it.
        self.emit("end")
        if num_attributes:
            self.state.append(str(num_attributes).encode())

    def _member(self, reference: Reference) -> None:
        if isinstance(reference.value, (types.FunctionType, staticmethod, classmethod, property)):
            member, self.generators.member = self.generators.member, reference.name
            self.visit(reference.value)
            self.generators.member = member
        else:
            # Classes may hold counters, too.
            self.sink = self.state
            self.visit(reference.value)

    def _function(self, function: types.FunctionType) -> None:
        variables = function.__globals__
        used, self.used = self.used, frozenset()
        if is_own(function):
            references = references_of(function.__code__)
            self.changes_state |= references.may_change_objects
            self.generators.note_names(*references.names)
            self.used = references.names
            self.emit("function", references.digest.hex())
            self.assigned.update((id(variables), name) for name in references.assigned_globals)
        else:
            module = variables.get("__name__")
            self.emit("function", package_of(module), module, function.__qualname__)
        self._references(function)
        self.used = used

    def _import(self, reference: Reference) -> None:
        package = package_of(reference.name)
        if package is None:
            self.visit(reference.target)
            return
        # Whether it is imported already does not count.
        self.emit("package", package)
        if reference.value is not NO_VALUE:
            self._look_for_generators(reference.target)

    def _module_use(self, use: ModuleUse) -> None:
        name, chains = use.module.__name__, sorted(use.chains)
        package = package_of(name)
        if package is not None:
            self.emit("package", package, name, *map(".".join, chains))
            self._look_for_generators(use)
        elif () in use.chains:
            self._as_code(use.module, self._references)
        else:
            self._references(use)

    def _look_for_generators(self, use: ModuleUse) -> None:
        for chain in sorted(use.chains):
            self.generators.look_at_attributes(use.module, use.module.__name__, chain, self.used)

    def _class(self, kind: type) -> None:
        package = package_of(kind.__module__)
        self.emit("class", *([kind.__name__] if package is None else [package, kind.__module__, kind.__qualname__]))
        self._references(kind)

    def _builtin(self, function: types.BuiltinFunctionType) -> None:
        owner = function.__self__
        self.emit("builtin", function.__name__)
        if owner is None or isinstance(owner, types.ModuleType):
            module = function.__module__ or ""
            self.emit(module, package_of(module))
        elif any(owner is generator for generator in _global_generators()):
            # Leave out the state of global generators, which differs after each call.
            self.emit("global generator")
        else:
            self.visit(owner)

    # --- data ---

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self.emit("array", array.dtype.str, array.shape)
        if array.dtype.hasobject:
            self._container(array.tolist() if array.shape else [array.item()])
        elif self.is_deep:
            if type(array) is not np.ndarray:
                # A subclass, such as a masked array.
                self._object(array)
            else:
                self.sink.append(_digest_of_array(array))
        else:
            self.unread.append(array)

    def _container(self, values: Any) -> None:
        self.emit(type(values).__name__)
        if id(values) in self.open:
            self.emit("open", len(self.open) - self.open[id(values)])
            return
        before = self.sink
        if not isinstance(values, (tuple, frozenset)):
            self.sink = self.state
        self.emit(len(values))
        if len(values) > _LARGE and not self.is_deep:
            self.unread.append(values)
            self.sink = before
            return
        self.open[id(values)] = len(self.open)
        try:
            if isinstance(values, Mapping):
                self._items(list(values.keys()))
                self._items(list(values.values()))
            elif isinstance(values, (set, frozenset)):
                self._unordered(values)
            else:
                self._items(values)
        finally:
            del self.open[id(values)]
            self.sink = before

    def _items(self, values: Any) -> None:
        if len(values) > 8 and _PLAIN.issuperset(map(type, values)):
            # Version 2 has no references by identity, which differ between processes.
            self.sink.append(marshal.dumps(list(values), 2))
            return
        for value in values:
            self.visit(value)

    def _unordered(self, values: Any) -> None:
        # The order of items differs between processes.
        if _PLAIN.issuperset(map(type, values)):
            self.sink.extend(sorted(f"{type(value).__name__} {value!r}".encode() for value in values))
            return
        tokens = []
        for value in values:
            walk = _Walk(is_deep=True)
            walk.visit(value)
            tokens.append(walk.finish().encode())
        self.sink.extend(sorted(tokens))

    def _object(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self.open:
            self.emit("open", len(self.open) - self.open[id(value)])
            return
        self.emit("object")
        self.generators.look_in(value)
        self.visit(kind)
        package = package_of(kind.__module__)
        wrapped = getattr(value, "py_func", getattr(value, "__wrapped__", None)) if package is not None else None
        if callable(value) and callable(wrapped):
            # A wrapper, such as a cache or a compiler, around a function.
            self.visit(wrapped)
            return
        before = self.sink
        self.sink = self.state
        self.open[id(value)] = len(self.open)
        try:
            if self._has_own_token(value):
                self._read_later(value, lambda: self.emit(_dask_token(value)))
            elif package is None or package.startswith("python ") or _is_plainly_kept(kind):
                self._reduced(value)
            else:
                self._read_later(value, lambda: self._reduced(value))
        finally:
            del self.open[id(value)]
            self.sink = before

    def _read_later(self, value: Any, read: Callable[[], None]) -> None:
        if self.is_deep:
            read()
        else:
            self.unread.append(value)

    @staticmethod
    def _has_own_token(value: Any) -> bool:
        from dask.tokenize import normalize_object, normalize_token

        return hasattr(value, "__dask_tokenize__") or normalize_token.dispatch(type(value)) is not normalize_object

    def _reduced(self, value: Any) -> None:
        try:
            if isinstance(value, io.IOBase):
                raise TypeError("the position of a file changes as it is read")
            if any(base.__module__ == "itertools" for base in type(value).__mro__):
                raise TypeError("Python 3.12 warns about it, and 3.14 cannot do it")
            reduced = value.__reduce_ex__(4)
        except RecursionError:
            raise
        except Exception:
            self.emit(_unique(value))
            return
        if isinstance(reduced, str):
            self.emit(reduced)
            return
        function, arguments, *rest = reduced
        self.visit(function)
        self.visit(arguments)
        for part in rest:
            # The last values are iterators over items.
            self.visit(
                part if part is None or isinstance(part, (tuple, dict)) or not _is_iterator(part) else list(part)
            )


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__")


def _is_plainly_kept(kind: type) -> bool:
    # Return whether the state of its objects is their attributes, so that pickling calls no method.
    own_names = {name for class_ in kind.__mro__[:-1] for name in vars(class_)}
    return own_names.isdisjoint(("__reduce__", "__reduce_ex__", "__getstate__"))


def _digest_of_array(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.kind == "T":
        return marshal.dumps(array.tolist(), 2)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.blake2b(data, digest_size=16).digest()


def _dask_token(value: Any) -> str:
    from dask.tokenize import tokenize

    return str(tokenize(value))


# Unreadable objects by identity, each with a unique token; kept alive so that no identity is reused.
_UNREADABLE: Final[dict[int, tuple[Any, str]]] = {}


def _unique(value: Any) -> str:
    return _UNREADABLE.setdefault(id(value), (value, uuid.uuid4().hex))[1]


def _global_generators() -> list[Any]:
    modules = [sys.modules.get("random"), sys.modules.get("numpy.random")]
    generators = [getattr(modules[0], "_inst", None), getattr(getattr(modules[1], "mtrand", None), "_rand", None)]
    return [instance for instance in generators if instance is not None]


def _ufunc_modules() -> list[Any]:
    return [sys.modules[name] for name in ("numpy", "scipy.special") if name in sys.modules]
