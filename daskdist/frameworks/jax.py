"""JAX: its arrays made of ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from daskdist.devices import device_of, dtype_of, name_of
from daskdist.execute.transfer.copier import channel_of
from daskdist.frameworks.convert import ConversionError, as_numbers, converted, extremes, handed_over, needs


def to_jax(x: Any) -> Any:
    """Convert a nest of arrays to JAX arrays, which share their memory where JAX can.

    Parameters
    ----------
    x
        A nest (tuples, named tuples, lists, dicts) of arrays of NumPy, CuPy or anything else that has DLPack, numbers,
        `PerReplica` and asynchronous values. Asynchronous values are waited for; None stays.

    Returns
    -------
    nest
        The same structure, with a JAX array for each leaf, and a `PerReplica` of them for a `PerReplica`. NumPy arrays
        go to JAX's default device.

    Raises
    ------
    ArgumentError
        A leaf is no array of numbers (text, Python objects, dates, rows of different lengths, datasets), it has
        integers that do not fit in what JAX makes of them, or JAX is not installed: ``pip install 'daskdist[jax]'``.

    Notes
    -----
    Unless ``jax_enable_x64`` is set, JAX has no types of 64 bits: float64 becomes float32, complex128 complex64, int64
    int32 and uint64 uint32, each by a copy. Otherwise arrays, read-only ones too, are shared with the CPU's JAX where
    their rows follow each other without gaps and they begin at a multiple of 64 bytes, as measured with JAX 0.10.
    What is gathered, as rows that are shuffled, and columns of files that make one array begin there, and so do their
    batches if they take a multiple of 64 bytes, such as 128 rows of 16 float32. NumPy begins a large array 16 bytes
    after such a place: of arrays that a program gives, or that a mapped function returns, most batches are copied,
    once. What is shared must not be written to by way of the NumPy array.

    Arrays of a device stay there; their memory is used for later elements when JAX is done with them, too. JAX has none
    with gaps between items, or that run backwards along an axis: such are copied, on the device.
    """
    try:
        import jax
    except ImportError as error:
        raise needs("to_jax", "JAX", "jax", error) from None

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        if not isinstance(leaf, (np.ndarray, np.generic)) and hasattr(leaf, "__dlpack__"):
            jax_array = handed_over(leaf, "JAX", jax.dlpack.from_dlpack)
            if (device := device_of(leaf)) is not None and not device.is_host:
                channel_of(name_of(device)).add_unknown_consumers(
                    partial(_wait_for_jax, next(iter(jax_array.devices())))
                )
            _check_range(leaf, jax_array)
            return jax_array
        array = as_numbers(leaf)
        # Not by DLPack, as JAX takes no read-only array that way, nor one with gaps; this shares what that would.
        jax_array = jax.device_put(array)
        _check_range(array, jax_array)
        return jax_array

    return converted("to_jax", x, convert)


def _wait_for_jax(device: Any) -> None:
    # JAX computes on a device what it is given in the order in which it is given it, in a stream that it tells nobody.
    # It lets go of arrays when it has been given what to do with them.
    import jax

    jax.block_until_ready(jax.numpy.add(jax.device_put(np.float32(0), device), 1))


def _check_range(array: Any, jax_array: Any) -> None:
    # Integers become narrower ones, whatever they are.
    if jax_array.dtype.kind not in "iu" or not jax_array.size:
        return
    dtype = dtype_of(array)
    if jax_array.dtype.itemsize == dtype.itemsize:
        return
    limits = np.iinfo(jax_array.dtype)
    least, most = extremes(array)
    if least < limits.min or most > limits.max:
        raise ConversionError(
            f"has numbers that {jax_array.dtype} does not hold, which JAX makes of {dtype}: set "
            "jax.config.update('jax_enable_x64', True), or map it to smaller numbers"
        )
