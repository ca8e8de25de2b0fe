"""Libraries that are imported when they are first used."""

import copy
import pickle
import subprocess
import sys
import types

import pytest

from daskdist.errors import MissingPackageError
from daskdist.storage.libraries import LazyModule, pa


def test_names_are_those_of_the_module():
    import pyarrow

    assert pa.Table is pyarrow.Table
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pa.no_such_name


def test_a_module_is_imported_when_a_name_is_used():
    program = (
        "import sys; from daskdist.storage.libraries import pc; print('pyarrow' in sys.modules);"
        "pc.add; print('pyarrow.compute' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_module_that_is_not_installed():
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        _ = LazyModule("no_such_library").name
    with pytest.raises(MissingPackageError, match=r"^pip install it \(No module named 'no_such_library'\)$"):
        _ = LazyModule("no_such_library", "pip install it ({})").name


def test_a_module_that_is_replaced_or_hidden_is_noticed(monkeypatch):
    library = LazyModule("a_library", "pip install it")
    for number in range(2):
        monkeypatch.setitem(sys.modules, "a_library", types.SimpleNamespace(number=number))
        assert library.number == number
    monkeypatch.setitem(sys.modules, "a_library", None)
    with pytest.raises(MissingPackageError, match="pip install it"):
        _ = library.number


def test_a_copy_and_a_pickle_are_of_the_same_module():
    for module in (LazyModule("json"), LazyModule("no_such_module", "not there: {}")):
        for other in (copy.copy(module), pickle.loads(pickle.dumps(module))):
            assert vars(other) == vars(module)
