"""The operations of a dataset, one file each, named like the method."""

from __future__ import annotations

from daskdist.core.elsewhere import BRINGERS
from daskdist.devices import on_host, others_on_host

# What functions and sources give that lies on devices, elements are made of all the same.
BRINGERS.known = on_host
BRINGERS.others = others_on_host
