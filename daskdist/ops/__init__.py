"""The operations of a dataset, one file each, named like the method."""

from __future__ import annotations

from daskdist.core.to_numpy import HOST_CONVERTERS
from daskdist.devices import on_host, others_on_host

# Elements may be made of arrays on devices that functions and sources give.
HOST_CONVERTERS.known = on_host
HOST_CONVERTERS.others = others_on_host
