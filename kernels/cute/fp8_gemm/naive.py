"""Block-scaled product without tricks: one thread, one element of D, float32 throughout."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16

BLOCK = 16
SCALED = 128


class Naive:
    """Any shape, K = 0 included."""

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k) float8_e4m3fn, as bytes
        a_scale: cute.Pointer,  # (k_blocks, m)
        b: cute.Pointer,  # (n, k) float8_e4m3fn, as bytes
        b_scale: cute.Pointer,  # (n_blocks, k_blocks)
        d: cute.Pointer,  # (m, n)
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        n_blocks, k_blocks = cute.ceil_div(n, SCALED), cute.ceil_div(k, SCALED)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(Int64(k), 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(Int64(k), 1)))
        mSA = cute.make_tensor(a_scale, cute.make_layout((m, k_blocks), stride=(1, Int64(m))))
        mSB = cute.make_tensor(
            b_scale, cute.make_layout((n_blocks, k_blocks), stride=(Int64(k_blocks), 1))
        )
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(Int64(n), 1)))
        self.kernel(mA, mSA, mB, mSB, mD).launch(
            grid=(cute.ceil_div(n, BLOCK), cute.ceil_div(m, BLOCK), 1),
            block=(BLOCK, BLOCK, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mSA: cute.Tensor,
        mB: cute.Tensor,
        mSB: cute.Tensor,
        mD: cute.Tensor,
    ):
        x, y, _ = cute.arch.thread_idx()
        block_x, block_y, _ = cute.arch.block_idx()
        row, col = block_y * BLOCK + y, block_x * BLOCK + x
        if row < mD.shape[0] and col < mD.shape[1]:
            total = Float32(0)
            for block in cutlass.range(mSA.shape[1], unroll=1):
                part = Float32(0)
                end = cutlass.min((block + 1) * SCALED, mA.shape[1])
                for i in cutlass.range(block * SCALED, end, unroll=1):
                    part += self.value(mA[row, i]) * self.value(mB[col, i])
                total += part * mSA[row, block] * mSB[col // SCALED, block]
            mD[row, col] = total.to(BFloat16)

    @cute.jit
    def value(self, element: Uint8):
        """float8_e4m3fn -> float32, by way of float16, which holds all its values."""
        return cute.arch.inline_ptx(
            """{
            .reg .b32 pair;
            .reg .b16 low, high;
            cvt.rn.f16x2.e4m3x2 pair, {$r0};
            mov.b32 {low, high}, pair;
            cvt.f32.f16 {$w0}, low;
            }""",
            write_only_types=[Float32],
            read_only_args=[Uint16(element)],
        )
