"""Functions of one element, called once for many rows if that gives bitwise identical results.

`apply` decides for each block. `sandbox` runs a copy of the function with a `tracer` in place of each array, and
refuses everything that is not in `allowlist`. `rules` has the operations on whole columns, and `proof` compares each of
them with NumPy's result for single rows.
"""
