"""Functions of one element, called once for many rows where that gives the same results to the last bit.

`apply` decides for each block. `interpreter` runs the function's bytecode with a `tracer` in place of each array and
refuses what `purity` does not list. `rules` has the operations on whole columns, and `proof` tries each of them out
against NumPy's result for single rows.
"""
