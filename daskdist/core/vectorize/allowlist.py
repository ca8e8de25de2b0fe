"""Tables of callables that are known to be pure: they have no side effects, and return the same each time.

The tables are literal and compare by identity. A callable, type, method or attribute that is not listed is not known to
be pure, whatever its name and module.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import types
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.core.vectorize.rules import FUNCTIONS, UFUNCS
from daskdist.core.vectorize.tracer import Tracer


def _named(module: Any, names: str) -> frozenset[Any]:
    return frozenset({getattr(module, name) for name in names.split() if hasattr(module, name)})


_MATH: Final = _named(
    math,
    """
    acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist erf erfc exp exp2 expm1 fabs
    factorial floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p
    log2 modf nextafter perm pow prod radians remainder sin sinh sqrt tan tanh trunc ulp
    """,
)
_OPERATOR: Final = _named(
    operator,
    """
    abs add and_ contains eq floordiv ge getitem gt index inv invert le lshift lt mod mul ne neg not_ or_ pos
    pow rshift sub truediv truth xor
    """,
)
_BUILTINS: Final = _named(
    builtins,
    "abs all any ascii bin chr divmod format hex len max min oct ord pow repr round sorted sum",
)
_NUMPY: Final = _named(
    np,
    """
    arange array asarray ascontiguousarray atleast_1d atleast_2d broadcast_to broadcast_shapes can_cast cross diag diff
    dot dtype einsum eye finfo flip full histogram hstack identity iinfo inner interp isscalar kron linspace logspace
    matmul max mean median min moveaxis ones outer pad percentile promote_types quantile repeat result_type roll
    searchsorted tensordot tile trace tril triu unique unravel_index vstack zeros shape ndim size zeros_like ones_like
    full_like
    """,
)
CALLABLES: Final = (
    _MATH | _OPERATOR | _BUILTINS | _NUMPY | frozenset(FUNCTIONS) | frozenset(UFUNCS) | {functools.reduce}
)

# The types whose instances are plain data; subclasses are not.
NUMBERS: Final = frozenset({*np.sctypeDict.values()}) - {np.object_, np.void}
_SCALARS: Final = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis), slice, range})
_DTYPES: Final = frozenset({type(np.dtype(kind)) for kind in NUMBERS} | {np.dtypes.StringDType})
CONTAINERS: Final = frozenset({tuple, list, dict, set, frozenset})
IMMUTABLE: Final = _SCALARS | NUMBERS | _DTYPES | {np.finfo, np.iinfo}
# Types that may be called or used as a dtype.
TYPES: Final = (
    (_SCALARS - {type(None), type(Ellipsis)}) | NUMBERS | CONTAINERS | {zip, enumerate, reversed, map, filter, np.dtype}
) | {np.finfo, np.iinfo, np.integer, np.floating, np.number, np.generic, np.signedinteger, np.unsignedinteger}

_ARRAY: Final = """
    all any argmax argmin argsort astype clip conj conjugate copy cumprod cumsum diagonal dot flatten item max mean min
    nonzero prod ravel repeat reshape round searchsorted squeeze std sum swapaxes take tobytes tolist trace transpose
    var data device dtype itemsize nbytes ndim shape size T real imag strides
"""
_TEXT: Final = """
    capitalize casefold center count decode encode endswith expandtabs find format index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper
    join ljust lower
    lstrip partition removeprefix removesuffix replace
    rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip
    swapcase title upper zfill hex
"""
_NUMBER: Final = "bit_count bit_length conjugate denominator imag is_integer numerator real hex as_integer_ratio"
_SET: Final = "copy difference intersection isdisjoint issubset issuperset symmetric_difference union"
_RANGE: Final = "start stop step count index indices"

# Type -> its methods and attributes without side effects.
ATTRIBUTES: Final[dict[Any, frozenset[str]]] = {
    **{kind: frozenset(_ARRAY.split()) for kind in NUMBERS | {np.ndarray}},
    **{kind: frozenset({"char", "fields", "itemsize", "kind", "metadata", "name", "names", "str"}) for kind in _DTYPES},
    **{kind: frozenset(_NUMBER.split()) for kind in (int, float, complex, bool)},
    **{kind: frozenset(_RANGE.split()) for kind in (slice, range)},
    str: frozenset(_TEXT.split()),
    bytes: frozenset(_TEXT.split()),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    set: frozenset(_SET.split()),
    frozenset: frozenset(_SET.split()),
    np.finfo: frozenset({"bits", "dtype", "eps", "max", "min", "resolution", "smallest_normal", "tiny"}),
    np.iinfo: frozenset({"bits", "dtype", "max", "min"}),
    np.ufunc: frozenset({"accumulate", "outer", "reduce"}),
}
# Type -> its methods that change a container.
CHANGES: Final[dict[Any, frozenset[str]]] = {
    list: frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}),
    dict: frozenset({"clear", "pop", "popitem", "setdefault", "update"}),
    set: frozenset({"add", "clear", "discard", "pop", "remove", "update"}),
}
# The modules that may be imported inside a function.
MODULES: Final = frozenset({"numpy", "math", "operator", "functools"})

KNOWN: Final = frozenset().union(*ATTRIBUTES.values(), *CHANGES.values())
# Attributes of built-in values and functions that may have side effects, or give access to more.
_BUILT_IN: Final = frozenset({*ATTRIBUTES, *CHANGES, type(np.sum), types.FunctionType, types.GeneratorType, type})
HIDDEN: Final = frozenset({name for kind in _BUILT_IN - {np.finfo, np.iinfo} for name in dir(kind)}) - KNOWN | {
    "_field_defaults",
    *Tracer.__slots__,
}


class _Pair(NamedTuple):
    left: Any


# The type of a named tuple's fields.
FIELD: Final = type(vars(_Pair)["left"])


def is_named_tuple(kind: Any) -> bool:
    """Return whether a type is a named tuple without methods and attributes of its own, or defaults that may change."""
    if type(kind) is not type or kind.__bases__ != (tuple,):
        return False
    members = dict(vars(kind))
    fields = [members.pop(name, None) for name in members.get("_fields", ())]
    new: Any = getattr(members.get("__new__"), "__func__", None)
    if not hasattr(new, "__code__") or new.__globals__.get("_tuple_new") is not tuple.__new__:
        return False
    return (
        all(type(field) is FIELD for field in fields)
        and IMMUTABLE.issuperset(map(type, new.__defaults__ or ()))
        and all(name in vars(_Pair) and _code(member) == _code(vars(_Pair)[name]) for name, member in members.items())
    )


def _code(member: Any) -> Any:
    function = getattr(member, "__func__", member)
    return None if type(member) is staticmethod else getattr(function, "__code__", None)
