"""Fingerprints of functions: what changes them, and what does not."""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import subprocess
import sys
import textwrap
import threading
import time
import types
from functools import partial

import cloudpickle
import dask
import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset
from daskdist.core.functions.code_fingerprint import fingerprint_of
from daskdist.core.functions.user_function import numbers_in

_NUMBERS = itertools.count()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a function that writes modules of a new package and imports one of them."""
    name = f"project{next(_NUMBERS)}"
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(modules, imported):
        for module, source in {"__init__": "", **modules}.items():
            path = folder / f"{module.replace('.', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(source).replace("PROJECT", name))
        for module in [value for value in sys.modules if value.partition(".")[0] == name]:
            del sys.modules[module]
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.{imported}")

    yield write
    for module in [item for item in sys.modules if item.partition(".")[0] == name]:
        del sys.modules[module]


WAYS = {
    "directly": {"preprocess": "def f(x):\n    return x * 2"},
    "a call further": {"preprocess": "def g(x):\n    return x * 2\ndef f(x):\n    return g(x)"},
    "of another module": {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "from PROJECT.helpers import g\ndef f(x):\n    return g(x)",
    },
    "attribute of a module": {
        "sub.__init__": "",
        "sub.helper": "def g(x):\n    return x * 2",
        "preprocess": "import PROJECT.sub.helper\ndef f(x):\n    return PROJECT.sub.helper.g(x)",
    },
    "imported within": {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "def f(x):\n    from PROJECT.helpers import g\n    return g(x)",
    },
    "imported within, from here": {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "def f(x):\n    from . import helpers as h\n    return h.g(x)",
    },
    "a module handed on": {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "from PROJECT import helpers\ndef f(x):\n    m = helpers\n    return m.g(x)",
    },
    "a partial": {"preprocess": "import functools\ndef g(y, x):\n    return x * 2\nf = functools.partial(g, 1)"},
    "a closure": {
        "preprocess": "def make():\n    def g(x):\n        return x * 2\n    return lambda x: g(x)\nf = make()"
    },
    "a method": {"preprocess": "class A:\n    def g(self, x):\n        return x * 2\nf = A().g"},
    "an inherited method": {
        "preprocess": "class B:\n    def g(self, x):\n        return x * 2\nclass A(B):\n    pass\nf = A().g"
    },
    "a callable": {"preprocess": "class A:\n    def __call__(self, x):\n        return x * 2\nf = A()"},
    "a property": {
        "preprocess": "class A:\n    @property\n    def p(self):\n        return 2\na = A()\nf = lambda x: x * a.p"
    },
    "a default": {"preprocess": "g = lambda x: x * 2\ndef f(x, g=g):\n    return g(x)"},
    "in a dict": {"preprocess": "TABLE = {'g': lambda x: x * 2}\ndef f(x):\n    return TABLE['g'](x)"},
    "a constant of the module": {"preprocess": "K = 2\ndef f(x):\n    return x * K"},
    "a constant of another": {
        "config": "K = 2",
        "preprocess": "from PROJECT import config\ndef f(x):\n    return x * config.K",
    },
    "in an array": {"preprocess": "import numpy as np\nK = np.array([2])\ndef f(x):\n    return x * K[0]"},
    "decorated": {"preprocess": "import functools\n@functools.lru_cache\ndef f(x):\n    return x * 2"},
    "numpy.vectorize": {"preprocess": "import numpy as np\n@np.vectorize\ndef f(x):\n    return x * 2"},
    "wraps": {
        "preprocess": "import functools, numpy as np\n@functools.wraps(np.log)\ndef f(x):\n    return x * 2",
    },
    "recursive": {"preprocess": "def g(x):\n    return f(x) * 2\ndef f(x):\n    return g(x) if x else 0"},
    "a comprehension": {"preprocess": "def g(x):\n    return x * 2\ndef f(x):\n    return [g(y) for y in [x]]"},
    "a module as a default": {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "from PROJECT import helpers\ndef f(x, m=helpers):\n    return m.g(x)",
    },
    "a module given to a partial": {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "import functools\nfrom PROJECT import helpers\n"
        "f = functools.partial(lambda m, x: m.g(x), helpers)",
    },
    "a module as an attribute": {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "from PROJECT import helpers\ndef f(x):\n    return f.m.g(x)\nf.m = helpers",
    },
    "a module of another class": {
        "helpers": "import sys, types\nclass M(types.ModuleType): pass\nsys.modules[__name__].__class__ = M\n"
        "def g(x):\n    return x * 2",
        "preprocess": "from PROJECT import helpers\ndef f(x):\n    return helpers.g(x)",
    },
    "a builtin under its name": {"preprocess": "from builtins import abs\ndef f(x):\n    return abs(x) * 2"},
}


def code_and_state(function):
    fingerprint = fingerprint_of(function)
    return fingerprint.code, fingerprint.state


def _token(function):
    actual = fingerprint_of(function)
    return actual.code, actual.state, actual.contents


@pytest.mark.parametrize("way", WAYS)
def test_what_is_edited_changes_it_and_nothing_else_does(project, way):
    modules = WAYS[way]
    before = _token(project(modules, "preprocess").f)
    unused = "" if way.startswith("a module") else "UNUSED = 1"
    commented = {name: f"# A comment.\n\n{unused}\n{source}\n# Another.\n" for name, source in modules.items()}
    assert _token(project(commented, "preprocess").f) == before
    edited = {name: source.replace("2", "3") for name, source in modules.items()}
    assert edited != modules
    assert _token(project(edited, "preprocess").f) != before


def added(*values):
    return sum(values)


def applied(function, *values):
    return function() * 100 + sum(values)


def with_defaults(*defaults):
    return types.FunctionType(applied.__code__, globals(), "f", defaults)


@pytest.mark.parametrize(
    "functions",
    [
        # The same values in the same order, in another part of the function.
        [partial(applied, partial(added, 1), 2), partial(applied, partial(added, 1, 2))],
        [partial(applied, a=partial(added, b=1)), partial(applied, a=partial(added), b=1)],
        [with_defaults(with_defaults(1), 2), with_defaults(with_defaults(1, 2))],
        [types.MethodType(operator.mul, 2), types.MethodType(operator.mul, 3)],
    ],
)
def test_functions_of_other_parts_are_others(functions):
    first, second = map(_token, functions)
    assert first != second


def test_methods_of_callables_without_code():
    assert [numbers_in(types.MethodType(method, 3)) for method in (operator.mul, partial(added, 2))] == [[], []]


# Cloudpickle does not pickle modules of other classes.
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"a module of another class"}))
def test_functions_pickled_by_value_keep_their_fingerprint(project, way):
    """Functions of the main program are pickled by value when they are sent to a worker."""
    module = project(WAYS[way], "preprocess")
    cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.loads(cloudpickle.dumps(module.f))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert _token(sent) == _token(module.f)


def test_fingerprints_are_equal_in_all_processes(project):
    program = """
        from daskdist.core.functions.code_fingerprint import fingerprint_of
        import enum, functools, datetime, numpy as np
        K = 3
        class Color(enum.Enum):
            RED = 1
        class Config:
            size: int = 3
            def __init__(self, names):
                self.names, self.when = names, datetime.date(2020, 1, 1)
        config = Config({"a", "b", "c"})
        def g(x):
            return x + K
        def f(x, *, y=frozenset({"p", "q", "r"})):
            return g(x) if x in {"a", "b", "c"} else functools.reduce(f, config.names), Color.RED, np.log(x)
        found = fingerprint_of(f)
        print(found.code, found.state, found.contents)
    """
    actual = set()
    for seed in "12":
        made = subprocess.run(
            [sys.executable, "-c", textwrap.dedent("\n" * int(seed) + program)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        actual.add(made.stdout)
    assert len(actual) == 1


def test_calls_do_not_change_what_they_are_known_to_change():
    count, memo = 0, {}

    def counting(x):
        nonlocal count
        count += 1
        return x

    def remembering(x):
        return memo.setdefault(int(x), x * 2)

    for function in (counting, remembering):
        ds = Dataset.range(5).map(function)
        before = ds.fingerprint()
        list(ds)
        again = Dataset.range(5).map(function).fingerprint() if function is counting else ds.fingerprint()
        assert again == before


def test_opaque_objects_are_equal_to_themselves_only():
    lock = threading.Lock()
    assert code_and_state(lambda: lock) == code_and_state(lambda: lock)
    # Two open files differ, since each has a position of its own.
    with open(__file__) as one, open(__file__) as other:
        assert code_and_state(lambda: one) == code_and_state(lambda: one)
        assert _token(functools.partial(print, one)) != _token(functools.partial(print, other))


class _Count(itertools.count):
    def __reduce_ex__(self, protocol):
        # Python 3.12 and 3.13 warn like this for all iterators of itertools.
        raise DeprecationWarning("Pickle, copy, and deepcopy support will be removed from itertools in Python 3.14.")


def test_iterators_of_itertools_are_not_pickled(recwarn):
    for number, make in enumerate((itertools.count, lambda: itertools.chain([1], [2]), _Count)):
        iterator, other = make(), make()
        function = fingerprint_of(lambda x, iterator=iterator: (x, next(iterator)))
        again = fingerprint_of(lambda x, iterator=iterator: (x, next(iterator)))
        assert (function.code, function.state) == (again.code, again.state), number
        # Two iterators at the same place differ, since they may advance differently.
        assert function.state != fingerprint_of(lambda x, iterator=other: (x, next(iterator))).state, number
    assert not recwarn.list


def test_versions_of_installed_packages_count(monkeypatch):
    from daskdist.core.functions import installed_packages as module

    def f(x):
        return np.log(x)

    before = code_and_state(f)
    monkeypatch.setattr(module, "_installed", functools.cache(module._installed.__wrapped__))
    assert code_and_state(f) == before
    monkeypatch.setattr(module, "_installed", functools.cache(module._installed.__wrapped__))
    monkeypatch.setattr(np, "__version__", "0.0")
    assert code_and_state(f) != before


def test_fingerprints_are_computed_quickly():
    def g(x):
        return np.log(x) + 1

    def f(x):
        return g(x) * g(x + 1)

    code_and_state(f)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        code_and_state(f)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


def test_caches_follow_edits_of_a_module(project, tmp_path):
    source = {
        "helpers": "def g(x):\n    return x * 2",
        "preprocess": "from PROJECT import helpers\ndef f(x):\n    return helpers.g(x)",
    }

    def values():
        f = project(source, "preprocess").f
        return [
            [int(x) for x in Dataset.range(3).map(f).cache(tmp_path / "cache")],
            [int(x) for x in Dataset.range(3).map(f).snapshot(tmp_path / "snapshot")],
        ]

    assert values() == values() == [[0, 2, 4], [0, 2, 4]]
    source["helpers"] = "def g(x):\n    return x * 3"
    assert values() == [[0, 3, 6], [0, 3, 6]]


def draws_through_a_variable(x):
    import numpy

    r = numpy.random
    return x + r.rand()


def makes_its_own_through_a_variable(x):
    r = np.random
    return x + r.default_rng(x).random()


def test_global_generators_are_found_through_variables():
    assert fingerprint_of(draws_through_a_variable).generators == ["numpy.random.rand"]
    assert fingerprint_of(makes_its_own_through_a_variable).generators == []


def test_generators_are_part_of_the_fingerprint(project):
    def made(text):
        module = project({"preprocess": f"def rows():\n    yield {text}"}, "preprocess")
        return Dataset.from_generator(module.rows, daskdist.TensorSpec((), "int64")).fingerprint()

    assert made("1") == made("1") != made("2")


def test_a_file_whose_times_are_put_back_is_another(tmp_path):
    import os

    path = tmp_path / "a.npy"
    np.save(path, np.arange(4))
    before = daskdist.read_npy(path).fingerprint()
    stat = os.stat(path)
    np.save(path, np.arange(4) + 1)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == stat.st_mtime_ns
    assert daskdist.read_npy(path).fingerprint() != before


def test_a_remote_file_that_changes_is_another():
    import fsspec

    fs = fsspec.filesystem("memory")
    name = f"/functions{next(_NUMBERS)}"
    urls = [f"memory:/{name}/{letter}.txt" for letter in "ab"]
    try:
        for url in urls:
            fs.pipe(url, b"one\n")
        before = daskdist.read_text(urls).fingerprint()
        assert daskdist.read_text(urls).fingerprint() == before
        fs.pipe(urls[1], b"two\n")
        assert daskdist.read_text(urls).fingerprint() != before
    finally:
        fs.rm(name, recursive=True)


@pytest.mark.parametrize("vectorized", [None, False])
def test_helpers_that_are_defined_again_are_called_by_the_next_pass(tmp_path, vectorized):
    """A notebook may redefine helpers after the dataset was built."""
    variables = {"__name__": "__main__"}
    exec("K = 2\ndef g(x): return x * K\ndef f(x): return g(x)", variables)
    mapped = Dataset.range(3).map(variables["f"], vectorized=vectorized)
    path = str(tmp_path / "cache")
    kept = {
        "mapped": mapped,
        "in memory": mapped.cache().map(lambda x: x),
        "cache": mapped.cache(path),
        "further": mapped.cache(path).batch(3).unbatch(),
        "two": mapped.cache(path).map(lambda x: x + 0).snapshot(path),
    }
    for name, ds in kept.items():
        assert [int(x) for _ in range(2) for x in ds] == [0, 2, 4] * 2, name
    before = {name: (ds.fingerprint(), dask.base.tokenize(ds)) for name, ds in kept.items()}
    exec("def g(x): return x * K + 1", variables)
    for name, ds in kept.items():
        assert [int(x) for _ in range(2) for x in ds] == [1, 3, 5] * 2, name
        assert (ds.fingerprint(), dask.base.tokenize(ds)) != before[name]
        assert [int(x) for x in ds.batch(2).unbatch()] == [1, 3, 5], name
    exec("def g(x): return x * K", variables)
    # Nothing new is written: the files of the earlier definition are read again.
    written = sorted(tmp_path.rglob("*"))
    assert [int(x) for x in kept["cache"]] == [0, 2, 4]
    assert sorted(tmp_path.rglob("*")) == written


def test_a_distributed_dataset_follows_helpers(tmp_path):
    variables = {"__name__": "__main__"}
    exec("def g(x): return x * 2\ndef f(x): return g(x)", variables)
    mapped = Dataset.range(4).map(variables["f"])
    strategy = mirrored(2)

    def loop(iterator):
        return [int(x) for batch in iterator for x in batch]

    def in_loops(distributed):
        return sorted(x for value in strategy.local_results(strategy.run(loop, args=(distributed,))) for x in value)

    def steps(distributed):
        return [int(x) for step in distributed for batch in strategy.local_results(step) for x in batch]

    kept = [mapped, mapped.cache(), mapped.cache(str(tmp_path / "a")), mapped.snapshot(str(tmp_path / "b"))]
    distributed = [strategy.distribute_dataset(ds.batch(2)) for ds in kept]
    for factor in (2, 3, 2):
        exec(f"def g(x): return x * {factor}", variables)
        for item in distributed:
            assert steps(item) == in_loops(item) == [0, factor, 2 * factor, 3 * factor]
        # The cache has the elements of the current definition.
        assert [int(x) for x in kept[2]] == [0, factor, 2 * factor, 3 * factor]


def test_positions_follow_helpers():
    variables = {"__name__": "__main__"}
    exec("def g(x): return x * 2\ndef f(x): return g(x)", variables)
    ds = Dataset.range(6).map(variables["f"])
    iterator = iter(ds)
    next(iterator)
    state = iterator.state_dict()
    resumed = iter(ds)
    resumed.load_state_dict(state)
    assert [int(x) for x in resumed] == [2, 4, 6, 8, 10]
    exec("def g(x): return x * 3", variables)
    with pytest.raises(daskdist.errors.ArgumentError, match="of another pipeline"):
        iter(ds).load_state_dict(state)
