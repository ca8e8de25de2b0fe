"""Functions that are hard to vectorise give the same as a plain Python loop, including bits, calls and warnings.

Bodies are put into frames, which have side effects, handle errors or call the body indirectly. The comparison on the
first block is switched off, so that differences that it would find are found here.
"""

# ruff: noqa: E501

from __future__ import annotations

import collections
import itertools
import sys
import textwrap
import warnings

import numpy as np
import pytest

from daskdist import Dataset
from daskdist.core.block import Block
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.structure import Structure, call_with
from daskdist.core.vectorize import apply
from daskdist.core.vectorize.apply import Vectorised
from daskdist.errors import UserFunctionError

NUM_ROWS = 19
HARD = [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 5e-324, -1e-310, 1e-40, 3.0, 0.5, 1e300, -1e30, 2.5, 1e16]


def _floats(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(shape) < 0.2, rng.choice(HARD, shape), rng.standard_normal(shape) * 9)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def _integers(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    large = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    small = rng.integers(0, 9, shape).astype(dtype)
    return np.where(rng.random(shape) < 0.1, large, small)


def _mild(shape, dtype="f8", seed=3):
    return np.random.default_rng(seed).uniform(0.1, 3, shape).astype(dtype)


N = NUM_ROWS
DATA = {
    "f8": _floats(N, "f8", 0),
    "f4": _floats(N, "f4", 1),
    "f2": _floats(N, "f2", 2),
    "i8": _integers(N, "i8", 3),
    "u1": _integers(N, "u1", 4),
    "i4": _integers(N, "i4", 5),
    "bool": np.arange(N) % 3 == 0,
    "mild": _mild(N),
    "small": np.arange(N) - 5,
    "v8": _floats((N, 5), "f8", 6),
    "v4": _floats((N, 17), "f4", 7),
    "vi": _integers((N, 6), "i8", 8),
    "vm": _mild((N, 16)),
    "vm4": _mild((N, 9), "f4"),
    "m8": _mild((N, 5, 7)),
    "m4": _mild((N, 9, 3), "f4"),
    "mf": np.asfortranarray(_mild((N, 12))),
    "mt": _mild((N, 4, 6)).transpose(0, 2, 1),
    "wide": _mild((N, 40))[:, 3:14],
    "strided": _mild((N, 40))[:, ::3],
    "reversed": _mild((N, 11))[:, ::-1],
    "time": np.datetime64("2024-01-01", "s") + np.arange(N) * 4000,
}
FLOATS, INTEGERS = ("f8", "f4", "f2", "mild"), ("i8", "u1", "i4", "small")
VECTORS = ("v8", "v4", "vm", "vm4", "mf", "wide", "strided", "reversed")
MATRICES = ("m8", "m4", "mt")

# Names of data -> bodies of one expression, which are tried on them.
BODIES = {
    (*FLOATS, *INTEGERS): [
        "x * 2 + 1", "1 - x", "x / 3", "x // 3", "x % 3", "-x", "abs(x)", "x ** 2", "2 ** x", "divmod(x, 3)", "3 / x",
        "x * 300", "x - 7", "x + np.int8(100)", "x * np.float32(1.1)", "np.float32(0.1) + x", "x == 0", "x < 2.5",
        "np.add(x, x)", "np.multiply(x, 3)", "np.maximum(x, 0)", "np.minimum(x, 0.0)", "np.fmax(x, -0.0)",
        "np.fmin(x, 0)", "np.clip(x, 0, 3)", "x.clip(-0.0, 5)", "np.sign(x)", "np.where(x > 0, x, -x)",
        "np.where(x == 0, 1, x)", "x.astype(np.int64)", "x.astype('f4')", "x.astype(bool)", "np.float32(x)",
        "np.power(x, 2)", "np.square(x)", "np.exp(x)", "np.log(x)", "np.sqrt(x)", "np.sin(x)", "np.arctan2(x, 2)",
        "np.copysign(x, -1)", "np.signbit(x)", "np.isnan(x)", "np.floor(x)", "np.rint(x)", "np.round(x, 1)",
        "np.hypot(x, 3)", "np.float_power(x, 2)", "np.reciprocal(x)", "np.heaviside(x, 0.5)", "np.stack([x, x * 2])",
        "[x, 2.5]", "(x, 1)", "{'a': x, 'b': [1, 2]}", "x if x is not None else 0", "x.sum()", "x.mean()", "x.max()",
        "np.log1p(np.abs(x))", "np.nan_to_num(x)", "x[()]", "x[None]", "np.expand_dims(x, 0)[0] * 2", "x.reshape(1)",
        "np.fmod(x, 2)", "np.logaddexp(x, 1)", "x.T + 1", "np.isclose(x, 1)", "type(x)(3) + x", "int(2.7) * x",
    ],
    INTEGERS: [
        "x & 3", "x | 1", "x ^ x", "x << 3", "x >> 1", "~x", "x * x", "x * x * x", "x + x", "x - 2 * x", "-x - 1",
        "abs(-x)", "np.bitwise_count(x)", "np.gcd(x, 6)", "x * 2**40", "2**62 + x", "x + 2**63", "np.invert(x)",
        "np.left_shift(x, 60)", "x // 0", "x % 0", "7 // x", "x ** 3", "np.negative(x)", "np.int8(100) + x",
        "np.uint8(200) * x", "np.int8(-100) - x", "np.int64(7) // x", "np.int16(5) ** np.abs(x % 3)",
        "np.int8(101) - (abs(np.clip(x, -5, 3).astype('i1')) - np.int8(27))",
    ],
    ("bool",): [
        "x & True", "~x", "x | False", "x + 1", "x * 2.5", "-x", "x - x", "np.logical_not(x)", "x ^ True", "x + x",
        "x == 1", "np.where(x, 1.5, 2)", "x.astype(int)", "x / 2", "x.sum()",
    ],
    VECTORS: [
        "x * 2", "x[::-1]", "np.exp(x[::-1])", "np.log(x[::-1])", "np.power(x[::-1], 1.5)", "x[::-1] ** 0.5",
        "np.sin(x[::2])", "np.exp(x[::2])", "np.tanh(x[1::2])", "np.exp(x)", "np.cbrt(x)", "np.expm1(x)",
        "np.arctan(x[::-1])", "x.sum()", "x[::-1].sum()", "x[::2].sum()", "x[1:].mean()", "x[::-1].mean()", "x.std()",
        "x[::2].var()", "x.prod()", "x[::-1].prod()", "x.cumsum()", "x[::-1].cumsum()", "np.sort(x)", "np.argsort(x)",
        "np.sort(x[::-1])", "np.argmax(x)", "x[::-1].argmin()", "x.max()", "x.min()", "x[::2].max()", "x - x.mean()",
        "x / np.sqrt((x * x).sum())", "(x - x.min()) / (x.max() - x.min())", "np.maximum(x, x[::-1])",
        "np.minimum(x[::-1], 0)", "np.fmin(x, x[::-1])", "np.clip(x, x.min(), 1)", "x[[0, 2]]", "x[np.array([1, 0])]",
        "np.exp(x[[0, 2]])", "np.concatenate([x, x[::-1]])", "np.exp(np.concatenate([x, x]))", "np.stack([x, x], 1)",
        "np.exp(np.stack([x, x], 1)).sum(0)", "np.outer(x, x)", "x @ x", "np.dot(x, x)", "x[:, None] * x",
        "(x[:, None] * x).sum(0)", "(x[:, None] * x).T.copy().sum(0)", "np.exp((x[:, None] * x).T)", "x.copy()[::-1]",
        "np.exp(x.copy(order='K'))", "sum(x)", "[y * 2 for y in x]", "x[0] * x[-1]", "x[-1] ** 2", "np.where(x > 1, x, 0)",
        "np.hypot(x, x[::-1])", "np.arctan2(x[::-1], x)", "np.copysign(x, x[::-1])", "np.round(x[::-1], 2)",
        "np.count_nonzero(x > 1)", "np.any(x > 2)", "x.astype('f4').sum()", "x.astype('f4')[::-1].mean()", "np.digitize(x, [1, 2])",
        "x[1:] - x[:-1]", "np.exp(x[1:] - x[:-1])", "np.add.reduce(x)", "np.maximum.reduce(x)", "np.add.accumulate(x)",
        "np.linalg.norm(x)", "np.median(x)", "np.exp(-x) / np.exp(-x).sum()", "x.reshape(1, -1).sum(1)", "(x > 1).sum()",
        "np.log(np.abs(x) + 1).mean()", "x.tolist()", "x[x > 1].sum()", "x[0].item()", "np.ascontiguousarray(x[::-1])",
        "np.exp(np.asarray(x))", "np.flip(x)",
    ],
    MATRICES: [
        "x.sum()", "x.sum(0)", "x.sum(1)", "x.sum(-1)", "x.T.sum(0)", "x.T.sum(1)", "x.T.copy().sum(0)", "x.T.copy().sum(1)",
        "x.T.copy('K').sum(0)", "x.T.copy('F').sum(0)", "x.mean((0, 1))", "x[::-1].sum(0)", "x[:, ::-1].sum(1)",
        "x[::2, 1:].sum()", "x[:, 0].sum()", "x[:, ::2].mean(0)", "x.T.mean()", "x.std(0)", "x.T.std(1)", "x.T.reshape(-1).sum()",
        "x.reshape(-1)[::-1].sum()", "x.ravel().cumsum()", "x.T.cumsum(0)", "x.T.cumsum(1)", "np.exp(x.T)", "np.exp(x.T).sum(0)",
        "np.exp(x[::-1])", "np.exp(x[:, 0])", "np.exp(x[:, ::-1])", "np.log(x.T.copy())", "np.swapaxes(x, 0, 1).sum(0)",
        "np.transpose(x).prod(0)", "(x * x.T.T).sum(1)", "(x + x[0]).sum(0)", "np.exp(x + x[:, :1])", "x.flatten('F').sum()",
        "x.ravel('F').sum()", "x.reshape(-1, order='F').sum()", "x.astype('f4', order='F').sum(0)", "x.T.astype('f4').sum(0)",
        "np.stack([x, x]).sum(0)", "np.stack([x, x], -1).sum((0, 2))", "np.concatenate([x, x], 1).sum(1)", "np.sort(x, 0)",
        "np.argsort(x.T)", "x.max(0)", "x.T.min(1)", "x.argmax()", "x.T.argmax()", "x @ x.T", "np.einsum('ij->j', x)",
        "x[1] - x[0]", "x[[0, 2]].sum(0)", "x[:, [0, 2]].sum(0)", "np.exp(x[:, [2, 0]])", "x[None].sum(1)", "x.squeeze().sum(0)",
        "np.where(x > 1, x, x[::-1]).sum(0)", "np.zeros_like(x) + x.T.sum()", "np.sum(x, axis=0, keepdims=True)",
        "np.mean(x, keepdims=True)", "np.var(x, axis=1, ddof=1)", "np.var(x[:1], axis=0, ddof=1)", "x[:0].sum()", "x[:0].mean()",
        "np.expand_dims(x, 1).sum(0)", "np.maximum(x, x[::-1]).sum(1)", "np.add.reduce(x.T)", "np.add.reduce(x, axis=1)",
    ],
    ("time",): [
        "x + np.timedelta64(1, 'D')", "x - np.datetime64('2024-01-01')", "x.astype('M8[D]')", "(x - np.datetime64('2024-01-01')) // np.timedelta64(1, 'h')",
        "x > np.datetime64('2024-01-01')", "np.isnat(x)", "x.astype('i8')", "np.maximum(x, np.datetime64('2024-01-01T05'))",
    ],
}  # fmt: skip

# Bodies for the frames below.
SHORT = {
    "mild": ["x * 2", "np.log(x)", "np.where(x > 1, x, 0)", "np.float32(x) + 1"],
    "f8": ["x + 1", "np.sqrt(x)", "1 / x", "x.astype(np.int64)"],
    "small": ["x * 3", "x // 2", "12 // x", "np.exp(x)"],
    "vm": ["x * 2", "x.sum()", "np.exp(x[::-1])"],
}

# Programs that define the function `f` with a body; each dataset runs them again. The test checks `log` afterwards.
FRAMES = {
    "append": "def f(x):\n    log.append(1)\n    return BODY",
    "append_bound": "note = log.append\ndef f(x):\n    note(1)\n    return BODY",
    "or_append": "f = lambda x: log.append(1) or BODY",
    "in_place_list": "def f(x):\n    mine = log\n    mine += [1]\n    return BODY",
    "in_place_default": "def f(x, seen=log):\n    seen += [1]\n    return BODY",
    "keyword_default": "def f(x, *, seen=log):\n    seen.extend([1])\n    return BODY",
    "in_place_array": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    b = a\n    b += 1\n    return BODY",
    "in_place_array_element": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    a[0] += 1\n    return BODY",
    "out": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    np.add(a, 1, out=a)\n    return BODY",
    "out_third": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    np.add(a, 1, a)\n    return BODY",
    "out_of_sum": "a = np.ones(2)\nlog.append(a)\ndef f(x):\n    np.cumsum(a, 0, None, a)\n    return BODY",
    "out_of_method": "a = np.ones(2)\nlog.append(a)\ndef f(x):\n    a.cumsum(0, None, a)\n    return BODY",
    "out_of_clip": "a = np.ones(2)\nlog.append(a)\ndef f(x):\n    np.clip(a, 2, 3, a)\n    return BODY",
    "at": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    np.add.at(a, 0, 1)\n    return BODY",
    "copyto": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    np.copyto(a, a + 1)\n    return BODY",
    "made_writable": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    a.flags['WRITEABLE'] = True\n    b = a\n    b += 1\n    return BODY",
    "fill": "a = np.zeros(2)\nlog.append(a)\ndef f(x):\n    a.fill(a[0] + 1)\n    return BODY",
    "sort": "a = np.array([2, 1])\nlog.append(a)\ndef f(x):\n    a.sort()\n    a[:] = a[::-1] + 1\n    return BODY",
    "view": "a = np.zeros(4)\nlog.append(a)\ndef f(x):\n    v = a[::2]\n    v -= 1\n    return BODY",
    "reshaped": "a = np.zeros(4)\nlog.append(a)\ndef f(x):\n    a.reshape(2, 2)[0] += 1\n    return BODY",
    "conditional_alias": "def f(x):\n    mine = log if log is not None else []\n    mine += [1]\n    return BODY",
    "or_alias": "log.append(0)\ndef f(x):\n    mine = log or []\n    mine.append(1)\n    return BODY",
    "alias_in_tuple": "def f(x):\n    mine, = (log,)\n    mine.append(1)\n    return BODY",
    "alias_in_list": "def f(x):\n    for mine in [log]:\n        mine.append(1)\n    return BODY",
    "alias_in_dict": "def f(x):\n    d = {'a': log}\n    d['a'] += [1]\n    return BODY",
    "alias_in_argument": "def g(mine):\n    mine += [1]\ndef f(x):\n    g(log)\n    return BODY",
    "alias_by_star": "def g(*mine):\n    mine[0].append(1)\ndef f(x):\n    g(*[log])\n    return BODY",
    "alias_of_copy": "def f(x):\n    mine = list(log)\n    mine += [1]\n    log.append(len(mine))\n    return BODY",
    "set_item": "d = {'n': 0}\nlog.append(d)\ndef f(x):\n    d['n'] += 1\n    return BODY",
    "setdefault": "d = {}\nlog.append(d)\ndef f(x):\n    d[len(d)] = 1\n    return BODY",
    "update": "d = collections.Counter()\nlog.append(d)\ndef f(x):\n    d.update(n=1)\n    return BODY",
    "default_dict": "d = collections.defaultdict(int)\nlog.append(d)\ndef f(x):\n    d[len(d)]\n    return BODY",
    "deque": "d = collections.deque(maxlen=3)\nlog.append(d)\ndef f(x):\n    d.append(len(d))\n    return BODY",
    "set": "s = set()\nlog.append(s)\ndef f(x):\n    s.add(len(s))\n    return BODY",
    "delete": "log += range(99)\ndef f(x):\n    del log[-1]\n    return BODY",
    "slice": "def f(x):\n    log[len(log):] = [1]\n    return BODY",
    "global": "n = 0\ndef f(x):\n    global n\n    n += 1\n    log[:] = [n]\n    return BODY",
    "nonlocal": "def make():\n    n = 0\n    def f(x):\n        nonlocal n\n        n += 1\n        return BODY, n\n    return f\nf = make()",
    "nonlocal_of_helper": "def make():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n        return n\n    return lambda x: (BODY, g())\nf = make()",
    "counter": "c = itertools.count()\ndef f(x):\n    return BODY, next(c)",
    "iterator": "it = iter(range(1000))\ndef f(x):\n    for n in it:\n        break\n    return BODY, n",
    "iterator_in_zip": "it = iter(range(10**6))\ndef f(x):\n    return BODY, [n for n, _ in zip(it, range(2))]",
    "iterator_unpacked": "it = zip(*[iter(range(10**6))] * 2)\ndef f(x):\n    (a, b), = [next(it)]\n    return BODY, a, b",
    "generator": "def g():\n    n = 0\n    while True:\n        yield n\n        n += 1\nit = g()\ndef f(x):\n    return BODY, next(it)",
    "generator_sent": "def g():\n    n = 0\n    while True:\n        n += (yield n) or 0\nit = g()\nnext(it)\ndef f(x):\n    return BODY, it.send(1)",
    "function_attribute": "def f(x):\n    f.n = getattr(f, 'n', 0) + 1\n    log[:] = [f.n]\n    return BODY",
    "helper_attribute": "def g():\n    pass\ng.calls = 0\ndef f(x):\n    g.calls += 1\n    log[:] = [g.calls]\n    return BODY",
    "class_attribute": "class A:\n    n = 0\ndef f(x):\n    A.n += 1\n    log[:] = [A.n]\n    return BODY",
    "instance_attribute": "class A:\n    n = 0\na = A()\ndef f(x):\n    a.n += 1\n    log[:] = [a.n]\n    return BODY",
    "setattr": "class A:\n    n = 0\ndef f(x):\n    setattr(A, 'n', A.n + 1)\n    return BODY, A.n",
    "call": "class A:\n    n = 0\n    def __call__(self, x):\n        self.n += 1\n        return BODY, self.n\nf = A()",
    "method": "class A:\n    def __init__(self):\n        self.log = log\n    def f(self, x):\n        self.log.append(1)\n        return BODY\nf = A().f",
    "property": "class A:\n    @property\n    def n(self):\n        log.append(1)\n        return 1\na = A()\nf = lambda x: (BODY, a.n)",
    "getattr_hook": "class A:\n    def __getattr__(self, name):\n        note(name)\n        return 1\na = A()\nf = lambda x: (BODY, a.n)",
    "getattribute_hook": "class A:\n    n = 1\n    def __getattribute__(self, name):\n        note(name)\n        return object.__getattribute__(self, name)\na = A()\nf = lambda x: (BODY, a.n)",
    "descriptor": "class D:\n    def __get__(self, obj, kind):\n        log.append(1)\n        return 1\nclass A:\n    d = D()\nf = lambda x: (BODY, A().d, A.d)",
    "shadowed_descriptor": "class D:\n    def __get__(self, obj, kind):\n        log.append(1)\n        return 1\n    def __set__(self, obj, v):\n        pass\nclass A:\n    d = D()\na = A()\na.__dict__['d'] = 5\nf = lambda x: (BODY, a.d)",
    "deleter": "class D:\n    def __get__(self, obj, kind):\n        return 7\n    def __delete__(self, obj):\n        pass\nclass A:\n    d = D()\na = A()\nvars(a)['d'] = 5\nf = lambda x: (BODY, a.d)",
    "metaclass": "class M(type):\n    def __getattribute__(cls, name):\n        note(1)\n        return type.__getattribute__(cls, name)\nclass A(metaclass=M):\n    n = 1\nf = lambda x: (BODY, A.n)",
    "instancecheck": "class M(type):\n    def __instancecheck__(cls, x):\n        log.append(1)\n        return False\nclass A(metaclass=M):\n    pass\nf = lambda x: 0 if isinstance(x, A) else BODY",
    "subclasshook": "import abc\nclass A(abc.ABC):\n    @classmethod\n    def __subclasshook__(cls, k):\n        log.append(1)\n        return NotImplemented\nf = lambda x: 0 if isinstance(x, A) else BODY",
    "dict_subclass": "class D(dict):\n    def __getitem__(self, k):\n        log.append(k)\n        return 1\nd = D()\nf = lambda x: (BODY, d['a'])",
    "missing": "class D(dict):\n    def __missing__(self, k):\n        log.append(k)\n        return 1\nd = D()\nf = lambda x: (BODY, d['a'])",
    "list_subclass": "class L(list):\n    def __len__(self):\n        note(1)\n        return 1\nl = L()\nf = lambda x: (BODY, len(l))",
    "list_subclass_iadd": "class L(list):\n    def __iadd__(self, o):\n        log.append(1)\n        return self\nl = L()\ndef f(x):\n    m = l\n    m += [1]\n    return BODY",
    "int_subclass": "class I(int):\n    def __mul__(self, o):\n        log.append(1)\n        return 2\ni = [I(3)]\nf = lambda x: (BODY, i[0] * 2)",
    "int_subclass_sum": "class I(int):\n    def __radd__(self, o):\n        log.append(1)\n        return 2\ni = (I(3),)\nf = lambda x: (BODY, sum(i))",
    "float_subclass": "class F(float):\n    def __add__(self, o):\n        log.append(1)\n        return 2.0\nv = F(3)\nf = lambda x: (BODY, v + 1)",
    "str_subclass": "class S(str):\n    def __hash__(self):\n        note(1)\n        return str.__hash__(self)\nv = S('a')\nd = {'a': 1}\nf = lambda x: (BODY, d[v])",
    "array_subclass": "class A(np.ndarray):\n    def __getitem__(self, k):\n        log.append(1)\n        return 1\na = np.zeros(3).view(A)\nf = lambda x: (BODY, a[0])",
    "array_function": "class A:\n    def __array__(self, dtype=None, copy=None):\n        log.append(1)\n        return np.ones(1)\na = A()\nf = lambda x: (BODY, np.add(a, 1))",
    "array_priority": "class A:\n    __array_ufunc__ = None\n    def __rmul__(self, o):\n        log.append(1)\n        return 2\na = A()\nf = lambda x: (BODY, x * a)",
    "index": "class I:\n    def __index__(self):\n        log.append(1)\n        return 0\ni = I()\nf = lambda x: (BODY, [5][i])",
    "len_hook": "class A:\n    def __len__(self):\n        log.append(1)\n        return 2\na = A()\nf = lambda x: (BODY, len(a))",
    "bool_hook": "class A:\n    def __bool__(self):\n        log.append(1)\n        return True\na = A()\nf = lambda x: BODY if a else 0",
    "eq_hook": "class A:\n    def __eq__(self, o):\n        log.append(1)\n        return True\na = A()\nf = lambda x: BODY if a == 1 else 0",
    "contains_hook": "class A:\n    def __contains__(self, o):\n        log.append(1)\n        return True\na = A()\nf = lambda x: BODY if 1 in a else 0",
    "eq_in_list": "class A:\n    def __eq__(self, o):\n        log.append(1)\n        return True\na = [A()]\nf = lambda x: BODY if 1 in a else 0",
    "format_hook": "class A:\n    def __format__(self, s):\n        log.append(1)\n        return 'a'\na = A()\nf = lambda x: (BODY, len(f'{a}'))",
    "repr_in_list": "class A:\n    def __repr__(self):\n        log.append(1)\n        return 'a'\na = [A()]\nf = lambda x: (BODY, len(f'{a}'))",
    "iter_hook": "class A:\n    def __iter__(self):\n        log.append(1)\n        return iter([1, 2])\na = A()\nf = lambda x: (BODY, sum(a))",
    "unpack_hook": "class A:\n    def __iter__(self):\n        log.append(1)\n        return iter([1, 2])\na = A()\ndef f(x):\n    p, q = a\n    return BODY, p",
    "mapping_hook": "class A:\n    def keys(self):\n        log.append(1)\n        return ['k']\n    def __getitem__(self, k):\n        return 2\na = A()\ndef g(k):\n    return k\nf = lambda x: (BODY, g(**a))",
    "new": "class A:\n    def __new__(cls):\n        log.append(1)\n        return object.__new__(cls)\n    n = 1\nf = lambda x: (BODY, A().n)",
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int\n    def __post_init__(self):\n        log.append(self.n)\nf = lambda x: (BODY, A(3).n)",
    "named_tuple_new": "class P(collections.namedtuple('P', 'a')):\n    def __new__(cls, a):\n        log.append(1)\n        return tuple.__new__(cls, (a,))\nf = lambda x: (BODY, P(3)[0])",
    "named_tuple_getitem": "class P(collections.namedtuple('P', 'a')):\n    def __getitem__(self, i):\n        log.append(1)\n        return 1\np = P(3)\nf = lambda x: (BODY, p[0])",
    "decorated": "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def h(*a):\n        log.append(1)\n        return g(*a)\n    return h\n@deco\ndef f(x):\n    return BODY",
    "lru_cache": "import functools\n@functools.lru_cache\ndef g(n):\n    log.append(n)\n    return len(log)\nf = lambda x: (BODY, g(1), g(2))",
    "cached_property": "import functools\nclass A:\n    @functools.cached_property\n    def n(self):\n        log.append(1)\n        return 1\na = A()\nf = lambda x: (BODY, a.n)",
    "single_dispatch": "import functools\n@functools.singledispatch\ndef g(n):\n    log.append(1)\n    return 1\nf = lambda x: (BODY, g(1))",
    "partial": "import functools\ndef g(l, x):\n    l.append(1)\n    return BODY\nf = functools.partial(g, log)",
    "partial_keyword": "import functools\ndef g(x, l):\n    l.append(1)\n    return BODY\nf = functools.partial(g, l=log)",
    "keywords_of_partial": "import functools\ndef g(x, n):\n    return n\nh = functools.partial(g, n=0)\ndef f(x):\n    h.keywords['n'] = h.keywords['n'] + 1\n    return BODY, h(1)",
    "partial_method": "import functools\ndef f(x):\n    functools.partial(log.append, 1)()\n    return BODY",
    "itemgetter": "import operator\nclass D(dict):\n    def __getitem__(self, k):\n        log.append(k)\n        return 1\nd, get = D(), operator.itemgetter('a')\nf = lambda x: (BODY, get(d))",
    "method_caller": "import operator\nnote = operator.methodcaller('append', 1)\ndef f(x):\n    note(log)\n    return BODY",
    "operator_iadd": "import operator\ndef f(x):\n    operator.iadd(log, [1])\n    return BODY",
    "operator_setitem": "import operator\nlog.append(0)\ndef f(x):\n    operator.setitem(log, 0, log[0] + 1)\n    return BODY",
    "list_append": "def f(x):\n    list.append(log, 1)\n    return BODY",
    "sort_key": "def key(v):\n    log.append(v)\n    return v\nf = lambda x: (BODY, sorted([2, 1], key=key))",
    "max_key": "def key(v):\n    log.append(v)\n    return v\nf = lambda x: (BODY, max([2, 1], key=key))",
    "own_sort_key": "def key(v):\n    log.append(v)\n    return v\ndef f(x):\n    l = [2, 1]\n    l.sort(key=key)\n    return BODY, l",
    "map": "def note(v):\n    log.append(v)\n    return v\nf = lambda x: (BODY, list(map(note, [1, 2])))",
    "filter": "def note(v):\n    log.append(v)\n    return v\nf = lambda x: (BODY, list(filter(note, [1, 2])))",
    "reduce": "import functools\ndef note(a, b):\n    log.append(a)\n    return a + b\nf = lambda x: (BODY, functools.reduce(note, [1, 2, 3]))",
    "iter_sentinel": "def note():\n    log.append(1)\n    return len(log) % 3\nf = lambda x: (BODY, sum(iter(note, 0)))",
    "any_of_generator": "f = lambda x: (BODY, any(log.append(v) for v in [1, 2]))",
    "comprehension": "f = lambda x: (BODY, len([log.append(v) for v in [1, 2]]))",
    "dict_of_functions": "fs = {'a': log.append}\ndef f(x):\n    fs['a'](1)\n    return BODY",
    "list_of_functions": "fs = [lambda: log.append(1)]\ndef f(x):\n    for g in fs:\n        g()\n    return BODY",
    "vectorize": "def g(v):\n    log.append(1)\n    return v\nv = np.vectorize(g, otypes=[float])\nf = lambda x: (BODY, v(1.0))",
    "vectorize_on_it": "def g(v):\n    log.append(1)\n    return v\nv = np.vectorize(g, otypes=[float])\nf = lambda x: v(BODY)",
    "from_py_func": "def g(v):\n    log.append(1)\n    return v\nu = np.frompyfunc(g, 1, 1)\nf = lambda x: (BODY, float(u(1.0)))",
    "from_py_func_on_it": "def g(v):\n    log.append(1)\n    return v\nu = np.frompyfunc(g, 1, 1)\ndef f(x):\n    u(x)\n    return BODY",
    "from_py_func_reduce": "def g(a, b):\n    log.append(1)\n    return a + b\nu = np.frompyfunc(g, 2, 1)\nf = lambda x: (BODY, u.reduce([1, 2, 3]))",
    "apply_along_axis": "def g(v):\n    log.append(1)\n    return v.sum()\nf = lambda x: (BODY, np.apply_along_axis(g, 0, np.ones((2, 2))))",
    "piecewise": "def g(v):\n    log.append(1)\n    return v\nf = lambda x: (BODY, np.piecewise(1.0, [True], [g]))",
    "fromfunction": "def g(v):\n    log.append(1)\n    return v\nf = lambda x: (BODY, np.fromfunction(g, (2,)))",
    "random": "rng = np.random.default_rng(0)\nf = lambda x: (BODY, rng.random())",
    "random_method": "draw = np.random.default_rng(0).random\nf = lambda x: (BODY, draw())",
    "random_module": "np.random.seed(0)\nf = lambda x: (BODY, np.random.rand())",
    "random_import": "from numpy.random import rand\nnp.random.seed(0)\nf = lambda x: (BODY, rand())",
    "random_import_inside": "np.random.seed(0)\ndef f(x):\n    from numpy.random import rand\n    return BODY, rand()",
    "random_python": "import random\nr = random.Random(0)\nf = lambda x: (BODY, r.random())",
    "shuffle": "import random\nr = random.Random(0)\nl = [1, 2, 3]\ndef f(x):\n    r.shuffle(l)\n    return BODY, list(l)",
    "exec": "def f(x):\n    exec('log.append(1)', {'log': log})\n    return BODY",
    "eval": "f = lambda x: (BODY, eval('len(log.append(1) or log)'))",
    "globals": "def f(x):\n    globals()['log'].append(1)\n    return BODY",
    "vars": "class A:\n    n = 0\na = A()\ndef f(x):\n    vars(a)['n'] = a.n + 1\n    return BODY, a.n",
    "dict_of_instance": "class A:\n    pass\na = A()\na.n = 0\ndef f(x):\n    a.__dict__['n'] += 1\n    return BODY, a.n",
    "defaults_of_function": "def g(l=[]):\n    pass\ndef f(x):\n    g.__defaults__[0].append(1)\n    return BODY, len(g.__defaults__[0])",
    "closure_of_function": "def make():\n    l = []\n    def g():\n        return l\n    return g\ng = make()\ndef f(x):\n    g().append(1)\n    return BODY, len(g())",
    "walrus": "f = lambda x: (BODY, (n := 1), log.append(n) or n)",
    "walrus_in_comprehension": "def f(x):\n    return BODY, [last := v for v in [1, 2]], last, log.append(last) or 1",
    "unpacking": "log.append(0)\ndef f(x):\n    log[0], y = log[0] + 1, 2\n    return BODY",
    "augmented_item": "d = {'a': [0]}\nlog.append(d)\ndef f(x):\n    d['a'][0] += 1\n    return BODY",
    "for_target": "log.append(0)\ndef f(x):\n    for log[0] in [log[0] + 1]:\n        pass\n    return BODY",
    "context": "import contextlib\n@contextlib.contextmanager\ndef c():\n    log.append(1)\n    yield\ndef f(x):\n    with c():\n        return BODY",
    "errstate": "def f(x):\n    with np.errstate(all='ignore'):\n        return BODY",
    "errstate_raise": "def f(x):\n    try:\n        with np.errstate(all='raise'):\n            return BODY\n    except FloatingPointError:\n        return np.zeros_like(BODY2)",
    "seterr": "def f(x):\n    old = np.seterr(all='ignore')\n    y = BODY\n    np.seterr(**old)\n    return y",
    "except": "def f(x):\n    try:\n        return BODY\n    except Exception:\n        return np.zeros_like(BODY2)",
    "except_of_helper": "def g(x):\n    try:\n        return BODY\n    except Exception:\n        return np.zeros_like(BODY2)\nf = lambda x: g(x)",
    "except_around_helper": "def g(x):\n    return BODY\ndef f(x):\n    try:\n        return g(x)\n    except ArithmeticError:\n        return np.zeros_like(BODY2)",
    "finally": "def f(x):\n    try:\n        return BODY\n    finally:\n        log.append(1)",
    "suppress": "import contextlib\ndef f(x):\n    y = np.zeros_like(BODY2)\n    with contextlib.suppress(FloatingPointError):\n        y = BODY\n    return y",
    "warn": "import warnings\ndef f(x):\n    warnings.warn('here')\n    return BODY",
    "raise": "def f(x):\n    if np.ndim(x) > 9:\n        raise ValueError\n    return BODY",
    "assert": "def f(x):\n    assert np.ndim(x) < 9\n    return BODY",
    "print": "import io\ns = io.StringIO()\nlog.append(s)\ndef f(x):\n    print('x', file=s)\n    return BODY",
    "write": "import io\ns = io.StringIO()\ndef f(x):\n    s.write('x')\n    log[:] = [s.tell()]\n    return BODY",
    "environment": "import os\ndef f(x):\n    os.environ['DASKDIST_CORPUS'] = str(int(os.environ.get('DASKDIST_CORPUS', 0)) + 1)\n    log[:] = [1]\n    return BODY",
    "stack": "import sys\ndef f(x):\n    log.append(sys._getframe().f_code.co_name)\n    return BODY",
    "gc": "import weakref\nclass A:\n    pass\ndef f(x):\n    weakref.finalize(A(), log.append, 1)\n    return BODY",
    "del_hook": "class A:\n    def __del__(self):\n        log.append(1)\ndef f(x):\n    A()\n    return BODY",
    "kept": "def f(x):\n    log.append(x)\n    return BODY",
    "kept_result": "def f(x):\n    y = BODY\n    log.append(y)\n    return y",
    "previous": "prev = [0]\ndef f(x):\n    y = prev[0]\n    prev[0] = np.sum(x)\n    return BODY, y",
    "memo": "memo = {}\ndef f(x):\n    k = float(np.sum(x))\n    if k not in memo:\n        memo[k] = len(memo)\n    return BODY, memo[k]",
    "branch": "def f(x):\n    if np.sum(x) > 2:\n        return BODY\n    return BODY",
    "ternary": "f = lambda x: BODY if np.sum(x) > 2 else BODY2",
    "and": "f = lambda x: (np.sum(x) > 2) and True",
    "chained": "f = lambda x: 1 < np.sum(x) < 3",
    "while": "def f(x):\n    n = 0\n    while n < np.sum(x) and n < 5:\n        n += 1\n    return BODY, n",
    "own_list": "def f(x):\n    l = []\n    for n in range(3):\n        l.append(n)\n    l += [4]\n    l[0] = 9\n    return BODY, l",
    "own_dict": "def f(x):\n    d = dict(a=1)\n    d.update(b=2)\n    d['c'] = BODY\n    d.pop('a')\n    return d",
    "own_set": "def f(x):\n    s = {1, 2}\n    s.add(3)\n    return BODY, len(s)",
    "own_cell": "def f(x):\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n        return n\n    return BODY, g(), g(), n",
    "own_array": "def f(x):\n    a = np.zeros(2)\n    a[0] = 1\n    return BODY, a",
    "own_generator": "def f(x):\n    def g():\n        yield 1\n        yield BODY\n    return tuple(g())",
    "own_alias": "def f(x):\n    a = [1]\n    b = a\n    b += [2]\n    return BODY, len(a)",
    "own_tuple": "def f(x):\n    a = (1,)\n    b = a\n    b += (2,)\n    return BODY, len(a), len(b)",
    "recursion": "def g(x, n):\n    return x if n == 0 else g(x, n - 1)\nf = lambda x: (BODY, g(x, 3))",
    "deep_recursion": "def g(x, n):\n    return x if n == 0 else g(x, n - 1)\nf = lambda x: (BODY, g(x, 60))",
    "long_loop": "def f(x):\n    n = 0\n    for i in range(7000):\n        n += 1\n    return BODY, n",
    "star": "def g(*a, k=1, **kw):\n    return a[0] * k + len(a) + len(kw)\nf = lambda x: (BODY, g(*[1, 2], k=3, **{'z': 1}))",
    "named_tuple": "P = collections.namedtuple('P', 'a b')\nf = lambda x: P(BODY, b=1)",
    "typed_tuple": "import typing\nclass P(typing.NamedTuple):\n    a: object\n    b: int = 3\nf = lambda x: (P(BODY).a, P(1).b)",
    "named_tuple_hand_made": "class P(tuple):\n    _fields = ('a',)\n    def __new__(cls, a):\n        log.append(1)\n        return tuple.__new__(cls, (a,))\nf = lambda x: (BODY, P(3)[0])",
    "typed_tuple_method": "import typing\nclass P(typing.NamedTuple):\n    a: object\n    def g(self):\n        log.append(1)\n        return self.a\nf = lambda x: P(BODY).g()",
    "typed_tuple_property": "import typing\nclass P(typing.NamedTuple):\n    a: object\n    @property\n    def n(self):\n        log.append(1)\n        return 1\np = P(1)\nf = lambda x: (BODY, p.n)",
    "typed_tuple_operator": "import typing\nclass P(typing.NamedTuple):\n    a: object\n    def __sub__(self, o):\n        log.append(1)\n        return 3\np = P(1)\nf = lambda x: (BODY, p - 1)",
    "typed_tuple_array_hook": "import typing\nclass P(typing.NamedTuple):\n    a: object\n    def __array__(self, *a, **k):\n        log.append(1)\n        return np.ones(1)\np = P(1)\nf = lambda x: (BODY, np.add(p, 1))",
    "typed_tuple_class_attribute": "import typing\nclass P(typing.NamedTuple):\n    a: object\n    seen = log\np = P(1)\ndef f(x):\n    p.seen.append(1)\n    P.seen.append(2)\n    return BODY",
    "named_tuple_default": "P = collections.namedtuple('P', 'a b', defaults=(log,))\ndef f(x):\n    P(1).b.append(2)\n    return BODY",
    "named_tuple_table": "P = collections.namedtuple('P', 'a')\ndef f(x):\n    t = P._field_defaults\n    t[len(t)] = 1\n    return BODY, len(t)",
    "named_tuple_replace": "P = collections.namedtuple('P', 'a b', defaults=(2,))\np = P(1)\nf = lambda x: (p._replace(a=BODY).a, p._asdict()['b'], P._make([BODY, 1])[0])",
    "slots": "class A:\n    __slots__ = ('n',)\na = A()\na.n = 3\nf = lambda x: (BODY, a.n)",
    "inherited": "class A:\n    n = 3\n    def g(self, x):\n        return BODY\nclass B(A):\n    pass\nb = B()\nf = lambda x: (b.g(x), b.n)",
    "super": "class A:\n    def g(self, x):\n        return BODY\nclass B(A):\n    def g(self, x):\n        return super().g(x)\nb = B()\nf = lambda x: b.g(x)",
    "static": "class A:\n    @staticmethod\n    def g(x):\n        return BODY\n    @classmethod\n    def h(cls, x):\n        return cls.g(x)\nf = lambda x: (A.g(x), A().h(x))",
    "match": "def f(x):\n    match 3:\n        case 3:\n            return BODY\n        case _:\n            return 0",
    "match_class": "def f(x):\n    match x:\n        case np.float64():\n            return BODY, 1\n        case np.int64():\n            return BODY, 2\n    return BODY, 3",
    "match_float": "class F(float):\n    pass\nv = F(3)\ndef f(x):\n    match v:\n        case float():\n            return BODY, 1\n    return BODY, 2",
    "match_mapping": "d = collections.OrderedDict(a=1)\ndef f(x):\n    match d:\n        case {'a': v}:\n            return BODY, v\n    return BODY, 9",
    "match_sequence": "d = collections.deque([1, 2])\ndef f(x):\n    match d:\n        case [a, b]:\n            return BODY, a\n    return BODY, 9",
    "star_unpack": "def f(x):\n    a, *b, c = [1, 2, 3, 4]\n    return BODY, a, len(b), c",
    "nested_comprehension": "f = lambda x: (BODY, [a * b for a in range(3) for b in range(a) if b])",
    "slice_object": "l = [1, 2, 3]\nf = lambda x: (BODY, l[1:], l[slice(None, None, 2)])",
    "string": "f = lambda x: (BODY, f'{3:>4}' + 'a'.upper() + '%d' % 3)",
    "shape_of_element": "f = lambda x: (BODY, len(np.shape(x)), x.ndim, x.dtype.itemsize)",
    "dtype_branch": "f = lambda x: BODY if x.dtype == np.float64 else -x",
    "isinstance": "f = lambda x: BODY if isinstance(x, (np.generic, np.ndarray)) else 0",
    "is_element": "f = lambda x: (BODY, x is x, type(x) is np.float64)",
    "is_function": "import operator\nf = lambda x: (BODY, operator.is_(np.sum(x) > 1, np.sum(x) > 2))",
    "is_attribute": "P = collections.namedtuple('P', 'a b')\ndef f(x):\n    p = P(np.sum(x) > 1, np.sum(x) > 2)\n    return BODY, p.a is p.b",
    "is_true": "f = lambda x: (BODY, (np.sum(x) > 1) is np.True_)",
    "is_constant": "yes = np.bool_(True)\nf = lambda x: (BODY, (np.sum(x) > 1) is yes)",
    "is_outside": "class A:\n    pass\na = A()\nb = [a, A()]\nf = lambda x: (BODY, b[0] is a, b[1] is not a, type(x) is np.float64)",
    "id": "f = lambda x: (BODY, id(log) == id(log))",
}

# Predicates, which get the values of `small`.
PREDICATES = [
    "x > 2", "x % 3 == 0", "(x > 1) & (x < 9)", "x > 1 and x < 9", "not x > 3", "bool(x > 3)", "np.bool_(x > 3)", "True",
    "log.append(1) or x > 3", "len(log) % 2 == 0 or log.append(1) is None", "(lambda y: y > 3)(x)", "12 // x > 3",
    "np.log(x) > 1", "1 / x > 0.1", "np.isin(x, [1, 5])", "x in (1, 5)", "x.astype('u1') > 5", "np.logical_or(x > 3, x < 0)",
    "x * 2**62 > 0", "np.where(x > 3, True, False)", "x.astype(bool)", "~(x > 3)", "x == x", "next(counter) % 2 == 0",
]  # fmt: skip


STATES = {"warn": {"all": "warn"}, "ignore": {"all": "ignore"}, "raise": {"all": "raise"}}
# Frames in which errors of floating-point numbers make a difference are tried with all bodies in all states.
HANDLING = [
    "except",
    "except_of_helper",
    "except_around_helper",
    "errstate",
    "errstate_raise",
    "suppress",
    "finally",
    "seterr",
]


def cases():
    """Yield label, data, program and how errors of floating-point numbers are handled.

    Each body is tried with two kinds of data, and each frame with every kind.
    """
    number = itertools.count()
    for names, bodies in BODIES.items():
        for place, body in enumerate(bodies):
            for name in sorted({names[place % len(names)], names[(place + 1) % len(names)]}):
                states = [list(STATES)[next(number) % 3]]
                yield from ((f"{name}: {body}", name, f"f = lambda x: {body}", state) for state in states)
    for place, (frame, text) in enumerate(FRAMES.items()):
        is_handling = frame in HANDLING
        for name in SHORT:
            for body in SHORT[name] if is_handling else [SHORT[name][place % len(SHORT[name])]]:
                like = "x.sum()" if "sum" in body else "x"
                program = text.replace("BODY2", like).replace("BODY", body)
                states = STATES if is_handling else [list(STATES)[next(number) % 3]]
                yield from ((f"{name}: {body} in {frame}", name, program, state) for state in states)


def made(program):
    log: list = []

    def note(value):
        # Code that fingerprints functions triggers hooks too; only hooks that the function itself triggers count.
        if sys._getframe(2).f_code.co_filename == "<corpus>":
            log.append(value)

    variables = {
        "note": note,
        "np": np,
        "log": log,
        "collections": collections,
        "itertools": itertools,
        "counter": itertools.count(),
    }
    exec(compile(textwrap.dedent(program), "<corpus>", "exec"), variables)
    return variables["f"], log


def told(value):
    """Return a value in a form that shows types, dtypes, shapes and bits; all NaN are equal."""
    if isinstance(value, str) or getattr(value, "dtype", None) == np.dtypes.StringDType():
        return "text", str(value)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.array(value)
        if array.dtype.kind == "f":
            array[np.isnan(array)] = np.nan
        return array.dtype.str, array.shape, array.tobytes() if array.dtype.kind in "biufmM" else repr(array.tolist())
    if isinstance(value, dict):
        return {key: told(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(item) for item in value]
    return repr(value) if isinstance(value, (int, float, str, bytes, type(None))) else type(value).__name__


def outcome(run):
    """Return the values or the error of a run, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = run()
        except UserFunctionError as error:
            cause = error.__cause__ or error.__context__
            result = type(cause or error).__name__
        except Exception as error:
            result = type(error).__name__
    return result, [(value.category.__name__, str(value.message)) for value in caught]


def plain_map(function, rows):
    user = UserFunction(function, "map")
    results = []
    for row in rows:
        leaves, structure = Structure.flatten(_as_nest(call_with(user.function, row)))
        results.append((leaves, structure))
    return [told(structure.pack(leaves)) for leaves, structure in results]


def _as_nest(result):
    return tuple(result) if type(result) is list else result


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    monkeypatch.setattr(apply, "_FEWEST_ROWS", 8)


@pytest.fixture
def without_comparison(monkeypatch):
    monkeypatch.setattr(apply, "_are_same", lambda given, expected: True)
    apply._SAME.clear()


def plain_filter(function, rows):
    kept = []
    for row in rows:
        keep = function(row)
        if not isinstance(keep, (bool, np.bool_)) and not (isinstance(keep, np.ndarray) and keep.dtype == bool):
            raise TypeError(f"a predicate returned {keep!r}")
        if keep:
            kept.append(told(row))
    return kept


def is_vectorised(function, rows):
    try:
        with np.errstate(all="ignore"):
            Vectorised(UserFunction(function, "map")).run(Block(Structure.of(0)[1], [rows]))
    except Exception:
        return False
    return True


def differences(name, program, state):
    rows = DATA[name]
    actual = []
    function, log = made(program)
    with np.errstate(**state):
        # Two passes, as our first one compares both ways, and the second one uses the result of that.
        expected = [outcome(lambda: plain_map(function, rows)) for _ in range(2)]
    other, other_log = made(program)
    ds = Dataset.from_tensor_slices(rows).map(other)
    with np.errstate(**state):
        given = [outcome(lambda: [told(element) for element in ds]) for _ in range(2)]
    # After an error, our iterator may have called the function for more rows than the plain loop.
    is_ended = any(isinstance(result, str) for result, _ in expected)
    for number, (ours, plain) in enumerate(zip(given, expected, strict=True)):
        if ours[0] != plain[0] and not (isinstance(ours[0], str) and isinstance(plain[0], str)):
            actual.append(f"pass {number}: values")
        if ours[1] != plain[1] and not is_ended:
            actual.append(f"pass {number}: warnings {len(ours[1])} for {len(plain[1])}")
    if told(log) != told(other_log) and not is_ended:
        actual.append(f"log: {str(told(other_log))[:80]} for {str(told(log))[:80]}")
    return actual


@pytest.mark.filterwarnings("ignore")
def test_functions_that_are_hard_to_vectorise(without_comparison):
    all_cases = list(cases())
    assert len({program for _, _, program, _ in all_cases}) >= 500
    wrong = {}
    for label, name, program, state in all_cases:
        actual = differences(name, program, STATES[state])
        if actual:
            wrong[label, state] = actual
    assert not wrong, "\n".join(f"{label}: {actual}" for label, actual in wrong.items())


def test_many_of_them_are_vectorised():
    # Otherwise the test above proves little.
    programs = {program: name for _, name, program, _ in cases()}
    number = sum(is_vectorised(made(program)[0], DATA[name]) for program, name in programs.items())
    assert 150 < number < len(programs) - 200


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", STATES)
def test_predicates_that_are_hard_to_vectorise(state, without_comparison):
    rows = DATA["small"]
    for body in PREDICATES:
        program = f"f = lambda x: {body}"
        function, log = made(program)
        with np.errstate(**STATES[state]):
            expected = [outcome(lambda function=function: plain_filter(function, rows)) for _ in range(2)]
        other, other_log = made(program)
        ds = Dataset.from_tensor_slices(rows).filter(other)
        with np.errstate(**STATES[state]):
            given = [outcome(lambda ds=ds: [told(element) for element in ds]) for _ in range(2)]
        for ours, plain in zip(given, expected, strict=True):
            assert isinstance(ours[0], str) == isinstance(plain[0], str), body
            assert isinstance(ours[0], str) or ours == plain, body
        assert log == other_log, body
