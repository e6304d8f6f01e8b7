"""Copies tokens from their pages into shared memory by cp.async; eight threads copy a token.

A thread looks up the pages of its tokens before it copies them. Entries of the block table beyond
the sequence's end are not used, and tokens beyond the end become zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelcat.kernels.cute.common.float8 import widen as widen_word
from kernelcat.reference._mla_row import LATENT, PACKED, ROPE, ROW, SCALED

VECTOR = 8
"""Units of 16 bits in a copy."""
TOKEN_THREADS = 8
"""Threads that copy a token."""
PIECE = VECTOR * TOKEN_THREADS
"""Columns in 128 bytes: a tile is stored as swizzled pieces of this width."""
PACKED_VECTORS = PACKED // 2 // VECTOR
"""Vectors of a packed row."""


def latent_layout(rows, stages):
    """(rows, ROW, stages) in swizzled atoms of 8 rows: ldmatrix has no bank conflicts."""
    atom = cute.make_composed_layout(
        cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, PIECE), stride=(PIECE, 1))
    )
    return cute.tile_to_shape(atom, (rows, ROW, stages), (0, 1, 2))


def as_vectors(memory, rows, stages):
    """((VECTOR, 1), TOKEN_THREADS, rows, pieces, stages): vector c of row r is at c ^ (r % 8)."""
    piece = PIECE * rows
    layout = cute.make_layout(
        ((VECTOR, 1), TOKEN_THREADS, rows, ROW // PIECE, stages),
        stride=((1, 0), VECTOR, PIECE, piece, piece * (ROW // PIECE)),
    )
    return cute.make_tensor(memory, layout)


class Loader:
    """How ``threads`` threads fill a ring of ``stages`` tiles of ``block_n`` tokens."""

    def __init__(self, dtype, packed, page_size, block_n, stages, threads):
        self.dtype, self.packed, self.page_size = dtype, packed, page_size
        self.block_n, self.stages = block_n, stages
        self.pass_rows = threads // TOKEN_THREADS
        self.passes = block_n // self.pass_rows
        self.ring_units = stages * block_n * (PACKED // 2 if packed else ROW)

    def ring_of(self, memory):
        """((VECTOR, 1), vectors, block_n, stages): packed rows, not swizzled."""
        row = PACKED // 2
        layout = cute.make_layout(
            ((VECTOR, 1), PACKED_VECTORS, self.block_n, self.stages),
            stride=((1, 0), VECTOR, row, row * self.block_n),
        )
        return cute.make_tensor(memory, layout)

    def atom(self):
        """16 bytes by cp.async, past L1."""
        return cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
            self.dtype,
            num_bits_per_copy=128,
        )

    @cute.jit
    def load_query(
        self,
        gQ: cute.Tensor,  # ((VECTOR, 1), ROW / VECTOR, rows)
        memory: cute.Pointer,  # (block_m, ROW), swizzled
        num_rows: Int32,
        block_m: cutlass.Constexpr[int],
        tidx: Int32,
    ):
        """Starts to copy ``block_m`` rows; rows from ``num_rows`` on become zeros."""
        atom, sQ = self.atom(), as_vectors(memory, block_m, 1)
        row, chunk = tidx // TOKEN_THREADS, tidx % TOKEN_THREADS
        is_row = cute.make_rmem_tensor(1, Boolean)
        is_row[0] = row < num_rows
        if row < block_m:
            for i in cutlass.range_constexpr(ROW // PIECE):
                source = gQ[None, i * TOKEN_THREADS + chunk, cutlass.min(row, num_rows - 1)]
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
        """Looks up the pages of this thread's tokens; beyond the end, that of the last token."""
        for i in cutlass.range_constexpr(self.passes):
            token = tile * self.block_n + i * self.pass_rows + tidx // TOKEN_THREADS
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
        """Starts this thread's copies of a tile."""
        atom, chunk = self.atom(), tidx % TOKEN_THREADS
        is_token = cute.make_rmem_tensor(1, Boolean)
        for i in cutlass.range_constexpr(self.passes):
            row = i * self.pass_rows + tidx // TOKEN_THREADS
            token = tile * self.block_n + row
            is_token[0] = token < kv_len
            page_slot = Uint32(cutlass.min(token, kv_len - 1)) % self.page_size
            slot = Int64(pages[i]) * self.page_size + Int64(page_slot)
            gC = mC[None, None, slot]
            if cutlass.const_expr(self.packed):
                sC = self.ring_of(memory)[None, None, row, stage]
                for v in cutlass.range_constexpr(0, PACKED_VECTORS - 1, TOKEN_THREADS):
                    cute.copy(atom, gC[None, v + chunk], sC[None, v + chunk], pred=is_token)
                if chunk == 0:  # 41 vectors: five for each thread, and one more
                    last = PACKED_VECTORS - 1
                    cute.copy(atom, gC[None, last], sC[None, last], pred=is_token)
            else:
                sC = as_vectors(memory, self.block_n, self.stages)
                sC = sC[None, chunk ^ (row % 8), row, None, stage]
                for v in cutlass.range_constexpr(ROW // PIECE):
                    cute.copy(atom, gC[None, v * TOKEN_THREADS + chunk], sC[None, v], pred=is_token)

    @cute.jit
    def widen(
        self,
        memory: cute.Pointer,  # the ring
        tile: cute.Pointer,  # (block_n, ROW), written
        stage: Int32,
        tidx: Int32,
    ):
        """Widens a tile of packed rows to 16-bit elements, exactly: scales are powers of two."""
        chunk = tidx % TOKEN_THREADS
        sT = as_vectors(tile, self.block_n, 1)
        loaded = cute.make_rmem_tensor(VECTOR, self.dtype)
        words = cute.recast_tensor(loaded, Uint32)
        wide = cute.make_rmem_tensor((VECTOR, 2), self.dtype)
        wide_words = cute.recast_tensor(wide, Uint32)
        for i in cutlass.range_constexpr(self.passes):
            row = i * self.pass_rows + tidx // TOKEN_THREADS
            sC = self.ring_of(memory)[(None, 0), None, row, stage]
            scales = cute.make_rmem_tensor(VECTOR, self.dtype)
            cute.autovec_copy(sC[None, LATENT // 2 // VECTOR], scales)
            scales = cute.recast_tensor(scales, Float32)
            for group in cutlass.range_constexpr(LATENT // SCALED):
                # Sixteen float8 values, which become two vectors.
                packed_vector = group * TOKEN_THREADS + chunk
                cute.autovec_copy(sC[None, packed_vector], loaded)
                scale = pair_of(scales[group], self.dtype)
                for w in cutlass.range_constexpr(VECTOR // 2):
                    low, high = widen_word(words[w], self.dtype)
                    wide_words[2 * w] = times(low, scale, self.dtype)
                    wide_words[2 * w + 1] = times(high, scale, self.dtype)
                for half in cutlass.range_constexpr(2):
                    vector = 2 * packed_vector + half
                    swizzled = (vector % TOKEN_THREADS) ^ (row % 8)
                    target = sT[(None, 0), swizzled, row, vector // TOKEN_THREADS, 0]
                    cute.autovec_copy(wide[None, half], target)
            cute.autovec_copy(sC[None, PACKED_VECTORS - ROPE // VECTOR + chunk], loaded)
            if cutlass.const_expr(self.dtype is not BFloat16):
                rope = cute.recast_tensor(loaded, BFloat16)
                loaded.store(rope.load().to(Float32).to(self.dtype))
            target = sT[(None, 0), chunk ^ (row % 8), row, LATENT // PIECE, 0]
            cute.autovec_copy(loaded, target)


def suffix(dtype):
    """PTX's suffix for a pair of elements."""
    return "bf16x2" if dtype is BFloat16 else "f16x2"


@cute.jit
def pair_of(scale: Float32, dtype: cutlass.Constexpr):
    """A power of two in both halves of a word."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{suffix(dtype)}.f32 {{$w0}}, {{$r0}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[scale],
    )


@cute.jit
def times(pair: Uint32, scale: Uint32, dtype: cutlass.Constexpr):
    """Products of the elements of two words, by fma: adding -0 changes no product."""
    return cute.arch.inline_ptx(
        f"""{{
        .reg .b32 minus_zero;
        mov.b32 minus_zero, 0x80008000;
        fma.rn.{suffix(dtype)} {{$w0}}, {{$r0}}, {{$r1}}, minus_zero;
        }}""",
        write_only_types=[Uint32],
        read_only_args=[pair, scale],
    )
