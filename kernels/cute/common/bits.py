"""The bits of float32 numbers as integers, and back."""

import cutlass.cute as cute
from cutlass import Float32, Uint32


@cute.jit
def bits_of(value: Float32):
    """The bits of ``value``, unchanged."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value]
    )


@cute.jit
def float_of(bits: Uint32):
    """The number with these bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )
