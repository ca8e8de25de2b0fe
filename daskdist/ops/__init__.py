"""The operations of a dataset, one file each, named like the method."""

from __future__ import annotations

from daskdist.core.to_numpy import HOST_CONVERTERS
from daskdist.devices import on_host, others_on_host

# What functions and sources give that lies on devices, elements are made of all the same.
HOST_CONVERTERS.known = on_host
HOST_CONVERTERS.others = others_on_host
