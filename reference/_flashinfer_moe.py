"""FlashInfer's mixture of experts for Hopper as a peer of `moe_mlp`: two products in CuTe DSL.

The first product gathers rows and activates, the second one adds weighted rows to the output by
atomics. FlashInfer's own sort needs headers that its wheel does not bring, so the sort is that of
`_padded_segments`, and the router is the top-k of `triton_kernels`. FlashInfer's tuner compiles
dozens of kernels; here a few tiles of each product race when the peer is bound (`_tile_race`).
"""

from __future__ import annotations

from kernelcat.errors import Unsupported
from kernelcat.reference._experts import ALPHA, DTYPES, LIMIT
from kernelcat.reference._moe_peers import check, check_hopper
from kernelcat.reference._peers import import_torch, required_by
from kernelcat.reference._tile_race import deadline, fastest
from kernelcat.reference._triton_kernels import load

BLOCK = 32
"""Rows of a block of values, and of the block of gates that follows it, in the first weights."""
FEW_ROWS, MANY_ROWS = 24, 96
"""Mean rows of an expert up to which tiles of 64 rows race, and from which tiles of 128 rows do.

Between the two both race."""


def tile_rows(rows_per_expert: float) -> tuple[int, ...]:
    """Tile sizes along the rows that race where an expert has ``rows_per_expert`` on average."""
    if rows_per_expert <= FEW_ROWS:
        return (64,)
    return (128,) if rows_per_expert >= MANY_ROWS else (128, 64)


def up_tiles(tile_m: int, rows_per_expert: float) -> list[tuple[tuple[int, int], int]]:
    """Candidates of the first product: the tile, and how many of its rows share a pass of weights.

    FlashInfer's tuner groups tiles from eight rows an expert on.
    """
    swizzle = 8 if rows_per_expert >= 8 else 1
    cols = (256, 192, 128) if tile_m == 128 else (128, 64, 256)
    return [((tile_m, n), swizzle) for n in cols]


def down_tiles(tile_m: int, hidden: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Candidates of the second product: the tile and the cluster.

    A cluster of two shares rows between neighbours along the columns, so their number is even.
    """
    cols = (256, 128) if tile_m == 128 else (128, 64)
    tiles = [((tile_m, n), (1, 1)) for n in cols]
    paired = [((tile_m, n), (1, 2)) for n in cols if -(-hidden // n) % 2 == 0]
    return tiles + paired[:1]


def blocks_of(w1):
    """``w1`` (experts, 2 * inter, hidden), gates in even rows, as blocks of values and gates."""
    experts, rows, hidden = w1.shape
    pairs = w1.view(experts, rows // (2 * BLOCK), BLOCK, 2, hidden)
    return pairs.flip(3).transpose(2, 3).reshape(experts, rows, hidden)


def flashinfer():
    """Top-k, sort, gathering product with SwiGLU, product that adds weighted rows to the output."""
    load()
    torch = import_torch("flashinfer")
    with required_by("flashinfer", "pip install flashinfer-python"):
        from flashinfer.fused_moe.cute_dsl.sm90_contiguous_gather_grouped_gemm_act_fusion import (
            sm90_contiguous_gather_grouped_gemm_act_fusion as gather_and_activate,
        )
        from flashinfer.fused_moe.cute_dsl.sm90_contiguous_grouped_gemm_finalize_fusion import (
            sm90_contiguous_grouped_gemm_finalize_fusion as multiply_and_combine,
        )
    from triton_kernels.topk import topk_forward

    from kernelcat.reference._padded_segments import sort

    chosen: dict = {}  # problem -> the winners of its race, which all copies of the arrays share

    def make(problem, arrays):
        check(problem, "flashinfer", DTYPES)
        check_hopper("flashinfer")
        if problem["inter"] % BLOCK:
            raise Unsupported(f"flashinfer is raced where inter is a multiple of {BLOCK}")
        experts, k, hidden = (problem[axis] for axis in ("experts", "top_k", "hidden"))
        w1, w2, out = blocks_of(arrays["w1"]), arrays["w2"], arrays["out"]
        activation = {}
        if problem["activation"] == "swiglu_oai":
            activation = {"swiglu_alpha": ALPHA, "swiglu_beta": 1.0, "swiglu_limit": LIMIT}

        def route():
            gates, ids, _ = topk_forward(arrays["logits"], k)
            return gates.float(), ids

        def up(tile):
            shape, swizzle = tile

            def run(rows):
                return gather_and_activate(
                    arrays["x"], w1, rows.tile_experts, rows.tile_ends, rows.rows,
                    rows.used_tiles, topk=k, permuted_m=rows.rows.numel(), tile_shape_mn=shape,
                    swizzle_size=swizzle, **activation,
                )  # fmt: skip

            return run

        def down(tile):
            shape, cluster = tile

            def run(h, rows, gates, out):
                multiply_and_combine(
                    h, w2, rows.tile_experts, rows.tile_ends, rows.rows, rows.used_tiles, gates,
                    out, topk=k, tile_shape_mn=shape, cluster_shape_mn=cluster,
                )  # fmt: skip

            return run

        def choose():
            """Tile rows, and a candidate of each product, with the least time together."""
            rows_per_expert = problem["tokens"] * k / experts
            gates, ids = route()
            end, scratch, races = deadline(), torch.zeros_like(out), []
            for tile_m in tile_rows(rows_per_expert):
                rows = sort(ids, experts, tile_m)
                first = fastest(up_tiles(tile_m, rows_per_expert), up, (rows,), end)
                h = first.run(rows)
                arguments = (h, rows, gates, scratch)
                second = fastest(down_tiles(tile_m, hidden), down, arguments, end)
                races.append((first.us + second.us, tile_m, first.candidate, second.candidate))
            return min(races)[1:]

        if problem not in chosen:
            chosen[problem] = choose()
        tile_m, first, second = chosen[problem]
        up_product, down_product = up(first), down(second)

        def run():
            gates, ids = route()
            rows = sort(ids, experts, tile_m)
            out.zero_()
            down_product(up_product(rows), rows, gates, out)

        return run

    return make
