"""Calls of NCCL by rank, on a strict stand-in that computes the results."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import nccl_stand_in
import numpy as np
import pytest
from nccl_stand_in import NcclCommunicator, NcclError, Stream, current, on_gpu

from daskdist.devices import nccl

DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
FUNCTIONS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


@pytest.fixture(autouse=True)
def _nccl(monkeypatch):
    for name, module in nccl_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nccl, "stream_of", lambda device: SimpleNamespace(stream=Stream(device.index)))
    current.made.clear()
    yield
    nccl._library.cache_clear()
    nccl._ranks.cache_clear()


def values(dtype, seed, size=2**20):
    return np.random.default_rng(seed).integers(1, 4, size).astype(dtype)


@pytest.mark.parametrize("how", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_gpus_come_together_on_the_first(how, dtype):
    given = [values(dtype, seed, (2**18, 4)) for seed in range(3)]
    if how in ("MIN", "MAX") and dtype[0] == "f":
        # NCCL's minimum and maximum would ignore NaN.
        assert nccl.combined(how, [on_gpu(value, number) for number, value in enumerate(given)]) is None
        return
    arrays = [on_gpu(item, number) for item, number in zip(given, (2, 0, 1), strict=True)]
    actual = nccl.combined(how, arrays)
    assert (actual.device.id, actual.shape, actual.dtype) == (2, (2**18, 4), np.dtype(dtype))
    assert np.array_equal(actual, FUNCTIONS[how](FUNCTIONS[how](given[0], given[1]), given[2]))
    assert [np.array_equal(one, other) for one, other in zip(arrays, given, strict=True)] == [True] * 3


def test_arrays_with_gaps_are_made_contiguous():
    given = [values("f4", seed, (2**10, 2**11)) for seed in range(2)]
    actual = nccl.combined("SUM", [on_gpu(value[:, ::2], number) for number, value in enumerate(given)])
    assert np.array_equal(actual, given[0][:, ::2] + given[1][:, ::2])


def test_ranks_are_made_once_for_the_same_gpus():
    given = [on_gpu(values("f4", seed), number) for seed, number in enumerate((0, 1))]
    before = current.num_groups
    for _ in range(3):
        nccl.combined("SUM", given)
    nccl.combined("SUM", given[::-1])
    assert current.made == [[0, 1], [1, 0]]
    assert current.num_groups - before == 4


def test_arrays_that_nccl_does_not_reduce():
    two = [on_gpu(values("f4", seed), number) for seed, number in enumerate((0, 1))]
    small = [on_gpu(np.ones(2**10), number) for number in range(2)]
    same = [on_gpu(values("f4", seed), 0) for seed in range(2)]
    of_complex = [on_gpu(np.ones(2**20, "c8"), number) for number in range(2)]
    for arrays in (two[:1], small, same, of_complex):
        assert nccl.combined("SUM", arrays) is None
    assert current.made == []


def test_gpus_that_nccl_does_not_connect(monkeypatch, caplog):
    def refused(devices):
        raise NcclError("unhandled system error")

    monkeypatch.setattr(NcclCommunicator, "initAll", staticmethod(refused))
    given = [on_gpu(values("f4", seed), number) for seed, number in enumerate((0, 1))]
    assert nccl.combined("SUM", given) is None
    assert nccl.combined("SUM", given) is None
    assert [record.getMessage() for record in caplog.records] == [
        "NCCL does not connect GPUs (0, 1) (unhandled system error); arrays are copied from them one by one"
    ]


def test_a_group_ends_where_a_rank_refuses(monkeypatch):
    def refuses(self, *args):
        raise NcclError("invalid usage")

    given = [on_gpu(values("f4", seed), number) for seed, number in enumerate((0, 1))]
    monkeypatch.setattr(NcclCommunicator, "reduce", refuses)
    with pytest.raises(NcclError):
        nccl.combined("SUM", given)
    assert current.calls is None


class Communicator:
    """One process's communicator, with the parameters of CuPy's; the other processes contribute ones."""

    def __init__(self, ndev, commId, rank, config=None):  # noqa: N803 - as CuPy has it
        assert (ndev, commId, rank, config) == (3, b"i" * 128, 1, None)
        assert current.devices[-1] == 2
        self.calls = []

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream, /):
        assert (op, root, stream) == (nccl_stand_in.NCCL_SUM, 0, 1002)
        nccl_stand_in._at(recvbuf, count, datatype)[:] = nccl_stand_in._at(sendbuf, count, datatype) + 2
        self.calls.append("reduce")

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream, /):
        assert sendbuff == recvbuff
        assert (root, stream) == (0, 1002)
        self.calls.append("broadcast")

    def abort(self):
        self.calls.append("abort")


def test_a_connection_reduces_on_one_gpu_and_sends_the_result(monkeypatch):
    library = sys.modules["cupy.cuda.nccl"]
    monkeypatch.setattr(library, "NcclCommunicator", Communicator)
    monkeypatch.setattr(library, "get_unique_id", lambda: b"i" * 128, raising=False)
    cuda = sys.modules["cupy"].cuda
    monkeypatch.setattr(cuda, "get_current_stream", lambda: Stream(current.devices[-1]), raising=False)
    assert nccl.is_available()
    connection = nccl.LINKS.connect(2, nccl.LINKS.new_id(), 3, 1)
    array = on_gpu(values("f4", 0, (2**9, 2**11))[:, ::2], 2)
    with cuda.Device(2), Stream(2):
        actual = connection.all_reduce("SUM", array)
    assert np.array_equal(actual, array + 2)
    connection.abort()
    assert connection._communicator.calls == ["reduce", "broadcast", "abort"]


@pytest.mark.parametrize(
    ("how", "dtype", "suits"),
    [("SUM", "f4", True), ("MIN", "f4", False), ("MIN", "i8", True), ("SUM", "c8", False), ("SUM", "?", False)],
)
def test_kinds_of_reductions(how, dtype, suits):
    assert nccl.LINKS.suits(how, np.dtype(dtype)) == suits


def test_without_nccl_nothing_is_reduced(monkeypatch):
    monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)
    assert nccl.combined("SUM", [on_gpu(values("f4", seed), number) for seed, number in enumerate((0, 1))]) is None
