"""Tokens from wherever their pages lie into shared memory by cp.async; eight threads a token.

A thread finds the pages of its tokens before it copies them. What the table holds beyond a
sequence's end is not followed, and tokens there become zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelcat.kernels.cute.common.float8 import widen as widen_word
from kernelcat.kernels.cute.flashmla.place import LATENT, PACKED, ROPE, ROW, SCALED

VECTOR = 8
"""Units of 16 bits in a copy."""
SHARE = 8
"""Threads that copy a token."""
PIECE = VECTOR * SHARE
"""Columns in 128 bytes: tiles lie in columns of that width, swizzled."""
PACKED_VECTORS = PACKED // 2 // VECTOR


def latent_layout(rows, stages):
    """(rows, ROW, stages) in atoms of 8 rows: ldmatrix meets no bank conflict."""
    atom = cute.make_composed_layout(
        cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, PIECE), stride=(PIECE, 1))
    )
    return cute.tile_to_shape(atom, (rows, ROW, stages), (0, 1, 2))


def as_vectors(memory, rows, stages):
    """As ((VECTOR, 1), SHARE, rows, pieces, stages): chunk c of row r is at c ^ (r % 8)."""
    piece = PIECE * rows
    layout = cute.make_layout(
        ((VECTOR, 1), SHARE, rows, ROW // PIECE, stages),
        stride=((1, 0), VECTOR, PIECE, piece, piece * (ROW // PIECE)),
    )
    return cute.make_tensor(memory, layout)


class Loader:
    """How ``threads`` threads fill a ring of ``stages`` tiles of ``block_n`` tokens."""

    def __init__(self, dtype, packed, page_size, block_n, stages, threads):
        self.dtype, self.packed, self.page_size = dtype, packed, page_size
        self.block_n, self.stages = block_n, stages
        self.rows_a_pass = threads // SHARE
        self.passes = block_n // self.rows_a_pass
        self.ring_units = stages * block_n * (PACKED // 2 if packed else ROW)

    def ring_of(self, memory):
        """Packed rows as ((VECTOR, 1), vectors, block_n, stages), as they come."""
        row = PACKED // 2
        layout = cute.make_layout(
            ((VECTOR, 1), PACKED_VECTORS, self.block_n, self.stages),
            stride=((1, 0), VECTOR, row, row * self.block_n),
        )
        return cute.make_tensor(memory, layout)

    def atom(self):
        return cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
            self.dtype,
            num_bits_per_copy=128,
        )

    @cute.jit
    def load_query(
        self,
        gQ: cute.Tensor,  # ((VECTOR, 1), ROW / VECTOR, rows)
        memory: cute.Pointer,
        num_rows: Int32,
        block_m: cutlass.Constexpr[int],
        tidx: Int32,
    ):
        """Start copying ``block_m`` rows; those from ``num_rows`` on become zeros."""
        atom, sQ = self.atom(), as_vectors(memory, block_m, 1)
        row, chunk = tidx // SHARE, tidx % SHARE
        is_row = cute.make_rmem_tensor(1, Boolean)
        is_row[0] = row < num_rows
        if row < block_m:
            for i in cutlass.range_constexpr(ROW // PIECE):
                source = gQ[None, i * SHARE + chunk, cutlass.min(row, num_rows - 1)]
                cute.copy(atom, source, sQ[None, chunk ^ (row % 8), row, i, 0], pred=is_row)

    @cute.jit
    def find(
        self,
        gTable: cute.Tensor,  # (table_width,)
        pages: cute.Tensor,  # (passes,), written
        tile: Int32,
        kv_len: Int32,
        tidx: Int32,
    ):
        """Look up the pages of this thread's tokens; those beyond the end have that of the last."""
        for i in cutlass.range_constexpr(self.passes):
            token = tile * self.block_n + i * self.rows_a_pass + tidx // SHARE
            token = Uint32(cutlass.max(cutlass.min(token, kv_len - 1), 0))
            pages[i] = gTable[Int32(token // self.page_size)]

    @cute.jit
    def load(
        self,
        mC: cute.Tensor,  # ((VECTOR, 1), vectors, slots)
        memory: cute.Pointer,  # the ring
        pages: cute.Tensor,  # (passes,)
        stage: Int32,
        tile: Int32,
        kv_len: Int32,
        tidx: Int32,
    ):
        """Start copying this thread's pieces of a tile."""
        atom, chunk = self.atom(), tidx % SHARE
        is_token = cute.make_rmem_tensor(1, Boolean)
        for i in cutlass.range_constexpr(self.passes):
            row = i * self.rows_a_pass + tidx // SHARE
            token = tile * self.block_n + row
            is_token[0] = token < kv_len
            place = Uint32(cutlass.min(token, kv_len - 1)) % self.page_size
            slot = Int64(pages[i]) * self.page_size + Int64(place)
            gC = mC[None, None, slot]
            if cutlass.const_expr(self.packed):
                sC = self.ring_of(memory)[None, None, row, stage]
                for v in cutlass.range_constexpr(0, PACKED_VECTORS // SHARE * SHARE, SHARE):
                    cute.copy(atom, gC[None, v + chunk], sC[None, v + chunk], pred=is_token)
                if chunk == 0:  # 41 vectors are 5 each, and one more
                    last = PACKED_VECTORS - 1
                    cute.copy(atom, gC[None, last], sC[None, last], pred=is_token)
            else:
                sC = as_vectors(memory, self.block_n, self.stages)
                sC = sC[None, chunk ^ (row % 8), row, None, stage]
                for v in cutlass.range_constexpr(ROW // PIECE):
                    cute.copy(atom, gC[None, v * SHARE + chunk], sC[None, v], pred=is_token)

    @cute.jit
    def widen(
        self,
        memory: cute.Pointer,  # the ring
        tile: cute.Pointer,  # (block_n, ROW), written
        stage: Int32,
        tidx: Int32,
    ):
        """A tile of packed rows becomes 16-bit elements, exactly: scales are powers of two."""
        chunk = tidx % SHARE
        sT = as_vectors(tile, self.block_n, 1)
        held = cute.make_rmem_tensor(VECTOR, self.dtype)
        words = cute.recast_tensor(held, Uint32)
        wide = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
        wide_words = cute.recast_tensor(wide, Uint32)
        for i in cutlass.range_constexpr(self.passes):
            row = i * self.rows_a_pass + tidx // SHARE
            sC = self.ring_of(memory)[(None, 0), None, row, stage]
            scales = cute.make_rmem_tensor(VECTOR, self.dtype)
            cute.autovec_copy(sC[None, LATENT // 2 // VECTOR], scales)
            scales = cute.recast_tensor(scales, Float32)
            for group in cutlass.range_constexpr(LATENT // SCALED):
                # Sixteen values, which are two vectors.
                at = group * SHARE + chunk
                cute.autovec_copy(sC[None, at], held)
                scale = pair_of(scales[group], self.dtype)
                for w in cutlass.range_constexpr(VECTOR // 2):
                    low, high = widen_word(words[w], self.dtype)
                    wide_words[2 * w] = times(low, scale, self.dtype)
                    wide_words[2 * w + 1] = times(high, scale, self.dtype)
                for half in cutlass.range_constexpr(2):
                    vector = 2 * at + half
                    place = (vector % SHARE) ^ (row % 8)
                    target = sT[(None, 0), place, row, vector // SHARE, 0]
                    cute.autovec_copy(wide[None, half], target)
            cute.autovec_copy(sC[None, PACKED_VECTORS - ROPE // VECTOR + chunk], held)
            if cutlass.const_expr(self.dtype is not BFloat16):
                rope = cute.recast_tensor(held, BFloat16)
                held.store(rope.load().to(Float32).to(self.dtype))
            target = sT[(None, 0), chunk ^ (row % 8), row, LATENT // PIECE, 0]
            cute.autovec_copy(held, target)


def suffix(dtype):
    """PTX's word for a pair."""
    return "bf16x2" if dtype is BFloat16 else "f16x2"


@cute.jit
def pair_of(scale: Float32, dtype: cutlass.Constexpr):
    """A power of two, twice."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{suffix(dtype)}.f32 {{$w0}}, {{$r0}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[scale],
    )


@cute.jit
def times(pair: Uint32, scale: Uint32, dtype: cutlass.Constexpr):
    """Both elements of a word times those of another; -0 is what nothing is changed by."""
    return cute.arch.inline_ptx(
        f"""{{
        .reg .b32 nothing;
        mov.b32 nothing, 0x80008000;
        fma.rn.{suffix(dtype)} {{$w0}}, {{$r0}}, {{$r1}}, nothing;
        }}""",
        write_only_types=[Uint32],
        read_only_args=[pair, scale],
    )
