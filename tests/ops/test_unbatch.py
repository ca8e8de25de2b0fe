"""``unbatch`` of elements that have no rows."""

from __future__ import annotations

import dask.bag
import numpy as np
import pytest

from daskdist import Dataset, errors


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([1, 2], r"unbatch: leaf \(the element\) of row 0 of .* is a single value and has no rows"),
        (["a", "bc"], "is a single value and has no rows"),
        ([{"n": np.zeros(2), "text": "a"}], r"unbatch: leaf \['text'\] of .* is a single value and has no rows"),
        ([{"n": np.zeros(2), "m": 1}, {"n": np.zeros(3), "m": 1}], r"unbatch: leaf \['m'\] of .* is a single value"),
    ],
)
def test_elements_without_rows_whose_spec_is_not_known(items, message):
    ds = Dataset.from_dask(dask.bag.from_sequence(items, npartitions=1))
    with pytest.raises(errors.StackError, match=message):
        list(ds.unbatch())
    with pytest.raises(errors.StackError, match="has no rows"):
        ds.to_pandas(unbatch=True)
