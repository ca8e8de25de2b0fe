"""Rules for imports, names and texts, checked on the syntax trees of the package."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import nodes_of, parsed, tree_of

import daskdist

PACKAGE = Path(daskdist.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS_AND_BENCHMARKS = [
    path for folder in ("tests", "benchmarks") for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
]

# A file imports lower ranks and its own folder. Folders and files below the package, by rank.
RANKS = {
    # The lowest ranks.
    "url_secrets": -2,
    "context_variables": -2,
    "call_progress": -2,
    "cached_property": -2,
    "call_threads": -2,
    "errors": -1,
    "config": -1,
    "core": 0,
    "devices": 1,
    "storage": 0.4,
    "tables": 0.5,
    "formats": 1,
    "sharding": 1,
    "ops": 2,
    "passes": 3,
    "display": 1.5,
    "execute": 3,
    "checkpoint": 4,
    "dashboard": 4,
    "dataset": 5,
    "tensorflow_dataset": 5.5,
    "waiting": -0.8,
    "watched_calls": -0.7,
    "long_work": 0,
    # Only names of the public interface.
    "data": 7,
    "readers": 6,
    "distribute": 7,
    "experimental": 7,
    "tpu": 7,
    "strategy": 6,
    "tensorflow": 6.5,
    "service": 4.5,
    "cli": 7,
    "frameworks": 7,
    "preload": 7,
    "testing": 7,
}

# Libraries that are optional or heavy, and so may be imported inside a function.
LAZY = {
    "bokeh",
    "cupy",
    "dask",
    "distributed",
    "fsspec",
    "google_crc32c",
    "h5py",
    "IPython",
    "jax",
    "jinja2",
    "keras",
    "matplotlib",
    "nvtx",
    "pandas",
    "PIL",
    "prometheus_client",
    "psutil",
    "pyarrow",
    "rich",
    "rmm",
    "sklearn",
    "sqlalchemy",
    "torch",
    "tqdm",
    "xarray",
    "zarr",
}

# Files of ours that import such a library at their top.
HEAVY = {
    "daskdist.execute.callers.submit",
    "daskdist.strategy.multi_worker",
    "daskdist.strategy.values.persisted",
    "daskdist.service.address",
    "daskdist.service.current_status",
    "daskdist.service.consumer.dispatcher_connection",
    "daskdist.service.registry",
    "daskdist.service.service_dataset",
    "daskdist.service.dispatcher.scheduler_plugin",
    "daskdist.service.servers",
}

# Library -> where it may be imported.
HOMES = {
    "distributed": (
        "execute/callers/cluster_requests.py",
        "execute/callers/submit.py",
        "execute/callers/sent_blocks.py",
        "execute/callers/fetch.py",
        "execute/messages/link.py",
        "execute/messages/outbox.py",
        "execute/paused_workers.py",
        "execute/private_names.py",
        "execute/run_task.py",
        "execute/submitted_tasks.py",
        "strategy/placement/cluster_resolver.py",
        "strategy/collectives/mailbox.py",
        "strategy/calls/",
        "service/",
        "preload.py",
        "dashboard/",
        "cli/",
    ),
    "cupy": ("devices/",),
    "pyarrow": ("formats/", "tables/", "storage/", "cli/"),
    # Names of modules of pyarrow, which are imported when they are used.
    "daskdist.storage.libraries": ("formats/", "tables/", "storage/", "cli/"),
    "dask._task_spec": ("execute/callers/graph.py",),
    "sklearn": ("cli/",),
    "matplotlib": ("cli/", "display/"),
    "pandas": ("formats/", "tables/"),
    "tqdm": ("display/",),
    "google_crc32c": ("formats/",),
    "h5py": ("formats/",),
    "PIL": ("formats/",),
    "sqlalchemy": ("formats/",),
    "zarr": ("formats/",),
    "jax": ("frameworks/",),
    "keras": ("frameworks/",),
    "torch": ("frameworks/",),
}

# The manual.
LONG = {"dataset.py"}

# Underscored names of other libraries that have no public equivalent.
OF_LIBRARIES = {"_asdict", "_fields", "_meta", "_replace", "_repr_html_", "_strip_protocol"}
# Underscored names that not every version of a library has.
OPTIONAL_OF_LIBRARIES = {"_collectors", "_inst", "_rand", "_register_atexit"}
# Functions of these modules use private names of objects whose public names are for users, or are those of arrays.
OF_OBJECTS_OF_USERS = {
    "core/dataset_base.py",
    "core/functions/fixed_values.py",
    "core/structure.py",
    "core/vectorize/sandbox.py",
    "core/vectorize/tracer.py",
    "checkpoint/checkpoint.py",
    "checkpoint/checkpoint_manager.py",
    "dataset.py",
    "execute/stream/local_iterator.py",
    "strategy/input/dataset.py",
    "strategy/input/iterator.py",
    "strategy/replica/checkpoints.py",
    "strategy/replica/context.py",
    "strategy/replica/contract.py",
    "strategy/values/per_replica.py",
    "strategy/values/variable_contract.py",
    "strategy/variables/record.py",
    "strategy/variables/variable.py",
}
# The one module that uses private names of Dask.
OF_DASK = "execute/private_names.py"


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def unit_of(path: Path) -> str:
    """Return the folder or file directly below the package that a file is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


class Imports(ast.NodeVisitor):
    """The modules a file imports, each with its line and whether that is inside a function."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[tuple[str, int, bool]] = []
        self._depth = 0
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.found.append((alias.name, node.lineno, self._depth > 0))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert not node.level, f"line {node.lineno}: a relative import"
        module = node.module or ""
        for alias in node.names:
            # `from daskdist.display import plan` imports a module; `from daskdist.errors import X` a name of one.
            whole = f"{module}.{alias.name}"
            is_module = module.startswith("daskdist") and _is_module(whole)
            self.found.append((whole if is_module else module, node.lineno, self._depth > 0))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - named by the ast module

    def generic_visit(self, node: ast.AST) -> None:
        # Expressions import nothing.
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                self.visit(child)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)


@functools.cache
def _is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.joinpath("__init__.py").exists()


@pytest.fixture(scope="module", autouse=True)
def _trees():
    with parsed(FILES):
        yield


def name_called(node: ast.AST) -> str:
    """Return the name that a call calls, such as ``getattr`` or ``importlib.import_module``, or ``""``."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def definitions_in(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the classes and functions in statements, without looking into expressions."""
    for node in nodes:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from definitions_in(getattr(node, field, []))


@functools.cache
def imports_of(path: Path) -> list[tuple[str, int, bool]]:
    return Imports(tree_of(path)).found


def each_file(check):
    """Make a test of a check of one file's path; the test checks all files and reports all failures together."""

    def test():
        failures = []
        for path in FILES:
            try:
                check(path)
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)

    test.__name__ = check.__name__
    return test


def test_every_file_has_a_rank():
    unknown = {unit_of(path) for path in FILES} - set(RANKS) - {"__init__", "__main__"}
    assert not unknown, f"give {unknown} a rank, in the architecture first"


# Libraries that look for TensorFlow would import a directory tests/tensorflow. The other rooms are its interface.
TESTS_OF_ROOMS = dict.fromkeys(("tensorflow", "data", "distribute", "tpu"), "tensorflow_names")


def test_rooms_have_tests_in_a_directory_of_their_name():
    rooms = {unit_of(path) for path in FILES if path.parent != PACKAGE}
    tests = {room: PACKAGE.parent / "tests" / TESTS_OF_ROOMS.get(room, room) for room in rooms}
    assert sorted(room for room in rooms if not any(tests[room].glob("test_*.py"))) == []


@each_file
def test_imports_point_down(path):
    if name_of(path) in ("__init__.py", "__main__.py"):
        return
    unit = unit_of(path)
    for module, line, _ in imports_of(path):
        if module.split(".")[0] != "daskdist":
            continue
        parts = module.split(".")
        if len(parts) == 1:
            assert RANKS[unit] == 7, f"{name_of(path)}:{line} imports the whole package"
            continue
        assert parts[1] == unit or RANKS[parts[1]] < RANKS[unit], (
            f"{name_of(path)}:{line} imports {module}: rank {RANKS[parts[1]]} from rank {RANKS[unit]}"
        )


# Folders of strategy/, and the modules beside them that folders may import, from the lowest up. The other modules of
# strategy/ may import all of these.
STRATEGY_ROOMS = (
    "group",
    "status",
    "backend",
    "placement",
    "values",
    "reduce",
    "collectives",
    "replica",
    "variables",
    "input",
    "calls",
)


def _all_imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, including imports for types only."""
    modules = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("daskdist"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                modules.add(whole if _is_module(whole) else str(node.module))
    return modules


def _strategy_floor(module: str) -> int:
    room = module.removeprefix("daskdist.strategy.").partition(".")[0]
    return STRATEGY_ROOMS.index(room) if room in STRATEGY_ROOMS else len(STRATEGY_ROOMS)


def test_rooms_of_strategy_import_lower_rooms():
    wrong = set()
    for path in sorted((PACKAGE / "strategy").rglob("*.py")):
        name = path.relative_to(PACKAGE / "strategy").with_suffix("").as_posix()
        own = _strategy_floor("daskdist.strategy." + name.replace("/", "."))
        for module in _all_imports(path):
            if module.startswith("daskdist.strategy.") and _strategy_floor(module) > own:
                wrong.add((name, module))
    assert not wrong, wrong


@each_file
def test_imports_inside_functions_are_of_libraries(path):
    for module, line, is_inside in imports_of(path):
        if is_inside:
            is_lazy = module in HEAVY or module.split(".")[0] in LAZY
            assert is_lazy, f"{name_of(path)}:{line} imports {module} inside a function"


@each_file
def test_libraries_are_imported_at_home(path):
    imported = [(module, line) for module, line, _ in imports_of(path)]
    imported += [(node.args[0].value, node.lineno) for node in nodes_of(path) if name_called(node) == "LazyModule"]
    for module, line in imported:
        for library, homes in HOMES.items():
            if module == library or module.startswith(library + "."):
                assert name_of(path).startswith(homes), f"{name_of(path)}:{line} imports {module}"


@each_file
def test_libraries_of_names_are_known(path):
    # The name of a module in a call, such as importlib.import_module("cupy"), would evade the test before.
    for node in nodes_of(path):
        if name_called(node) in ("importlib.import_module", "__import__"):
            for argument in node.args:
                assert not isinstance(argument, ast.Constant), f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


@each_file
def test_no_assert(path):
    lines = [node.lineno for node in nodes_of(path) if isinstance(node, ast.Assert)]
    assert not lines, f"{name_of(path)}: assert in lines {lines}"


@each_file
def test_files_are_small(path):
    number = len(path.read_text().splitlines())
    assert number <= 600 or name_of(path) in LONG, f"{name_of(path)} has {number} lines"


def test_files_of_tests_are_small():
    numbers = {path.name: len(path.read_text().splitlines()) for path in Path(__file__).parent.rglob("*.py")}
    assert {name: number for name, number in numbers.items() if number > 900} == {}


@each_file
def test_files_have_docstrings(path):
    docstring = ast.get_docstring(tree_of(path))
    assert docstring, f"{name_of(path)} has no docstring"
    assert docstring.splitlines()[0].endswith((".", ":")), f"{name_of(path)}: {docstring.splitlines()[0]!r}"


@each_file
def test_file_names_are_not_vague(path):
    vague = {"utils", "util", "common", "helpers", "base", "manager", "misc"}
    assert not vague & set(name_of(path).removesuffix(".py").split("/")), f"{name_of(path)} has a vague name"


def _public_functions(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


# A variable or parameter with one of these names does not say what it holds.
VAGUE_VARIABLES = {"each", "found", "given", "here", "made", "own", "told", "what"}
# Words in messages that are not how people speak today; docstrings and comments are left to readers.
OLD_WORDS = re.compile(r"\b(mend|anew|whoever)\b")


@each_file
def test_variables_say_what_they_hold(path):
    for node in nodes_of(path):
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else None
        assert name not in VAGUE_VARIABLES, f"{name_of(path)}:{node.lineno}: a variable is called {name}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not OLD_WORDS.search(node.value), f"{name_of(path)}:{node.lineno}: {node.value!r:.80}"


# A sentence that begins with one of these words usually lacks its noun or its verb.
RIDDLES = r"(What|Whether|Who|Whose|That|Have|Of|Where|How|Those|As|Which|To whom)\b"


def test_docstrings_begin_with_a_noun_or_a_verb():
    failures = []
    for path in [*FILES, *TESTS_AND_BENCHMARKS]:
        # Most files have no string that begins so, and are not parsed.
        if re.search(rf"""["'][\s\\]*{RIDDLES}""", path.read_text()):
            tree = tree_of(path)
            for node in [tree, *definitions_in(tree.body)]:
                docstring = (ast.get_docstring(node, clean=False) or "").lstrip()
                if re.match(RIDDLES, docstring):
                    failures.append(f"{path}: {docstring.splitlines()[0]}")
    assert not failures, "\n".join(failures)


@each_file
def test_docstrings_describe_errors_below_their_names(path):
    for node in [tree_of(path), *definitions_in(tree_of(path).body)]:
        line = re.search(r"(?m)^\s*\w+(Error|Unknown) [A-Z`].*", ast.get_docstring(node) or "")
        assert line is None, f"{name_of(path)}: {line[0]!r}"


def test_public_methods_name_their_options():
    for node in _public_functions(tree_of(PACKAGE / "dataset.py")):
        # `pipe` passes arguments to another function.
        hands_on = node.name == "pipe"
        assert hands_on or node.args.kwarg is None, f"dataset.py:{node.lineno}: {node.name} takes **"


def test_public_methods_are_documented():
    tree = tree_of(PACKAGE / "dataset.py")
    for node in _public_functions(tree):
        assert ast.get_docstring(node), f"dataset.py:{node.lineno}: {node.name} has no docstring"


def test_readers_are_public_functions_only():
    for path in sorted((PACKAGE / "readers").glob("*.py")):
        for node in definitions_in(tree_of(path).body):
            is_public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            assert is_public, f"{name_of(path)}:{node.lineno}: {node.name} belongs into formats/"


def test_an_operation_is_a_file_of_its_name():
    for path in sorted((PACKAGE / "ops").glob("*.py")):
        module = importlib.import_module(f"daskdist.ops.{path.stem}")
        names = {each.name for each in vars(module).values() if _is_node_of(each, module)}
        names = {name if isinstance(name, str) else "read_files" for name in names}
        assert names <= {path.stem}, f"ops/{path.name} has operations called {names}"


def _is_node_of(each: object, module: object) -> bool:
    from daskdist.core.node import Node

    return isinstance(each, type) and issubclass(each, Node) and each.__module__ == module.__name__


@each_file
def test_passes_look_for_no_operation(path):
    # A pass may build an operation, but it does not look for one.
    if unit_of(path) != "passes":
        return
    tree = tree_of(path)
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {name.asname or name.name for node in imported if _is_of_ops(node) for name in node.names}
    operations = {name for name in names if name[0].isupper()}
    for node in ast.walk(tree):
        is_check = name_called(node) in ("isinstance", "issubclass")
        if is_check or isinstance(node, (ast.Compare, ast.MatchClass)):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            assert not names & operations, f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


def _is_of_ops(node):
    return node.module == "daskdist.ops" or node.module.startswith("daskdist.ops.")


# Names of ours that arrays, functions and streams of libraries have as well.
OF_ARRAYS_AND_LIBRARIES = {
    *(
        "base",
        "buffers",
        "cache",
        "call",
        "close",
        "detach",
        "dtype",
        "get",
        "item",
        "kind",
        "name",
        "nbytes",
        "origin",
    ),
    *("shape", "status", "stream", "strides", "to_delayed", "tolist"),
}
# Objects of users may lack these methods.
OF_USERS = {"count", "list_splits"}


@each_file
def test_interfaces_are_declared(path):
    # An optional method of our own objects is a protocol, so that types and readers know it.
    for node in nodes_of(path):
        if name_called(node) in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            is_ours = name in _names_of_our_classes() and name not in OF_ARRAYS_AND_LIBRARIES | OF_USERS
            assert not is_ours, f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


@functools.cache
def _names_of_our_classes():
    """Return the public names of methods and fields of all classes of the package."""
    names = set()
    for path in FILES:
        for cls in [node for node in nodes_of(path) if isinstance(node, ast.ClassDef)]:
            for node in cls.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    names.add(node.name)
                elif isinstance(node, ast.AnnAssign):
                    names.add(ast.unparse(node.target))
    return {name for name in names if not name.startswith("_")}


def test_class_names_are_unique():
    places = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_module_names_are_unique_in_a_room():
    places = {}
    for path in FILES:
        # The names of the modules of ``data`` are TensorFlow's.
        if path.stem != "__init__" and unit_of(path) != "data":
            places.setdefault((unit_of(path), path.stem), []).append(name_of(path))
    assert {stem: paths for stem, paths in places.items() if len(paths) > 1} == {}


def test_rooms_are_small():
    numbers = {}
    for path in FILES:
        if path.stem != "__init__" and "ops" not in path.parts:
            numbers[path.parent] = numbers.get(path.parent, 0) + 1
    assert {name_of(room): number for room, number in numbers.items() if number > 20 and room != PACKAGE} == {}


def test_imports_have_no_cycles():
    # Imports for types only, and in functions, count too.
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    waiting = {name: _all_imports(path) & set(modules) - {name} for name, path in modules.items()}
    while free := [name for name, needed in waiting.items() if not needed & set(waiting)]:
        for name in free:
            del waiting[name]
    assert waiting == {}


def _is_private(name):
    return name.startswith("_") and not name.endswith("__") and name not in OF_LIBRARIES | OPTIONAL_OF_LIBRARIES


def _is_self(node):
    return (node.id if isinstance(node, ast.Name) else f"{name_called(node)}()") in ("self", "cls", "super()")


def _name_used(node):
    """Return the name that an expression uses of an object, and the object."""
    if name_called(node) in ("getattr", "hasattr", "setattr") and isinstance(node.args[1], ast.Constant):
        return node.args[1].value, node.args[0]
    return (node.attr, node.value) if isinstance(node, ast.Attribute) else ("", None)


def _names_of_class(cls):
    """Return the names that a class defines or sets on its own objects."""
    names = set()
    for node in ast.walk(cls):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


@each_file
def test_private_names_are_used_in_their_class(path):
    if name_of(path) in {OF_DASK, *OF_OBJECTS_OF_USERS}:
        return
    nodes = nodes_of(path)
    in_class = set()
    for cls in [node for node in nodes if isinstance(node, ast.ClassDef)]:
        names = _names_of_class(cls)
        in_class |= {node for node in ast.walk(cls) if _name_used(node)[0] in names}
    for node in nodes:
        name, owner = _name_used(node)
        is_allowed = not _is_private(name) or _is_self(owner) or node in in_class
        assert is_allowed, f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


def test_public_methods_are_documented_where_they_are_first_defined():
    # Ruff's D102 does not know which methods override or implement others.
    documented, undocumented = set(), []
    for path in FILES:
        for cls in [node for node in nodes_of(path) if isinstance(node, ast.ClassDef)]:
            for method in [node for node in cls.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]:
                if ast.get_docstring(method):
                    documented.add(method.name)
                elif not method.name.startswith(("_", "test_")) and not cls.name.startswith("_"):
                    undocumented.append((method.name, f"{name_of(path)}:{method.lineno}"))
    assert [f"{place}: {name}" for name, place in undocumented if name not in documented] == []


@each_file
def test_interpreter_and_callers_know_no_operation(path):
    # The interpreter and its callers are given primitives only.
    if not name_of(path).startswith(("execute/caller", "execute/stream/")):
        return
    for module, line, _ in imports_of(path):
        assert not module.startswith("daskdist.ops"), f"{name_of(path)}:{line} imports {module}"


@pytest.mark.parametrize("module", ["daskdist", "daskdist.data", "daskdist.distribute", "daskdist.testing"])
def test_every_public_name_resolves(module):
    module = importlib.import_module(module)
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None or name.endswith("_CARDINALITY"), name
    with pytest.raises(AttributeError, match="no attribute 'not_there'"):
        _ = module.not_there


# The methods that users call, by the sections of the manual.
PUBLIC_METHODS = """
    range counter random
    from_tensors from_tensor_slices from_list from_generator from_dask list_files
    zip choose_from_datasets sample_from_datasets
    map filter flat_map interleave enumerate scan reduce
    columns select rename split kfold
    take skip take_while shard repeat concatenate unique
    shuffle global_shuffle rejection_resample prefetch ignore_errors
    batch padded_batch ragged_batch unbatch rebatch window group_by_window bucket_by_sequence_length
    batch_by_size sliding_window
    cache snapshot save load to_parquet to_tfrecord to_npy to_zarr to_webdataset
    apply pipe serve with_options options
    head count describe
    at_epoch as_numpy_iterator get_single_element element_spec cardinality assert_cardinality fingerprint show explain
    compute persist visualize to_dask_array to_dask_dataframe to_delayed to_pandas
"""


@pytest.mark.parametrize("cls", [daskdist.Dataset, daskdist.data.Dataset])
def test_datasets_show_what_users_call(cls):
    assert sorted(PUBLIC_METHODS.split()) == [name for name in dir(cls) if not name.startswith("_")]


# The names that users call of other objects, in the README or as TensorFlow has them.
PUBLIC_NAMES = {
    "Checkpoint": "epoch save restore",
    "CheckpointManager": "directory keep steps path save restore wait close",
    "ElementIterator": "stats state_dict load_state_dict close",
    "PerReplica": "values compute persist visualize",
    "DistributedDataset": "cardinality element_spec explain progress sharding",
    "DistributedIterator": "element_spec get_next get_next_as_optional stats state_dict load_state_dict close",
    "Variable": """
        name dtype shape ndim size trainable synchronization aggregation values value read_value numpy
        assign assign_add assign_sub state_dict load_state_dict
    """,
    "ReplicaContext": """
        replica_id_in_sync_group num_replicas_in_sync strategy devices all_reduce all_gather merge_call
        checkpoint restore
    """,
    "MirroredStrategy": """
        scope run predict reduce gather local_results distribute_dataset distribute_datasets_from_function
        distribute_values_from_function num_replicas_in_sync replicas workers extended status close
        experimental_distribute_dataset experimental_distribute_datasets_from_function experimental_local_results
        experimental_distribute_values_from_function experimental_make_numpy_dataset experimental_run
        experimental_run_v2
    """,
}


def test_objects_show_what_users_call(tmp_path):
    strategy = daskdist.MirroredStrategy(["CPU:0"])
    distributed = strategy.distribute_dataset(daskdist.Dataset.range(2).batch(2))
    with strategy.scope():
        variable = daskdist.Variable(1.0)
    contexts = []
    strategy.run(lambda: contexts.append(daskdist.get_replica_context()))
    objects = [strategy, distributed, iter(distributed), variable, *contexts, daskdist.PerReplica([1, 2])]
    objects += [iter(daskdist.Dataset.range(2)), daskdist.Checkpoint(epoch=0), daskdist.CheckpointManager(tmp_path)]
    names = {type(obj).__name__: sorted(name for name in dir(obj) if not name.startswith("_")) for obj in objects}
    assert names == {name: sorted(text.split()) for name, text in PUBLIC_NAMES.items()}


@pytest.mark.cluster
def test_objects_on_clusters_show_what_users_call(on_cluster):
    names = [name for name in dir(on_cluster) if not name.startswith("_")]
    assert names == sorted(["client", *PUBLIC_NAMES["MirroredStrategy"].split()])
    value = on_cluster.reduce("sum", on_cluster.run(lambda: 1.0), axis=None)
    assert [name for name in dir(value) if not name.startswith("_")] == ["compute", "persist", "result", "visualize"]


def test_the_help_of_datasets_lists_their_methods_by_task():
    documentation = daskdist.Dataset.__doc__
    table = documentation[documentation.index("    create  ") : documentation.rindex("====")]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(PUBLIC_METHODS.split())


@pytest.mark.parametrize("module", ["daskdist", "daskdist.data", "daskdist.distribute", "daskdist.experimental"])
def test_dir_shows_public_names_only(module):
    module = importlib.import_module(module)
    assert sorted(module.__all__) == [name for name in dir(module) if not name.startswith("__")]


def test_every_module_imports():
    for each in pkgutil.walk_packages(daskdist.__path__, "daskdist."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)


def _subclasses(cls):
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def test_subclasses_of_strategy_only_construct():
    # Strategies differ only in their backends.
    test_every_module_imports()
    strategy = importlib.import_module("daskdist.strategy.strategy").Strategy
    own = [each for each in _subclasses(strategy) if each.__module__.startswith("daskdist.")]
    found = {each.__name__: set(vars(each)) & set(dir(strategy)) for each in own}
    assert {"MirroredStrategy", "MultiWorkerMirroredStrategy", "CrossReplicaStrategy", "TPUStrategy"} <= set(found)
    allowed = {"__init__", "__module__", "__doc__"}
    assert {name: overridden - allowed for name, overridden in found.items() if overridden - allowed} == {}


def test_importing_is_light():
    program = (
        "import sys, daskdist;"
        "print([each for each in ('pyarrow', 'cupy', 'distributed', 'pandas', 'matplotlib', 'sklearn', 'torch', 'jax',"
        " 'keras') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_building_a_pipeline_is_light():
    program = (
        "import sys; from daskdist import Dataset, MirroredStrategy;"
        "list(MirroredStrategy(['CPU:0', 'CPU:1']).distribute_dataset(Dataset.range(9).batch(2)));"
        "print([each for each in ('pyarrow', 'cupy', 'distributed', 'pandas') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
