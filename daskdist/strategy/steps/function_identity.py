"""The parts of a function, by which an unchanged function is recognised without pickling it."""

from __future__ import annotations

from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np

from daskdist.execute.messages.by_reference import ByReference

# Types of values that do not change, or are not part of a pickle.
_CONSTANTS: Final = (
    *(int, float, complex, str, bytes, bool, type(None), ModuleType, BuiltinFunctionType, np.generic),
    ByReference,
)


_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class FunctionParts:
    """All parts of a function whose parts change only by being replaced by other objects.

    Parameters
    ----------
    code, defaults
        The code and the defaults of the function.
    functions
        The functions that it references, directly or indirectly, with the code and the defaults of each.
    names
        The looked-up global names of these functions: the namespace, the name, and its value.
    cells
        The closure cells of these functions, and their contents.
    """

    code: CodeType
    defaults: Any
    functions: list[tuple[FunctionType, CodeType, Any]]
    names: list[tuple[dict[str, Any], str, Any]]
    cells: list[tuple[CellType, Any]]

    @classmethod
    def of(cls, function: FunctionType) -> FunctionParts | None:
        """Return the parts of a function; None if some of them may change in place."""
        parts = cls(function.__code__, function.__defaults__, [], [], [])
        seen: set[int] = set()
        waiting = [function]
        while waiting:
            current = waiting.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            code, variables = current.__code__, current.__globals__
            # Functions nested in its code would look up names of their own.
            if current.__kwdefaults__ or current.__dict__ or any(isinstance(part, CodeType) for part in code.co_consts):
                return None
            names = [(variables, name, variables.get(name, _MISSING)) for name in code.co_names]
            cells = [(cell, _held(cell)) for cell in current.__closure__ or ()]
            for part in (*[value for *_, value in (*names, *cells)], *(current.__defaults__ or ())):
                if type(part) is FunctionType:
                    waiting.append(part)
                elif part is not _MISSING and not _is_constant(part):
                    return None
            parts.names.extend(names)
            parts.cells.extend(cells)
            if current is not function:
                # Do not keep the function alive by its own parts.
                parts.functions.append((current, code, current.__defaults__))
        return parts

    def is_still_of(self, function: FunctionType) -> bool:
        """Return whether the function still has the same parts."""
        for part, code, defaults in ((function, self.code, self.defaults), *self.functions):
            if part.__code__ is not code or part.__defaults__ is not defaults:
                return False
            if part.__kwdefaults__ or part.__dict__:
                return False
        for variables, name, value in self.names:
            if variables.get(name, _MISSING) is not value:
                return False
        # A plain loop, since each step calls this.
        for cell, held in self.cells:  # noqa: SIM110
            if _held(cell) is not held:
                return False
        return True


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The cell is still empty.
        return _MISSING


def _is_constant(part: Any) -> bool:
    return isinstance(part, _CONSTANTS) or (isinstance(part, type) and part.__module__ != "__main__")
