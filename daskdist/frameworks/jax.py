"""Conversion to JAX arrays."""

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
        A leaf is not an array of numbers (text, Python objects, dates, rows of different lengths, datasets), or has
        integers that do not fit in the dtype that JAX converts them to.
    MissingPackageError
        JAX is not installed: ``pip install 'daskdist[jax]'``.

    Notes
    -----
    Unless ``jax_enable_x64`` is set, JAX has no 64-bit types: float64 becomes float32, complex128 complex64, int64
    int32 and uint64 uint32, each by a copy. Other arrays, read-only ones too, are shared with JAX on the CPU if they
    are contiguous and aligned to 64 bytes, as measured with JAX 0.10. Gathered rows, such as shuffled ones, and columns
    of files that form one array are aligned, and so are their batches if these take a multiple of 64 bytes, such as 128
    rows of 16 float32. NumPy begins a large array 16 bytes after a multiple of 64, so most batches of arrays that a
    program gives or that a mapped function returns are copied, once. Do not write to the NumPy array of a shared one.

    Arrays on a device stay there, and their memory is reused for later elements only when JAX has finished with it. JAX
    has no arrays with gaps between items or with negative strides; such arrays are copied on the device.
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
        # JAX's DLPack refuses read-only arrays and arrays with gaps; this shares memory in the same cases.
        jax_array = jax.device_put(array)
        _check_range(array, jax_array)
        return jax_array

    return converted("to_jax", x, convert)


def _wait_for_jax(device: Any) -> None:
    # JAX runs computations on a device in the order of their dispatch, in a stream that it does not expose, and frees
    # arrays after the dispatch.
    import jax

    jax.block_until_ready(jax.numpy.add(jax.device_put(np.float32(0), device), 1))


def _check_range(array: Any, jax_array: Any) -> None:
    # JAX narrows integers without checking their values.
    if jax_array.dtype.kind not in "iu" or not jax_array.size:
        return
    dtype = dtype_of(array)
    if jax_array.dtype.itemsize == dtype.itemsize:
        return
    limits = np.iinfo(jax_array.dtype)
    least, most = extremes(array)
    if least < limits.min or most > limits.max:
        raise ConversionError(
            f"has numbers that do not fit in {jax_array.dtype}, to which JAX converts {dtype}: set "
            "jax.config.update('jax_enable_x64', True), or map it to smaller numbers"
        )
