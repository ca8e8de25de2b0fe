"""Functions that are sent to workers once, and again when what they refer to has changed."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import deque

import cloudpickle
import pytest

from daskdist.core.functions.user_function import numbers_in
from daskdist.strategy.calls.sent_objects import SentObjects


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Return a function that imports a module from its source, which is of an installed package if it is to be."""
    names = []

    def import_(name, source, *, is_installed=False):
        folder = tmp_path / "site-packages" if is_installed else tmp_path
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        names.append(name)
        return importlib.import_module(name)

    yield import_
    for name in names:
        sys.modules.pop(name, None)


def sent_value(objects, function):
    return cloudpickle.loads(objects(function, lambda: "f").value)(1)


def check(function, change, before, after):
    """Check what a worker would call, before and after a change."""
    objects = SentObjects(deque())
    first = objects(function, lambda: "f")
    assert sent_value(objects, function) == function(1) == before
    assert objects(function, lambda: "f") is first
    change()
    assert sent_value(objects, function) == function(1) == after


def main_function(source, **variables):
    variables = {"__name__": "__main__", **variables}
    exec(source, variables)
    return variables["f"], variables


def test_names_and_helpers():
    f, variables = main_function("K = 2\ndef g(x): return x * K\ndef f(x): return g(x)")
    check(f, lambda: variables.update(K=3), 2, 3)
    check(f, lambda: exec("def g(x): return x * 5", variables), 3, 5)


def test_contents_of_objects():
    f, variables = main_function("K = [2]\ndef f(x): return x * K[0]")
    check(f, lambda: variables["K"].append(variables["K"].pop() + 1), 2, 3)


def test_attributes_of_partials():
    p = functools.partial(pow, 1)
    p.factor = 2
    f, _ = main_function("def f(x): return p(x) * p.factor", p=p)
    check(f, lambda: setattr(p, "factor", 3), 2, 3)


def test_wrapped_functions():
    f, variables = main_function(
        "K = 2\ndef base(x): return x * K\n@functools.wraps(base)\ndef g(x): return x\n"
        "def f(x): return g.__wrapped__(x)",
        functools=functools,
    )
    check(f, lambda: variables.update(K=3), 2, 3)


@pytest.mark.parametrize("way", ["default", "name"])
def test_functions_that_an_installed_package_defines(imported, way):
    package = imported(
        f"installed_{way}",
        "K = {'k': 2}\ndef default(config):\n def inner(x, config=config): return x * config['k']\n return inner\n"
        "def name(config):\n def inner(x): return x * K['k']\n return inner\n",
        is_installed=True,
    )
    check(getattr(package, way)(package.K), lambda: package.K.update(k=3), 2, 3)


def test_modules_that_are_sent_by_value(imported):
    module = imported("sent_by_value", "K = 2\ndef helper(x): return x * K\n")
    cloudpickle.register_pickle_by_value(module)
    try:
        f, _ = main_function("def f(x): return module.helper(x)", module=module)
        check(f, lambda: setattr(module, "K", 3), 2, 3)
        check(module.helper, lambda: setattr(module, "K", 4), 3, 4)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_what_a_function_imports_is_not_imported_to_send_it(tmp_path, monkeypatch):
    (tmp_path / "only_on_gpus.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    f, _ = main_function("def f(x):\n if x == 2:\n  import only_on_gpus\n return x")
    assert sent_value(SentObjects(deque()), f) == 1
    assert numbers_in(f) == [2]
    assert "only_on_gpus" not in sys.modules
