"""Functions for generated pipelines, which work the same for elements, batches and plain lists."""

from __future__ import annotations

import numpy as np

import daskdist
from daskdist.core.structure import Nested, Structure


def triple(x):
    return x * 3 + 1


def halve(x):
    return x / 2


def pair(x):
    return x, x + 1


def listed(x):
    return [x, x * 2]


def named(x):
    return {"a": x, "n": (x % 3, x)}


def constant(x):
    return x, 7, 0.5


def first(a, *rest):
    return a


def swap(a, *rest):
    return (*rest, a)


def by_name(d):
    return d["a"]


def renamed(d):
    return {"z": d["a"], "a": d["a"] * 2}


def count_up(x):
    # Results have different shapes: a batch of them stacks only if their shapes happen to be equal.
    return np.arange(np.sum(x) % 3)


def grow(x):
    # The shapes of results change now and then, as in files that were written over time.
    return np.zeros(int(np.sum(x)) // 3 % 4, np.float32)


def retype(x):
    return np.float32(np.sum(x)) if np.sum(x) < 6 else np.float64(np.sum(x))


def first_leaf(args):
    leaves, _ = Structure.flatten(args)
    return leaves[0]


def is_not_third(*args):
    return np.sum(first_leaf(args)) % 3 != 0


def is_small(*args):
    return bool(np.sum(first_leaf(args)) < 20)


def is_nothing(*args):
    return False


# These functions take elements of any kind; their results depend on a number that is computed from the element.


def number(*args):
    leaf = first_leaf(args)
    if isinstance(leaf, Nested):
        return len(list(leaf))
    while isinstance(leaf, daskdist.Ragged):
        leaf = leaf.values
    return int(np.sum(leaf)) if leaf.dtype.kind in "biuf" else len(str(leaf.tolist()))


def total(*args):
    return np.int64(number(*args))


def word(*args):
    return "ü" * (number(*args) % 3) + str(number(*args) % 10)


def some_bytes(*args):
    # Trailing zeros are lost in NumPy's dtype for bytes.
    return b"a\x00" * (number(*args) % 3)


def day(*args):
    return np.datetime64("2000-01-01") + np.timedelta64(number(*args) % 50, "D")


def turned(*args):
    return np.complex64(complex(0, number(*args) % 50))


def is_odd(*args):
    return number(*args) % 2 == 1


def is_below(*args):
    return number(*args) < 30


def class_of(*args):
    return number(*args) % 2


def key_of(*args):
    return number(*args) % 3 - 1


def size_of(key):
    return int(key) + 3


def length_of(x):
    return len(x)


def running(state, element):
    return (state[0] + 1, state[1] + number(element)), state[1]


def fragile(*args):
    _ = 1 // (number(*args) % 4)
    return args if len(args) > 1 else args[0]
