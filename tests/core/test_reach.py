"""The walk over what a function refers to: what it sees, in which order, and what it notices."""

from __future__ import annotations

import functools
import importlib
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdist.core.functions.code_references import references_of
from daskdist.core.functions.reach import NO_VALUE, Reach, all_from, references_from


def defined(source, **variables):
    """Return the variables of a main program that has run some code."""
    variables = {"__name__": "__main__", **variables}
    exec(source, variables)
    return variables


def seen(value):
    return [(one.how, one.name, one.value) for one in references_from(value)]


def test_references_of_a_function_are_in_a_fixed_order():
    function = defined(
        "def outer():\n a, b = 1, 2\n def f(x, y=3, *, z=4):\n  nonlocal b\n  b = g(a, missing)\n return f\n"
        "def g(*args): return 0\nf = outer()\nf.tag = 't'"
    )
    f, g = function["f"], function["g"]
    assert seen(f) == [
        ("default", "default 0", 3),
        ("default", "z", 4),
        ("variable", "a", 1),
        ("assigned", "b", 2),
        ("name", "g", g),
        ("name", "missing", NO_VALUE),
        ("attribute", "tag", "t"),
    ]


def test_references_of_other_callables():
    class Base:
        pass

    class Thing(Base):
        number = 1

        def method(self):
            return self.number

    thing = Thing()
    assert seen(functools.partial(max, 1, key=abs)) == [
        ("part", "func", max),
        ("part", "[0]", 1),
        ("attribute", "key", abs),
    ]
    assert seen(thing.method) == [("part", "self", thing)]
    assert seen(Thing) == [("part", "Base", Base), ("member", "method", Thing.method), ("member", "number", 1)]
    assert seen(staticmethod(len)) == [("part", "function", len)]
    assert seen({"k": [1]}) == [("part", "['k']", [1])]
    assert seen(np) == seen(np.mean.__class__) == seen(3) == []


def import_statements():
    import json.decoder
    import os.path as paths
    from importlib import machinery as parts
    from importlib import util

    def nested():
        return util.find_spec(paths.join("a", "b")), parts

    json.decoder.scanner.py_make_scanner(util.module_from_spec)
    return nested


def test_attributes_of_imported_modules_are_followed_through_variables():
    chains = {one.module: sorted(one.chains) for one in references_of(import_statements.__code__).imports[:2]}
    assert chains == {"json.decoder": [("decoder", "scanner", "py_make_scanner")], "os.path": [("path", "join")]}
    of_importlib = [sorted(one.chains) for one in references_of(import_statements.__code__).imports[2:]]
    assert of_importlib == [[("machinery",)], [("util", "find_spec"), ("util", "module_from_spec")]]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return two modules of a program that refer to each other, and whose functions a main program may use."""
    (tmp_path / "reach_one.py").write_text("import reach_two\nK = 1\ndef f(x): return reach_two.g(x) * K\n")
    (tmp_path / "reach_two.py").write_text("import reach_one\nL = 1\ndef g(x): return L, reach_one\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("reach_one"), importlib.import_module("reach_two")
    del sys.modules["reach_one"], sys.modules["reach_two"]


def test_modules_that_refer_to_each_other_are_walked_once(modules):
    one, two = modules
    variables = defined("def h(x): return one, one.f(x)", one=one)
    reach = Reach(variables["h"])
    assert sorted(function.__name__ for function in reach.functions) == ["f", "g"]
    two.L = 2
    assert not reach.is_current(variables["h"])


def test_what_is_not_entered_is_a_leaf(modules):
    one, _ = modules
    f = defined("def f(x): return one.f(x) + g(x)", one=one, g=one.f)["f"]
    reach = Reach(f, lambda value: value is not one.f and type(value) is types.FunctionType)
    assert reach.functions == []
    assert reach.leaves == [one.f, one]


# Each changes what a function refers to; the function calls two helpers.
CHANGES = {
    "a name": lambda v: v.update(K=5),
    "a new name": lambda v: v.update(later=5),
    "a name that is gone": lambda v: v.pop("K"),
    "a helper": lambda v: exec("def g(x): return x", v),
    "a name of a helper": lambda v: v.update(L=5),
    "the code": lambda v: setattr(v["f"], "__code__", (lambda x, y=1, *, z=2: x).__code__),
    "the code of a helper": lambda v: setattr(v["g"], "__code__", v["h"].__code__),
    "a default": lambda v: setattr(v["f"], "__defaults__", (7,)),
    "a default of a helper": lambda v: setattr(v["g"], "__defaults__", (7,)),
    "a keyword default": lambda v: v["f"].__kwdefaults__.update(z=7),
    "an attribute": lambda v: setattr(v["f"], "tag", 2),
    "a new attribute": lambda v: setattr(v["g"], "other", 2),
    "a keyword of a partial": lambda v: v["p"].keywords.update(y=9),
    "a closure": lambda v: v["set_cell"](9),
}
SOURCE = """
K, L = 1, 2
def g(x, y=1): return x * L
def h(x): return x
p = functools.partial(g, y=3)
def closed():
    cell = 1
    def inner(x): return x + cell
    def set_cell(value):
        nonlocal cell
        cell = value
    return inner, set_cell
inner, set_cell = closed()
def f(x, y=1, *, z=2): return g(x) + p(x) + inner(x) + K + later
f.tag = 1
"""


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change):
    variables = defined(SOURCE, functools=functools)
    f = variables["f"]
    reach = Reach(f)
    assert reach.is_current(f)
    CHANGES[change](variables)
    assert not reach.is_current(f)
    assert Reach(f).is_current(f)


def test_a_function_may_be_freed_before_its_reach():
    import weakref

    variables = defined("def f(x): return g(x)\ndef g(x): return x")
    f = variables.pop("f")
    reach, freed = Reach(f), weakref.ref(f)
    del f
    assert freed() is None
    assert reach.functions == [variables["g"]]


def test_all_values_are_found_in_containers_and_objects():
    class Kept:
        __slots__ = ("inner",)

    marks = [object() for _ in range(6)]
    kept = Kept()
    kept.inner = {"k": marks[0]}
    variables = defined(
        "def g(x): return in_helper\ndef f(x, y=default): return g(x), kept, nested, p",
        in_helper=marks[1],
        default=marks[2],
        kept=kept,
        nested=[(marks[3],)],
        p=functools.partial(max, marks[4]),
    )
    variables["nested"].append(variables["nested"])
    values = list(all_from(variables["f"]))
    assert [mark in values for mark in marks] == [True] * 5 + [False]


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), min_size=1))
def test_functions_that_call_each_other_in_any_way_are_walked_once(calls):
    lines = [f"def {name}(): return {', '.join(sorted(called)) or 0}" for name, called in calls.items()]
    variables = defined("\n".join(lines))
    for name in calls:
        expected, waiting = set(), [name]
        while waiting:
            for called in calls.get(waiting.pop(), ()):
                if called not in expected and called in calls:
                    expected.add(called)
                    waiting.append(called)
        reach = Reach(variables[name])
        assert sorted(function.__name__ for function in reach.functions) == sorted(expected - {name})
        assert reach.is_current(variables[name])
