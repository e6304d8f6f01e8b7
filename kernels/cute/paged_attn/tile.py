"""What a warp computes of its tokens of a tile: scores, a step of the online softmax, values.

ldmatrix moves units of 16 bits, and a unit of a float8 cache is a pair of elements. So a thread
gets four consecutive elements of a key, and pairs of columns of a value, not the elements that a
16-bit operand would have in that place. Products are right all the same when the columns of the
head are taken in another order: ``key_column`` and ``value_column`` are that order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from kernelcat.kernels.cute.common.float8 import even_odd, widen
from kernelcat.kernels.cute.common.fragments import flat
from kernelcat.kernels.cute.common.online_softmax import exp2, logit


class Tile:
    """The rows of a warp and its ``tokens`` of a tile, of ``width`` units of 16 bits each.

    Only the first 8 of every 16 rows are queries where ``row_halves`` is 1; all where it is 2.
    """

    def __init__(
        self, dtype, fp8, head_dim, block_m, row_halves, tokens, window, softcap, scales
    ):
        self.dtype, self.fp8, self.head_dim = dtype, fp8, head_dim
        self.block_m, self.row_halves, self.tokens = block_m, row_halves, tokens
        self.width = head_dim // 2 if fp8 else head_dim
        self.window, self.softcap, self.page_scales = window, softcap, scales == "page"
        # Float8 is widened to float16 by one instruction, to bfloat16 by four. Weights are at most
        # 1, which float16 holds, unless scales of pages multiply them.
        self.value_dtype = Float16 if fp8 and not self.page_scales else dtype
        self.has_shared_query = head_dim * (2 if fp8 else 1) >= 256

    def key_column(self, col):
        """The element of the head in column ``col`` of the operands of the first product."""
        if not self.fp8:
            return col
        return col // 16 * 16 + col % 8 // 2 * 4 + col // 8 % 2 * 2 + col % 2

    def value_column(self, col):
        """The element of the head in column ``col`` of the second product."""
        if not self.fp8:
            return col
        return col // 16 * 16 + col % 8 * 2 + col // 8 % 2

    def query_layout(self, threads):
        """(8, MMA_K, threads): each thread's queries, in vectors of 16 bytes."""
        stride = (1, 8 * threads, 8) if self.has_shared_query else (0, 0, 0)
        return cute.make_layout((8, self.head_dim // 16, threads), stride=stride)

    @cute.jit
    def load_query(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,  # (8, MMA_K) of this thread
        tCcQ: cute.Tensor,  # ((2, 2, 2), MMA_M, MMA_K): rows and columns of a thread
        gQ: cute.Tensor,  # (head_dim, group_size, query tokens)
        row_begin: Int32,
        row_end: Int32,
        group_size: Int32,
    ):
        """Loads this thread's queries; rows from ``row_end`` on repeat the last row.

        They stay in registers, or are stored in ``sQ`` where registers are too few.
        """
        tSrQ = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((self.block_m, self.head_dim)))
        if cutlass.const_expr(self.row_halves == 1):
            tSrQ.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(tSrQ, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                row = cutlass.min(row_begin + tCcQ[(0, half, 0), i, 0][0], row_end - 1)
                gRow = gQ[None, row % group_size, row // group_size]
                for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
                    for half_k in cutlass.range_constexpr(2):
                        col = self.key_column(tCcQ[(0, 0, half_k), 0, k][1])
                        pair = cute.local_tile(gRow, (2,), (col // 2,))
                        cute.autovec_copy(pair, tSrQ[(None, half, half_k), i, k])
        if cutlass.const_expr(self.has_shared_query):
            for k in cutlass.range_constexpr(self.head_dim // 16):
                cute.autovec_copy(flat(tSrQ[None, 0, k]), sQ[None, k])
        return tSrQ

    @cute.jit
    def query_columns(
        self,
        tiled_mma: cute.TiledMma,
        tSrQ: cute.Tensor,  # ((2, 2, 2), MMA_M, MMA_K)
        sQ: cute.Tensor,  # (8, MMA_K)
        k,
    ):
        """Columns [16 k, 16 k + 16) of this thread's queries."""
        columns = tSrQ[None, None, k]
        if cutlass.const_expr(self.has_shared_query):
            shape = tiled_mma.partition_shape_A((self.block_m, 16))
            columns = tiled_mma.make_fragment_A(shape)[None, None, 0]
            cute.autovec_copy(sQ[None, k], flat(columns))
        return columns

    @cute.jit
    def multiply_keys(
        self,
        tiled_mma: cute.TiledMma,
        tidx: Int32,  # among the warps with the same tokens
        tSrQ: cute.Tensor,  # ((2, 2, 2), MMA_M, MMA_K)
        sQ: cute.Tensor,  # (8, MMA_K) of this thread
        sK: cute.Tensor,  # (tokens, width)
    ):
        """Scores: the products of queries and keys, ((2, 2), MMA_M, MMA_N)."""
        acc = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((self.block_m, self.tokens)), Float32
        )
        acc.fill(0.0)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_B(atom, tiled_mma)
        tSrK = tiled_mma.make_fragment_B(tiled_mma.get_slice(tidx).partition_B(sK))
        tSsK, tXrK = copy.get_slice(tidx).partition_S(sK), copy.retile(tSrK)
        for k in cutlass.range_constexpr(self.width // 16):
            cute.copy(copy, tSsK[None, None, k], tXrK[None, None, k])
            if cutlass.const_expr(self.fp8):
                halves = self.widen_keys(tiled_mma, tSrK[None, None, k])
                for half in cutlass.range_constexpr(2):
                    query = self.query_columns(tiled_mma, tSrQ, sQ, 2 * k + half)
                    cute.gemm(tiled_mma, acc, query, halves[None, None, half], acc)
            else:
                query = self.query_columns(tiled_mma, tSrQ, sQ, k)
                cute.gemm(tiled_mma, acc, query, tSrK[None, None, k], acc)
        return acc

    @cute.jit
    def widen_keys(
        self,
        tiled_mma: cute.TiledMma,
        pairs: cute.Tensor,  # ((2, 2), MMA_N) of 16-bit units
    ):
        """Widens 16 units of each token to 32 elements, ((2, 2), MMA_N, 2).

        A 32-bit word has the four elements that this thread holds of 16 columns.
        """
        wide = tiled_mma.make_fragment_B(tiled_mma.partition_shape_B((self.tokens, 32)))
        source, target = cute.recast_tensor(pairs, Uint32), cute.recast_tensor(wide, Uint32)
        for n in cutlass.range_constexpr(self.tokens // 8):
            for half in cutlass.range_constexpr(2):
                low, high = widen(source[(0, half), n], self.dtype)
                target[(0, 0), n, half], target[(0, 1), n, half] = low, high
        return wide

    @cute.jit
    def softmax(
        self,
        acc: cute.Tensor,  # ((2, 2), MMA_M, MMA_N): scores, overwritten by weights
        out: cute.Tensor,  # ((2, 2), MMA_M, MMA_N): sums of values so far, rescaled
        row_max: cute.Tensor,  # (rows of a thread,)
        row_sum: cute.Tensor,  # (rows of a thread,), of this thread's columns only
        last_visible: cute.Tensor,  # (rows of a thread,): position of the last token a row sees
        tScS: cute.Tensor,  # as acc: rows and columns of this thread's scores
        sScale: cute.Tensor,  # (tokens, 2): of keys and of values
        token: Int32,  # the first token of the warp
        needs_mask: cutlass.Boolean,  # whether some row does not see some token of the tile
        window: Int32,
        scale: Float32,
        softcap: Float32,
    ):
        """Takes one step of the online softmax."""
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    factor = scale
                    if cutlass.const_expr(self.page_scales):
                        factor = scale * sScale[tScS[(c, 0), 0, j][1], 0]
                    for half in cutlass.range_constexpr(self.row_halves):
                        acc[(c, half), i, j] = logit(
                            acc[(c, half), i, j], factor, softcap, self.softcap
                        )
        if needs_mask:
            self.mask(acc, last_visible, tScS, token, window)
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                row, old_max = 2 * i + half, row_max[2 * i + half]
                new_max = old_max
                for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        new_max = cute.arch.fmax(new_max, acc[(c, half), i, j])
                new_max = cute.arch.warp_reduction_max(new_max, threads_in_group=4)
                rescale, tile_sum = exp2(old_max - new_max), Float32(0)
                for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        p = exp2(acc[(c, half), i, j] - new_max)
                        tile_sum += p
                        if cutlass.const_expr(self.page_scales):
                            p = p * sScale[tScS[(c, 0), 0, j][1], 1]
                        acc[(c, half), i, j] = p
                row_max[row], row_sum[row] = new_max, row_sum[row] * rescale + tile_sum
                for j in cutlass.range_constexpr(cute.size(out, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        out[(c, half), i, j] = out[(c, half), i, j] * rescale

    @cute.jit
    def mask(
        self,
        acc: cute.Tensor,  # ((2, 2), MMA_M, MMA_N)
        last_visible: cute.Tensor,  # (rows of a thread,)
        tScS: cute.Tensor,  # as acc
        token: Int32,
        window: Int32,
    ):
        """Sets the scores of tokens that a row does not see to -inf."""
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                limit = last_visible[2 * i + half] - token
                for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        col = tScS[(c, 0), 0, j][1]
                        is_hidden = col > limit
                        if cutlass.const_expr(self.window):
                            is_hidden = is_hidden or col <= limit - window
                        if is_hidden:
                            acc[(c, half), i, j] = -Float32.inf

    @cute.jit
    def add_values(
        self,
        tiled_mma: cute.TiledMma,  # of the units that ldmatrix loads
        value_mma: cute.TiledMma,  # of value_dtype
        tidx: Int32,
        acc: cute.Tensor,  # ((2, 2), MMA_M, MMA_N): weights
        sV: cute.Tensor,  # (tokens, width)
        out: cute.Tensor,  # ((2, 2), MMA_M, MMA_N)
    ):
        """Adds the values, times their weights, to ``out``."""
        weights = acc.load()
        rounded = weights.to(self.value_dtype)
        operands = [self.as_operand(acc, rounded)]
        if cutlass.const_expr(self.page_scales):
            # Scales make weights of any size, so the rounding error of weights is multiplied too.
            rest = (weights - rounded.to(Float32)).to(self.value_dtype)
            operands.append(self.as_operand(acc, rest))
        sV = cute.composition(
            sV, cute.make_layout((self.width, self.tokens), stride=(self.tokens, 1))
        )
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype)
        copy = cute.make_tiled_copy_B(atom, tiled_mma)
        tOrV = tiled_mma.make_fragment_B(tiled_mma.get_slice(tidx).partition_B(sV))
        tOsV, tXrV = copy.get_slice(tidx).partition_S(sV), copy.retile(tOrV)
        for k in cutlass.range_constexpr(self.tokens // 16):
            cute.copy(copy, tOsV[None, None, k], tXrV[None, None, k])
            if cutlass.const_expr(self.fp8):
                wide = self.widen_values(value_mma, tOrV[None, None, k])
                for p in operands:
                    cute.gemm(value_mma, out, p[None, None, k], wide[None, None, 0], out)
            else:
                for p in operands:
                    cute.gemm(tiled_mma, out, p[None, None, k], tOrV[None, None, k], out)

    @cute.jit
    def widen_values(
        self,
        value_mma: cute.TiledMma,
        pairs: cute.Tensor,  # ((2, 2), MMA_N) of 16-bit units
    ):
        """Widens the values of 16 tokens to ((2, 2), MMA_N, 1).

        The even columns of eight units are one step of MMA_N, the odd columns the next one.
        """
        wide = value_mma.make_fragment_B(value_mma.partition_shape_B((self.head_dim, 16)))
        source, target = cute.recast_tensor(pairs, Uint32), cute.recast_tensor(wide, Uint32)
        for n in cutlass.range_constexpr(self.width // 8):
            columns = even_odd(source[(0, 0), n], source[(0, 1), n])
            for odd in cutlass.range_constexpr(2):
                low, high = widen(columns[odd], self.value_dtype)
                target[(0, 0), 2 * n + odd, 0], target[(0, 1), 2 * n + odd, 0] = low, high
        return wide

    def as_operand(self, acc, rounded):
        """Accumulators, rounded, as the first operand of a product: ((2, 2, 2), MMA_M, MMA_K)."""
        p = cute.make_rmem_tensor_like(acc, self.value_dtype)
        p.store(rounded)
        rows = cute.size(acc, mode=[1])
        layout = cute.make_layout(
            ((2, 2, 2), rows, self.tokens // 16), stride=((1, 2, 4 * rows), 4, 8 * rows)
        )
        return cute.make_tensor(p.iterator, layout)
