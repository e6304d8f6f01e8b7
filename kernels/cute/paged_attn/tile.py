"""What a warp does with its tokens of a tile: scores, a step of the online softmax, values.

Of float8 a unit of 16 bits is a pair. What ldmatrix gives a thread of it is then four neighbours of
a key, and the pairs of a value's columns: ``key_column`` and ``value_column`` say which element of
the head the tensor cores take for which.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from kernelcat.kernels.cute.common.float8 import even_odd, widen
from kernelcat.kernels.cute.common.online_softmax import exp2, logit


class Tile:
    """``tokens`` of a tile, ``width`` units each, against the rows of a warp.

    Of every 16 rows only ``row_halves`` times 8 (1 or 2) are queries.
    """

    def __init__(
        self, dtype, fp8, head_dim, block_m, row_halves, tokens, window, softcap, scales
    ):
        self.dtype, self.fp8, self.head_dim = dtype, fp8, head_dim
        self.block_m, self.row_halves, self.tokens = block_m, row_halves, tokens
        self.width = head_dim // 2 if fp8 else head_dim
        self.window, self.softcap, self.page_scales = window, softcap, scales == "page"
        # Weights are at most 1, and float8 becomes float16 by one instruction, bfloat16 by four.
        self.value_dtype = Float16 if fp8 and not self.page_scales else dtype
        self.parks_query = head_dim * (2 if fp8 else 1) >= 256

    def key_column(self, col):
        """The element of a query that meets column ``col`` of the first product."""
        if not self.fp8:
            return col
        return col // 16 * 16 + col % 8 // 2 * 4 + col // 8 % 2 * 2 + col % 2

    def value_column(self, col):
        """The element of a head that column ``col`` of the second product is."""
        if not self.fp8:
            return col
        return col // 16 * 16 + col % 8 * 2 + col // 8 % 2

    def query_layout(self, threads):
        """(8, MMA_K, threads): what each thread parks of the queries, 16 bytes at a time."""
        stride = (1, 8 * threads, 8) if self.parks_query else (0, 0, 0)
        return cute.make_layout((8, self.head_dim // 16, threads), stride=stride)

    @cute.jit
    def load_query(
        self,
        tiled_mma: cute.TiledMma,
        sQ: cute.Tensor,  # (8, MMA_K) of this thread
        tCcQ: cute.Tensor,  # ((2, 2, 2), MMA_M, MMA_K): rows and columns of a thread
        mQ: cute.Tensor,  # (head_dim, group, query tokens)
        row_begin: Int32,
        row_end: Int32,
        group: Int32,
    ):
        """This thread's queries; rows from ``row_end`` on are as the last before.

        In registers, or in ``sQ`` where registers are short.
        """
        tSrQ = tiled_mma.make_fragment_A(tiled_mma.partition_shape_A((self.block_m, self.head_dim)))
        if cutlass.const_expr(self.row_halves == 1):
            tSrQ.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(tSrQ, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                row = cutlass.min(row_begin + tCcQ[(0, half, 0), i, 0][0], row_end - 1)
                gQ = mQ[None, row % group, row // group]
                for k in cutlass.range_constexpr(cute.size(tSrQ, mode=[2])):
                    for half_k in cutlass.range_constexpr(2):
                        col = self.key_column(tCcQ[(0, 0, half_k), 0, k][1])
                        pair = cute.local_tile(gQ, (2,), (col // 2,))
                        cute.autovec_copy(pair, tSrQ[(None, half, half_k), i, k])
        if cutlass.const_expr(self.parks_query):
            for k in cutlass.range_constexpr(self.head_dim // 16):
                cute.autovec_copy(flat(tSrQ[None, 0, k]), sQ[None, k])
        return tSrQ

    @cute.jit
    def query(self, tiled_mma: cute.TiledMma, tSrQ: cute.Tensor, sQ: cute.Tensor, k):
        """16 columns of this thread's queries."""
        columns = tSrQ[None, None, k]
        if cutlass.const_expr(self.parks_query):
            shape = tiled_mma.partition_shape_A((self.block_m, 16))
            columns = tiled_mma.make_fragment_A(shape)[None, None, 0]
            cute.autovec_copy(sQ[None, k], flat(columns))
        return columns

    @cute.jit
    def scores(
        self,
        tiled_mma: cute.TiledMma,
        tidx: Int32,  # in the warps that share the tokens
        tSrQ: cute.Tensor,
        sQ: cute.Tensor,
        sK: cute.Tensor,  # (tokens, width)
    ):
        """The products of queries and keys."""
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
                    query = self.query(tiled_mma, tSrQ, sQ, 2 * k + half)
                    cute.gemm(tiled_mma, acc, query, halves[None, None, half], acc)
            else:
                query = self.query(tiled_mma, tSrQ, sQ, k)
                cute.gemm(tiled_mma, acc, query, tSrK[None, None, k], acc)
        return acc

    @cute.jit
    def widen_keys(self, tiled_mma: cute.TiledMma, pairs: cute.Tensor):
        """16 units of each token -> 32 elements: a word of four is a thread's share of 16."""
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
        acc: cute.Tensor,  # scores, made probabilities
        out: cute.Tensor,  # sums of values so far, rescaled
        most: cute.Tensor,  # (rows of a thread,)
        total: cute.Tensor,  # this thread's share
        limits: cute.Tensor,  # (rows of a thread,): the last token a row sees
        tScS: cute.Tensor,  # as acc: columns of a thread
        sScale: cute.Tensor,  # (tokens, 2): of keys and of values
        token: Int32,  # the first
        hides: cutlass.Boolean,  # whether some row does not see some token
        window: Int32,
        scale: Float32,
        softcap: Float32,
    ):
        """A step of the online softmax."""
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
        if hides:
            self.hide(acc, limits, tScS, token, window)
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                row, before = 2 * i + half, most[2 * i + half]
                largest = before
                for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        largest = cute.arch.fmax(largest, acc[(c, half), i, j])
                largest = cute.arch.warp_reduction_max(largest, threads_in_group=4)
                rescale, part = exp2(before - largest), Float32(0)
                for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        p = exp2(acc[(c, half), i, j] - largest)
                        part += p
                        if cutlass.const_expr(self.page_scales):
                            p = p * sScale[tScS[(c, 0), 0, j][1], 1]
                        acc[(c, half), i, j] = p
                most[row], total[row] = largest, total[row] * rescale + part
                for j in cutlass.range_constexpr(cute.size(out, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        out[(c, half), i, j] = out[(c, half), i, j] * rescale

    @cute.jit
    def hide(
        self,
        acc: cute.Tensor,
        limits: cute.Tensor,
        tScS: cute.Tensor,
        token: Int32,
        window: Int32,
    ):
        """-inf for what a row does not see."""
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                limit = limits[2 * i + half] - token
                for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        col = tScS[(c, 0), 0, j][1]
                        hidden = col > limit
                        if cutlass.const_expr(self.window):
                            hidden = hidden or col <= limit - window
                        if hidden:
                            acc[(c, half), i, j] = -Float32.inf

    @cute.jit
    def values(
        self,
        tiled_mma: cute.TiledMma,  # as the cache is loaded
        value_mma: cute.TiledMma,  # of value_dtype
        tidx: Int32,
        acc: cute.Tensor,  # probabilities
        sV: cute.Tensor,  # (tokens, width)
        out: cute.Tensor,
    ):
        """Add the values, times their probabilities, to ``out``."""
        weights = acc.load()
        rounded = weights.to(self.value_dtype)
        operands = [self.as_operand(acc, rounded)]
        if cutlass.const_expr(self.page_scales):
            # Scales make weights of any size: what rounding took from them counts too.
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
    def widen_values(self, value_mma: cute.TiledMma, pairs: cute.Tensor):
        """Even columns of eight units are one step of the product, odd ones the next."""
        wide = value_mma.make_fragment_B(value_mma.partition_shape_B((self.head_dim, 16)))
        source, target = cute.recast_tensor(pairs, Uint32), cute.recast_tensor(wide, Uint32)
        for n in cutlass.range_constexpr(self.width // 8):
            columns = even_odd(source[(0, 0), n], source[(0, 1), n])
            for odd in cutlass.range_constexpr(2):
                low, high = widen(columns[odd], self.value_dtype)
                target[(0, 0), 2 * n + odd, 0], target[(0, 1), 2 * n + odd, 0] = low, high
        return wide

    def as_operand(self, acc, rounded):
        """What sums became as the first operand of a product: ((2, 2, 2), MMA_M, MMA_K)."""
        p = cute.make_rmem_tensor_like(acc, self.value_dtype)
        p.store(rounded)
        rows = cute.size(acc, mode=[1])
        layout = cute.make_layout(
            ((2, 2, 2), rows, self.tokens // 16), stride=((1, 2, 4 * rows), 4, 8 * rows)
        )
        return cute.make_tensor(p.iterator, layout)


def flat(fragment):
    """A compact fragment as one vector."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))
