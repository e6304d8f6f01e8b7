"""Arrays of several libraries: oracles and input makers work on NumPy and CuPy arrays alike."""

from __future__ import annotations

import sys


def library_of(array):
    """The module that the type of ``array`` belongs to: ``numpy``, ``cupy`` or ``torch``."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def bytes_of(array):
    """The bytes of an array as a NumPy array (on a CPU) or a CuPy array (on a GPU) of uint8.

    A NumPy, CuPy or contiguous torch array is viewed, not copied. The last axis is as many times
    longer as an element has bytes.
    """
    if library_of(array).__name__ != "torch":
        return array.view("uint8")
    torch = library_of(array)
    flat = array.contiguous().view(torch.uint8)
    if flat.device.type == "cpu":
        return flat.numpy()
    import cupy

    return cupy.from_dlpack(flat)


def from_bytes(bytes_, array):
    """``bytes_``, a NumPy or CuPy array of uint8, in the library and element type of ``array``.

    The inverse of :func:`bytes_of`, for an array of any shape.
    """
    if library_of(array).__name__ != "torch":
        return bytes_.view(array.dtype)
    return library_of(array).from_dlpack(bytes_).view(array.dtype)
