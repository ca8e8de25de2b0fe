"""A dataset is a value: the values that its functions refer to are fixed when it is built."""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
import warnings

import cloudpickle
import numpy as np
import pytest

import daskdist
from daskdist import Dataset
from daskdist.core.functions.user_function import UserFunction
from daskdist.errors import ArgumentError, ClusterError, UserFunctionError

FACTOR = 2
NUM_CALLS = 0


def times_factor(x):
    return x * FACTOR


def twice_times_factor(x):
    return times_factor(x) + times_factor(x)


def recursive(x):
    return FACTOR if x == 0 else recursive(x - 1)


def counted(x):
    global NUM_CALLS
    NUM_CALLS += 1
    return x + 0 * FACTOR


def values(ds):
    return [int(x) for x in ds]


@pytest.fixture
def factor(monkeypatch):
    def set_(value):
        monkeypatch.setitem(globals(), "FACTOR", value)

    set_(2)
    return set_


def test_loops_over_folds():
    folds, partials = [], []
    for fold in range(3):
        folds.append(Dataset.range(6).filter(lambda i: i % 3 != fold))  # noqa: B023
        partials.append(Dataset.range(6).map(functools.partial(lambda j, i: i * j + fold, 1)))  # noqa: B023
    assert list(map(values, folds)) == [[1, 2, 4, 5], [0, 2, 3, 5], [0, 1, 3, 4]]
    assert [values(ds)[0] for ds in partials] == [0, 1, 2]


WAYS = {
    "map": lambda ds, f: ds.map(f),
    "vectorized": lambda ds, f: ds.map(f, vectorized=True),
    "device": lambda ds, f: ds.map(f, device=True),
    "filter": lambda ds, f: ds.filter(lambda x: f(x) < 10),
    "flat_map": lambda ds, f: ds.flat_map(lambda x: Dataset.from_tensors(f(x))),
    "interleave": lambda ds, f: ds.interleave(lambda x: Dataset.from_tensors(f(x))),
    "scan": lambda ds, f: ds.scan(np.int64(0), lambda s, x: (s + x, f(x))),
    "take_while": lambda ds, f: ds.take_while(lambda x: f(x) < 10),
    "group_by_window": lambda ds, f: ds.group_by_window(lambda x: np.int64(f(x) > 10), lambda k, w: w.batch(9), 3),
    "bucket": lambda ds, f: ds.bucket_by_sequence_length(lambda x: int(f(x)), [10], [2, 3]),
    "rejection_resample": lambda ds, f: ds.rejection_resample(lambda x: int(f(x) > 10), [0.5, 0.5], seed=0),
    "from_generator": lambda ds, f: Dataset.from_generator(
        lambda: (f(x) for x in range(4)), daskdist.TensorSpec((), "int64")
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("called", [times_factor, twice_times_factor, lambda x: x * FACTOR])
def test_every_operation_fixes_them(factor, way, called):
    def built():
        return WAYS[way](Dataset.range(8), called)

    ds, expected = built(), [str(x) for x in built()]
    factor(7)
    assert [str(x) for x in ds] == expected
    assert [str(x) for x in built()] != expected


@pytest.mark.parametrize("function", [times_factor, twice_times_factor, lambda x: times_factor(x)])
def test_they_stay_fixed_in_another_process(factor, function):
    given = UserFunction(function, "map")
    factor(7)
    pickled = cloudpickle.dumps(given)
    factor(9)
    # Functions of modules are imported in the other process, where the module may have another value.
    sent = cloudpickle.loads(pickled)
    assert sent.function(1) == given.function(1) == UserFunction(function, "map").function(1) * 2 // 9
    assert sent.fingerprint().code == given.fingerprint().code
    assert cloudpickle.loads(cloudpickle.dumps(sent)).function(1) == given.function(1)


def test_module_functions_go_by_reference(factor):
    """Otherwise large objects that they refer to would be sent, too."""
    assert b"times_factor" in cloudpickle.dumps(UserFunction(times_factor, "map"))
    assert len(cloudpickle.dumps(UserFunction(times_factor, "map"))) < 1000


def test_on_a_cluster(client):
    folds = [Dataset.range(6).filter(lambda i: i % 3 != fold).batch(6) for fold in range(3)]  # noqa: B023
    assert [[x.tolist() for x in ds.compute(scheduler=client)] for ds in folds] == [
        [[1, 2, 4, 5]],
        [[0, 2, 3, 5]],
        [[0, 1, 3, 4]],
    ]


def test_helpers_that_are_defined_again_are_called():
    variables = {"__name__": "__main__"}
    exec("K = 2\ndef g(x): return x * K\ndef f(x): return g(x) + K", variables)
    function = UserFunction(variables["f"], "map")
    before = function.fingerprint().code
    variables["K"] = 5
    assert function.function(1) == 4
    exec("def g(x): return -x * K", variables)
    assert function.fingerprint().code != before
    assert function.function(1) == 0


def test_copies_follow_helpers_too():
    variables = {"__name__": "__main__"}
    exec("K = 2\ndef g(x): return x * K\ndef f(x): return g(x)", variables)
    function = UserFunction(variables["f"], "map")
    copy = function.row_by_row()
    cloudpickle.dumps(function)
    exec("def g(x): return -x * K", variables)
    sent = cloudpickle.loads(cloudpickle.dumps(function))
    for item in (function, copy):
        item.refresh()
    assert (function.function(3), copy.function(3), sent.function(3)) == (-6, -6, -6)


def test_helpers_that_are_defined_later_are_called():
    variables = {"__name__": "__main__"}
    exec("def f(x): return g(x)", variables)
    function = UserFunction(variables["f"], "map")
    exec("K = 2\ndef g(x): return x * K", variables)
    assert function.function(3) == 6


def test_functions_that_count_their_calls_keep_counting():
    global NUM_CALLS
    NUM_CALLS = number = 0

    def counting(x):
        nonlocal number
        number += 1
        return x

    def inner(x):
        return counting(x)

    before = NUM_CALLS
    list(Dataset.range(5).map(counted, vectorized=False))
    list(Dataset.range(5).map(inner, vectorized=False))
    assert before + 5 <= NUM_CALLS
    assert number >= 5


def test_objects_are_shared():
    table, array = {"k": 1}, np.ones(1, np.int64)
    ds = Dataset.range(3).map(lambda x: x * table["k"] * array[0])
    table["k"], array[0] = 2, 3
    assert values(ds) == [0, 6, 12]


def test_methods_and_callable_objects_are_not_copied(factor):
    class Scaled:
        def __init__(self):
            self.factor = 2

        def method(self, x):
            return x * self.factor

        __call__ = method

    scaled = Scaled()
    for function in (scaled, scaled.method, np.abs, int, str.upper, functools.partial(max, 1)):
        assert UserFunction(function, "map").function == function
    plain = lambda x: np.abs(x)  # noqa: E731
    assert UserFunction(plain, "map").function is plain


def test_functions_that_call_each_other_are_copied_together(factor):
    def even(x):
        return FACTOR if x == 0 else odd(x - 1)

    def odd(x):
        return -FACTOR if x == 0 else even(x - 1)

    copies = [UserFunction(function, "map").function for function in (recursive, even)]
    factor(7)
    assert [copy(3) for copy in copies] == [2, -2]
    assert recursive(3) == even(2) == 7


def test_defaults_and_keyword_defaults_are_copied(factor):
    def through(x, f=times_factor, *, g=times_factor):
        return f(x) + g(x)

    copy = UserFunction(through, "map").function
    factor(7)
    assert (copy(1), through(1)) == (4, 14)


def test_functions_that_look_up_names_themselves_see_their_module(factor):
    function = UserFunction(lambda x: x * FACTOR + globals()["FACTOR"] + eval("FACTOR"), "map").function
    factor(7)
    assert function(1) == 21


def test_functions_that_assign_names_do_not_get_other_values_in_silence():
    variables = {"__name__": "__main__", "COUNT": 0, "EMPTY": float("nan")}
    exec(
        "def f(x):\n    global COUNT\n    COUNT += 1\n    return x * K + (EMPTY != EMPTY) * SHIFT[0]\n"
        "def g(x):\n    return f(x) + len(globals()) * 0\n",
        variables,
    )
    for name in "fg":
        variables.update(K=1, SHIFT=[10])
        ds = Dataset.range(2).map(variables[name])
        assert values(ds) == [10, 11]
        # Shared objects, and what the function itself assigns, may change.
        variables.update(SHIFT=[20], COUNT=-5)
        assert values(ds) == [20, 21]
        variables["K"] = 2
        with pytest.raises(ArgumentError, match=r"K was 1 when the dataset was built, and is 2 now. f assigns global"):
            values(ds)
        with pytest.raises(ArgumentError, match="K was 1"):
            cloudpickle.dumps(ds)
        assert values(Dataset.range(2).map(variables[name])) == [20, 22]
        variables["K"] = 1
        assert values(ds) == [20, 21]


def test_copies_keep_nothing_of_the_module_that_they_do_not_use():
    variables = {"__name__": "__main__", "unused": np.ones(3)}
    exec("K = 2\ndef f(x): return x * K", variables)
    names = set(UserFunction(variables["f"], "map").function.__globals__)
    assert names == {"__name__", "__builtins__", "__warningregistry__", "K"}


def test_none_is_a_value():
    variables = {"__name__": "__main__", "LIMIT": None}
    exec("def f(x): return LIMIT", variables)
    user = UserFunction(variables["f"], "map")
    function = user.function
    user.refresh()
    assert user.function is function
    variables["LIMIT"] = 3
    user.refresh()
    assert user.function(1) is function(1) is None


def test_names_that_are_set_later_are_looked_up():
    variables = {"__name__": "__main__", "K": 2}
    exec("def f(x): return x * K + LATER[0]", variables)
    function = UserFunction(variables["f"], "map").function
    with pytest.raises(NameError, match="LATER"):
        function(1)
    variables.update(LATER=[5], K=3)
    assert function(1) == 7


def test_libraries_find_the_variables_of_a_function(factor):
    """These evaluate expressions with the global names of their caller."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1, 2, 3]})
    function = UserFunction(lambda x: len(table.query("a > @FACTOR")) + FACTOR, "map").function
    assert function(0) == 3
    factor(1)
    assert function(0) == 3


def test_a_warning_of_a_function_is_shown_once(factor):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for number in range(3):
            factor(number)
            UserFunction(lambda x: warnings.warn(f"about {FACTOR > 9}", stacklevel=1), "map").function(1)
    assert [str(one.message) for one in seen] == ["about False"]


SET_UP = """
SCALE, TABLE = 1, None
def f(x):
    global TABLE
    if TABLE is None:
        TABLE = [10] * 100
    return TABLE[int(x)] * SCALE
"""


def test_a_function_that_assigns_names_does_not_get_other_values_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "assigning.py").write_text(SET_UP)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("assigning")
    try:
        pickled = cloudpickle.dumps(UserFunction(module.f, "map"))
        assert cloudpickle.loads(pickled).function(1) == 10
        # In another process, where the module was set up in another way.
        module.SCALE = 3
        with pytest.raises(ClusterError, match=r"assigning.SCALE is 1 in the program and 3 in this worker. f assigns"):
            cloudpickle.loads(pickled).function(1)
        # What functions assign is what it is in each process.
        module.SCALE, module.TABLE = 1, [20] * 100
        assert cloudpickle.loads(pickled).function(1) == 20
    finally:
        del sys.modules["assigning"]


def test_a_copy_is_like_the_original(factor):
    k = 2

    def original(x, *rest: int, y: int = 3, **more):
        """Say what it does."""
        if x < 0:
            raise ValueError("negative")
        return x * k * y * FACTOR

    original.tag = "t"
    copy = UserFunction(original, "map").function
    assert copy is not original
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__kwdefaults__", "__annotations__", "tag"):
        assert getattr(copy, name) == getattr(original, name)
    assert (copy(2), copy(2, y=1)) == (24, 8)
    line = original.__code__.co_firstlineno
    assert UserFunction(original, "map").location.endswith(f"test_fixed_values.py:{line})")
    with pytest.raises(UserFunctionError) as caught:
        list(Dataset.range(-1, 1).map(original, vectorized=False))
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert (frames[-1].name, frames[-1].lineno) == ("original", line + 3)


def test_many_names_and_nested_code():
    """The code has more constants than fit into a byte, calls of constants, conditions and loops."""
    variables = {"__name__": "__main__"} | {f"k{number}": number for number in range(700)}
    source = "def h(x): return x + k1\ndef f(x):\n    total = 0\n"
    source += "".join(f"    total += k{number} if k{number} > -1 else h(k1)\n" for number in range(700))
    source += (
        "    for y in [h(z) + (lambda w: w + k3)(z) for z in range(k5)]:\n        total += y\n    return h(total) + x"
    )
    exec(source, variables)
    expected = variables["f"](1)
    function = UserFunction(variables["f"], "map").function
    for number in range(700):
        variables[f"k{number}"] = -5
    assert function(1) == expected


def test_names_that_modules_assign_stay(tmp_path, monkeypatch):
    """Workers are commonly set up by a call that sets names of a module there."""
    name = "set_up_by_workers"
    (tmp_path / f"{name}.py").write_text(
        "TOKEN = None\ndef start(token):\n    global TOKEN\n    TOKEN = token\ndef f(x):\n    return TOKEN\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    try:
        function = UserFunction(module.f, "map")
        module.start("t")
        assert function.function(0) == "t"
    finally:
        del sys.modules[name]
