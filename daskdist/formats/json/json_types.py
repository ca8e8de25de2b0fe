"""JSON values as Arrow types: inferred from a sample, given by users, and checked against single values.

Text stays text, whatever it looks like: times need ``dtypes``. Integers are int64, or uint64 if necessary, and float64
if other numbers of the field are not integers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

import numpy as np

from daskdist.errors import ArgumentError, FileError
from daskdist.storage.libraries import pa, pj

# A depth beyond anything that becomes arrays, and below the limit of the stack.
_DEEPEST: Final = 32
# The key in the metadata of a schema's field for the reason why the field cannot be read.
_PROBLEM: Final = b"daskdist.problem"


@dataclass(frozen=True, slots=True)
class Kind:
    """The inferred type of the values of a field.

    Parameters
    ----------
    name
        ``"null"``, ``"bool"``, ``"whole"`` (0 up to the largest int64), ``"int64"``, ``"uint64"``, ``"float64"``,
        ``"text"``, ``"list"``, ``"struct"``, or ``"problem"``: values without a common type.
    inner
        The kind of a list's values.
    fields
        The kinds of a struct's fields.
    reason
        The reason for a problem.
    """

    name: str
    inner: Kind | None = None
    fields: tuple[tuple[str, Kind], ...] = ()
    reason: str = ""


_NULL: Final = Kind("null")
_NUMBERS: Final = ("whole", "int64", "uint64", "float64")
_WORDS: Final = {"bool": "true or false", "text": "text", "list": "a list", "struct": "an object"} | dict.fromkeys(
    _NUMBERS, "a number"
)


def kind_of(value: Any, depth: int = 0) -> Kind:
    """Infer the kind of a value."""
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return Kind("bool")
    if isinstance(value, int):
        if value >= 2**64 or value < -(2**63):
            return Kind("problem", reason=f"is {value}, which does not fit into 64 bits")
        return Kind("int64" if value < 0 else "whole" if value < 2**63 else "uint64")
    if isinstance(value, float):
        return Kind("float64")
    if isinstance(value, str):
        return Kind("text")
    if depth == _DEEPEST:
        return Kind("problem", reason=f"is nested more than {_DEEPEST} levels deep")
    if isinstance(value, list):
        inner = _NULL
        for item in value:
            inner = common(inner, kind_of(item, depth + 1))
        return Kind("list", inner)
    return Kind("struct", fields=tuple((name, kind_of(item, depth + 1)) for name, item in value.items()))


def common(a: Kind, b: Kind) -> Kind:
    """Return the common kind of values of two kinds."""
    if a == b or b is _NULL or a.name == "problem":
        return a
    if a is _NULL or b.name == "problem":
        return b
    if a.name in _NUMBERS and b.name in _NUMBERS:
        names = {a.name, b.name}
        if "float64" in names:
            return Kind("float64")
        if names == {"int64", "uint64"}:
            return Kind("problem", reason="is negative in some records, but too large for int64 in others")
        return Kind("uint64" if "uint64" in names else "int64")
    if a.inner is not None and b.inner is not None:
        return Kind("list", common(a.inner, b.inner))
    if a.name == b.name == "struct":
        fields = dict(a.fields)
        for name, kind in b.fields:
            fields[name] = common(fields.get(name, _NULL), kind)
        return Kind("struct", fields=tuple(fields.items()))
    return Kind("problem", reason=f"is {_WORDS[a.name]} in some records, but {_WORDS[b.name]} in others")


def arrow_of(values: Sequence[Any]) -> Any:
    """Return the common Arrow type of values.

    Raises
    ------
    FileError
        There is none.
    """
    kind = reduce(common, map(kind_of, values))
    if (problem := _problem_of(kind)) is not None:
        raise FileError(f"a value {problem}")
    return _arrow_of(kind)


def has_nulls(kind: Kind) -> bool:
    """Return whether the type of a field, or of values in it, is not known, as all of its values are null."""
    return kind == _NULL or any(map(has_nulls, _inner_kinds(kind)))


def typed(kind: Kind, other: Kind) -> Kind:
    """Return a kind with those of another instead of kinds that are not known."""
    if kind == _NULL:
        return _NULL if other.name == "problem" else other
    if kind.inner is not None and other.inner is not None:
        return replace(kind, inner=typed(kind.inner, other.inner))
    known = dict(other.fields)
    return replace(kind, fields=tuple((name, typed(item, known.get(name, item))) for name, item in kind.fields))


def _inner_kinds(kind: Kind) -> list[Kind]:
    return [item for _, item in kind.fields] + ([] if kind.inner is None else [kind.inner])


def schema_of(whole: Kind, dtypes: Mapping[str, Any] | None) -> Any:
    """Return the Arrow schema of objects, from a sample's kind and the user's dtypes."""
    fields = {}
    for name, kind in whole.fields:
        problem = _problem_of(kind)
        if problem is None:
            fields[name] = pa.field(name, _arrow_of(kind))
        else:
            fields[name] = pa.field(name, pa.null(), metadata={_PROBLEM: problem.encode("utf-8", "replace")})
    for name, user_type in (dtypes or {}).items():
        known = fields[name].type if name in fields and not fields[name].metadata else pa.null()
        fields[name] = pa.field(name, _wanted(user_type, known, f"dtypes: {name!r}"))
    return pa.schema(list(fields.values()))


def refuse_problem(field: Any, path: str) -> None:
    """Check that a field of a schema can be read.

    Raises
    ------
    FileError
        The field cannot be read; the message gives the reason.
    """
    reason = (field.metadata or {}).get(_PROBLEM)
    if reason is not None:
        raise FileError(
            f"{path}: the field {field.name!r} {reason.decode()}; give it a type with dtypes={{{field.name!r}: ...}} "
            "if one fits all values, or select other columns with columns=[...]"
        )


def check_dtypes(dtypes: Mapping[str, Any] | None) -> None:
    """Check that JSON can be converted to all of the user's types.

    Raises
    ------
    ArgumentError
        A type is not possible.
    """
    if dtypes is None:
        return
    if not isinstance(dtypes, Mapping):
        raise ArgumentError(f"dtypes is {dtypes!r:.80}; give a dict by field: {{'size': 'float64'}}")
    for name, user_type in dtypes.items():
        if not isinstance(name, str):
            raise ArgumentError(f"dtypes: {name!r} is not the name of a field")
        kind = _wanted(user_type, pa.null(), f"dtypes: {name!r}")
        options = pj.ParseOptions(explicit_schema=pa.schema([pa.field(name, kind)]))
        try:
            pj.read_json(pa.BufferReader(b"{}\n"), pj.ReadOptions(use_threads=False), options)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ArgumentError(f"dtypes: {name!r} is {user_type!r}: {error}") from None


def find_invalid(value: Any, kind: Any, path: tuple[str | int, ...] = ()) -> str | None:
    """Return the problem of a value for an Arrow type, with a remedy; None if it has none.

    Raises
    ------
    FileError
        The type lacks a field, or the type of a field, as no sampled record has a value of it.
    """
    types = pa.types
    if value is None:
        return None
    if types.is_struct(kind) and isinstance(value, dict):
        known = {kind.field(k).name: kind.field(k).type for k in range(kind.num_fields)}
        for name, item in value.items():
            if name not in known:
                raise FileError(_unexpected((*path, name), item))
            if (problem := find_invalid(item, known[name], (*path, name))) is not None:
                return problem
        return None
    if types.is_list(kind) and isinstance(value, list):
        inner = (find_invalid(item, kind.value_type, (*path, 0)) for item in value)
        return next((problem for problem in inner if problem is not None), None)
    value_kind = kind_of(value)
    if _fits(value, value_kind, kind):
        return None
    where = f"{_called(path)} is {value!r:.60}, but {kind} is expected"
    both = common(_kind_of_arrow(kind), value_kind)
    if _problem_of(both) is not None:
        return f"{where}; leave it out with columns=[...], or fix it"
    problem = f"{where}; write dtypes={_spelled(path, both)}"
    if types.is_null(kind):
        raise FileError(problem)
    return problem


def find_other_type(
    objects: Sequence[Mapping[str, Any]], field: Any, path: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], str] | None:
    """Return the problem of a field none of whose values, in all objects that have one, has its type.

    One value may be damaged, so there are at least two.

    Parameters
    ----------
    objects
        The objects.
    field
        The Arrow field that is expected in them.
    path
        The names of the fields around it.

    Returns
    -------
    path, problem
        The names of the field with the problem and of those around it, and a message with a remedy. None instead if
        there is no such problem.

    Raises
    ------
    FileError
        As for `find_invalid`.
    """
    values = [item for value in objects if (item := value.get(field.name)) is not None]
    path, expected = (*path, field.name), field.type
    if len(values) < 2 or pa.types.is_null(expected):
        return None
    if pa.types.is_struct(expected) and all(isinstance(value, dict) for value in values):
        inner = (find_other_type(values, item, path) for item in expected)
        return next((problem for problem in inner if problem is not None), None)
    other = reduce(common, map(kind_of, values))
    if not all(_is_of_other_type(value, expected) for value in values):
        return None
    reason, both = _problem_of(other), common(_kind_of_arrow(expected), other)
    if reason is not None:
        return path, (
            f"{_called(path)} {reason}, and {expected} is expected in the {len(values)} records that have it; give a "
            "type that fits all values with dtypes=..., or select other columns with columns=[...]"
        )
    if _problem_of(both) is None:
        advice = f"dtypes={_spelled(path, both)}"
    else:
        advice = f"dtypes={_spelled(path, other)} if all files are so, or select other columns with columns=[...]"
    name = _dtype_of(other).strip("'")
    return path, (
        f"{_called(path)} is {name} in all {len(values)} records that have it, such as {values[0]!r:.60}, but "
        f"{expected} is expected; write {advice}"
    )


def _is_of_other_type(value: Any, kind: Any) -> bool:
    # Times are read from text only, and only the decoder can determine from which.
    is_no_time = pa.types.is_timestamp(kind) and not isinstance(value, str)
    return is_no_time or find_invalid(value, kind) is not None or (isinstance(value, str) and not becomes(value, kind))


def becomes(value: Any, kind: Any) -> bool:
    """Return whether the decoder turns a value into an Arrow type."""
    options = pj.ParseOptions(explicit_schema=pa.schema([pa.field("", kind)]))
    try:
        data = pa.BufferReader(json.dumps({"": value}).encode())
        pj.read_json(data, pj.ReadOptions(use_threads=False), options).validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _fits(value: Any, value_kind: Kind, kind: Any) -> bool:
    types = pa.types
    if types.is_integer(kind):
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        bits = int(kind.bit_width)
        least, most = (0, 1 << bits) if types.is_unsigned_integer(kind) else (-(1 << bits - 1), 1 << bits - 1)
        return least <= value < most
    if types.is_floating(kind) or types.is_decimal(kind):
        return value_kind.name in (*_NUMBERS, "problem") and isinstance(value, (int, float))
    if types.is_boolean(kind):
        return isinstance(value, bool)
    if types.is_null(kind) or types.is_struct(kind) or types.is_list(kind):
        return False
    # Only the decoder can determine, for example, whether text is a time.
    return isinstance(value, str) or not bool(types.is_string(kind) or types.is_binary(kind))


def _unexpected(path: tuple[str | int, ...], value: Any) -> str:
    kind = kind_of(value)
    leave = "select other columns with columns=[...]"
    if _problem_of(kind) is not None or kind is _NULL:
        return f"{_called(path)} is in none of the sampled records; {leave}"
    return (
        f"{_called(path)} is in none of the sampled records; write dtypes={_spelled(path, kind)} "
        f"to read it (other records lack it), or {leave}"
    )


def _called(path: tuple[str | int, ...]) -> str:
    name = ".".join("[]" if isinstance(key, int) else key for key in path)
    return f"the field {name!r}" if path else "the record"


def _spelled(path: tuple[str | int, ...], kind: Kind) -> str:
    # Return the spelling of a dtype for users.
    text = _dtype_of(kind)
    for key in reversed(path):
        text = f"[{text}]" if isinstance(key, int) else f"{{{key!r}: {text}}}"
    return text


def _dtype_of(kind: Kind) -> str:
    if kind.inner is not None:
        return f"[{_dtype_of(kind.inner)}]"
    if kind.name == "struct":
        return "{" + ", ".join(f"{name!r}: {_dtype_of(item)}" for name, item in kind.fields) + "}"
    return {"text": "'str'", "whole": "'int64'", "null": "'float64'"}.get(kind.name, repr(kind.name))


def _problem_of(kind: Kind) -> str | None:
    if kind.inner is not None:
        return _problem_of(kind.inner)
    if kind.name == "problem":
        return kind.reason
    return next((problem for _, item in kind.fields if (problem := _problem_of(item)) is not None), None)


def _arrow_of(kind: Kind) -> Any:
    if kind.inner is not None:
        return pa.list_(_arrow_of(kind.inner))
    if kind.name == "struct":
        return pa.struct([pa.field(name, _arrow_of(item)) for name, item in kind.fields])
    plain = {"null": pa.null(), "bool": pa.bool_(), "uint64": pa.uint64(), "float64": pa.float64(), "text": pa.string()}
    return plain.get(kind.name, pa.int64())


def _kind_of_arrow(kind: Any) -> Kind:
    types = pa.types
    if types.is_list(kind):
        return Kind("list", _kind_of_arrow(kind.value_type))
    if types.is_struct(kind):
        return Kind("struct")
    if types.is_null(kind):
        return _NULL
    if types.is_boolean(kind):
        return Kind("bool")
    if types.is_integer(kind):
        return Kind("uint64" if str(kind) == "uint64" else "whole")
    return Kind("float64" if types.is_floating(kind) or types.is_decimal(kind) else "text")


def _wanted(user_type: Any, known: Any, where: str) -> Any:
    # Return the Arrow type of a user's dtype; unmentioned fields keep their inferred type.
    if isinstance(user_type, pa.DataType):
        return user_type
    if isinstance(user_type, Mapping):
        fields = (
            {known.field(k).name: known.field(k) for k in range(known.num_fields)} if pa.types.is_struct(known) else {}
        )
        for name, item_type in user_type.items():
            before = fields[name].type if name in fields else pa.null()
            fields[name] = pa.field(name, _wanted(item_type, before, f"{where}, {name!r}"))
        return pa.struct(list(fields.values()))
    if isinstance(user_type, list):
        if len(user_type) != 1:
            raise ArgumentError(f"{where} is {user_type!r:.80}; for a list give [dtype], the dtype of its values")
        return pa.list_(_wanted(user_type[0], known.value_type if pa.types.is_list(known) else pa.null(), where))
    try:
        dtype = np.dtype(user_type)
    except TypeError:
        raise ArgumentError(
            f"{where} is {user_type!r:.80}; give a dtype, such as 'float32' or 'datetime64[s]', an Arrow type, "
            "[dtype] for lists, or a dict by field for objects"
        ) from None
    if dtype.kind in "TU":
        return pa.string()
    if dtype.kind in "SO":
        return pa.binary()
    if dtype.kind == "M" and np.datetime_data(dtype) in [(unit, 1) for unit in ("s", "ms", "us", "ns")]:
        return pa.timestamp(np.datetime_data(dtype)[0])
    if dtype.kind in "biu" or dtype in (np.float32, np.float64):
        return pa.from_numpy_dtype(dtype)
    raise ArgumentError(
        f"{where} is {user_type!r:.80}, which JSON cannot become; there are bool, integers, float32, float64, str, "
        "bytes, and datetime64 of s, ms, us or ns"
    )
