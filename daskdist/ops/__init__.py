"""The operations of a dataset, one file each, named like the method."""

from __future__ import annotations

from daskdist.core.to_numpy import HOST_CONVERTERS
from daskdist.devices import on_host, others_on_host
from daskdist.tables.from_pandas import column_as_leaf

# Functions and sources may return arrays on devices and columns of dataframes.
HOST_CONVERTERS.known = on_host
HOST_CONVERTERS.others = others_on_host
HOST_CONVERTERS.columns = column_as_leaf
