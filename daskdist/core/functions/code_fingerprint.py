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
import importlib
import importlib.util
import inspect
import io
import marshal
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from daskdist.core.functions.code_references import Chain, Import, references_of
from daskdist.core.functions.installed_packages import package_of
from daskdist.core.functions.random_generators import GeneratorUses

# The names with which functions create their own generators.
_MAKING_GENERATORS: Final = frozenset({"default_rng", "Generator", "RandomState", "Random", "SeedSequence"})
# Immutable types whose text determines the value. Types are compared exactly, as a subclass may hold more.
_PLAIN: Final = frozenset({int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented)})
_LARGE: Final = 1000
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()), threading.local, weakref.ReferenceType)
_DESCRIPTORS: Final = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
# Attributes of a class that Python and libraries add.
_NOT_OF_CLASS_NAMES: Final = """
    __dict__ __weakref__ __module__ __qualname__ __doc__ __annotations__ __annotate__ __annotate_func__ __slotnames__
    __abstractmethods__ _abc_impl __static_attributes__ __firstlineno__ __parameters__ __orig_bases__
    __annotations_cache__ __dataclass_params__
"""
_NOT_OF_CLASS: Final = frozenset(_NOT_OF_CLASS_NAMES.split())


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
    return Fingerprint(walk.finish(), _hash(walk.state), walk.changes_state, walk.generators.list(), walk.unread)


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
        # The name of the variable being visited, for messages.
        self.name = "it"
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
        return _hash(self.code)

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
        elif isinstance(value, types.ModuleType):
            self._as_code(value, self._module)
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
        if kind is functools.partial:
            self.emit("partial")
            for part in (value.func, value.args, value.keywords):
                self.visit(part)
        elif kind is types.MethodType:
            self._method(value)
        elif kind is types.BuiltinFunctionType:
            self._builtin(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.emit(kind.__name__)
            self.visit(value.__func__)
        elif kind is property:
            self.emit("property")
            for part in (value.fget, value.fset, value.fdel):
                self.visit(part)
        elif kind is types.CellType:
            self.emit("cell")
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

    def _function(self, function: types.FunctionType) -> None:
        variables = function.__globals__
        module = variables.get("__name__")
        package = package_of(module)
        cells = function.__closure__ or ()
        if package is not None:
            self.emit("function", package, module, function.__qualname__)
            for cell in cells:
                self._cell(cell)
            return
        code = function.__code__
        references = references_of(code)
        self.changes_state |= references.may_change_objects
        self.generators.note_names(*references.names)
        self.emit("function", references.digest.hex())
        self.name = "a default"
        self.visit(function.__defaults__)
        self.visit(function.__kwdefaults__)
        for name, cell in zip(code.co_freevars, cells, strict=True):
            if name in references.assigned_free:
                self.emit("assigned", name)
            else:
                self.emit("free", name)
                self.name = name
                self._cell(cell, references.free_names[name])
        for name in references.assigned_globals:
            self.assigned.add((id(variables), name))
        for name, chains in references.global_names.items():
            if name in variables:
                self._variable(variables, name, chains)
            else:
                self.emit("builtin" if hasattr(builtins, name) else "missing", name)
        for statement in references.imports:
            self._import(statement, variables)
        for value in references.functions:
            self.visit(value)
        attributes = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
        if attributes:
            before, self.sink = self.sink, self.state
            self.visit(attributes)
            self.sink = before

    def _cell(self, cell: types.CellType, chains: Iterable[Chain] = ()) -> None:
        try:
            value = cell.cell_contents
        except ValueError:
            self.emit("empty")
            return
        if isinstance(value, types.ModuleType) and chains:
            self._attributes(value, chains)
        else:
            self.visit(value)

    def _variable(self, variables: dict[str, Any], name: str, chains: Iterable[Chain]) -> None:
        value = variables[name]
        self.emit("variable", name)
        self.name = name
        if isinstance(value, types.ModuleType):
            self._attributes(value, chains)
            return
        if type(value) in _PLAIN:
            self.variables.append((len(self.code), id(variables), name))
        self.visit(value)

    def _attributes(self, module: types.ModuleType, chains: Iterable[Chain]) -> None:
        package = package_of(module.__name__)
        if package is not None:
            self.emit("package", package, module.__name__, *map(".".join, sorted(chains)))
            for chain in sorted(chains):
                self.generators.look_at_attributes(module, module.__name__, chain)
            return
        following: dict[str, set[Chain]] = {}
        for chain in chains:
            if chain:
                following.setdefault(chain[0], set()).add(chain[1:])
            else:
                self.visit(module)
        for name, rest in sorted(following.items()):
            if hasattr(module, name) and name not in vars(module):
                # The module has a `__getattr__`.
                self.emit("attribute", name)
                self.visit(getattr(module, name))
            elif name in vars(module):
                self._variable(vars(module), name, rest)
            else:
                self.emit("missing", name)

    def _import(self, statement: Import, variables: dict[str, Any]) -> None:
        self.emit("import", statement.level, statement.module)
        name = statement.module
        if statement.level:
            package = variables.get("__package__") or str(variables.get("__name__", "")).rpartition(".")[0]
            try:
                name = importlib.util.resolve_name("." * statement.level + name, package)
            except ImportError:
                return
        installed = package_of(name)
        if installed is not None:
            self.emit("package", installed)
            self._look_for_generators(name, statement)
            return
        try:
            module = importlib.import_module(name)
            for attribute in statement.names:
                if not hasattr(module, attribute):
                    importlib.import_module(f"{name}.{attribute}")
        except Exception:
            # The call of the function will raise the error.
            self.emit("missing")
            return
        if statement.names:
            self._used(module, frozenset(statement.names), statement.used)
        else:
            self._used(sys.modules[name.partition(".")[0]], statement.used, statement.used)
            self._used(module, statement.used, statement.used)

    def _look_for_generators(self, name: str, statement: Import) -> None:
        module = sys.modules.get(name)
        if module is None:
            return
        if statement.names:
            chains: Iterable[Chain] = [(imported,) for imported in statement.names]
            chains = [*chains, *[(first, other) for first in statement.names for other in statement.used]]
        else:
            chains = [(attribute,) for attribute in statement.used]
            if "random" in statement.used and not _MAKING_GENERATORS & statement.used:
                chains += [("random", attribute) for attribute in statement.used]
        for chain in sorted(chains):
            self.generators.look_at_attributes(module, name, chain)

    def _used(self, module: types.ModuleType, names: frozenset[str], used: frozenset[str]) -> None:
        # Which attributes follow which name is unknown: take all whose name is used.
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if not isinstance(value, types.ModuleType) or package_of(value.__name__) is not None:
                self._variable(vars(module), name, [()])
            elif id(value) not in self.seen:
                self.seen[id(value)] = len(self.seen), value
                self.emit("module", name)
                self._used(value, used, used)

    def _module(self, module: types.ModuleType) -> None:
        package = package_of(module.__name__)
        if package is not None:
            self.emit("package", package, module.__name__)
            return
        # The module is passed on as a whole, so any part of it may be used.
        for name in sorted(vars(module)):
            if not name.startswith("__"):
                self._variable(vars(module), name, [()])

    def _class(self, kind: type) -> None:
        package = package_of(kind.__module__)
        if package is not None:
            self.emit("class", package, kind.__module__, kind.__qualname__)
            return
        self.emit("class", kind.__name__)
        if type(kind) is not type:
            self.visit(type(kind))
        for base in kind.__bases__:
            self.visit(base)
        for name, value in sorted(vars(kind).items()):
            if name in _NOT_OF_CLASS or isinstance(value, types.MemberDescriptorType):
                continue
            self.emit("member", name)
            if isinstance(value, (types.FunctionType, staticmethod, classmethod, property)):
                member, self.generators.member = self.generators.member, name
                self.visit(value)
                self.generators.member = member
            else:
                # Classes may hold counters too.
                before, self.sink = self.sink, self.state
                self.visit(value)
                self.sink = before

    def _method(self, method: types.MethodType) -> None:
        owner = method.__self__
        self.emit("method", method.__name__)
        self.generators.note_names(method.__name__)
        self.visit(owner)
        of_class = inspect.getattr_static(owner, method.__name__, None)
        code = getattr(method.__func__, "__code__", None)
        # An unpickled method may have another function than the class.
        if code is None or getattr(getattr(of_class, "__func__", of_class), "__code__", None) != code:
            self.visit(method.__func__)

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


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _digest_of_array(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.kind == "T":
        return marshal.dumps(array.tolist(), 2)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


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
