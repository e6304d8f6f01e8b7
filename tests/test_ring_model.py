"""The time model of products whose operands TMA loads into a ring."""

from dataclasses import replace

import pytest

from kernelcat.catalog.ring_model import BITS_8, BITS_16, RingModel, Tiles
from kernelcat.runtime import gpu as gpus

H100 = gpus.find("h100")
WHOLE_CHIP = Tiles(
    rows=132 * 128, cols=128, row_bytes=8192, block_m=128, block_n=128, cluster_m=1, cluster_n=1,
    thread_blocks=132, waves=1, stored=1,
)  # fmt: skip
"""One tile of 128 x 128 on each SM."""
IDEAL = RingModel(
    start_us=0.0,
    tensor_share=1.0,
    tile_rates=((64, 0.5), (128, 1.0)),
    l2_bytes_per_us=1e12,
    l2_power=1.0,
    port_bytes_per_us=1e12,
    split_lines=1.0,
    split_sectors=1.0,
    cluster=1.0,
    store_us=0.0,
    dram_share=1.0,
    order=64.0,
    memory_order=64.0,
    split_k_block=1.0,
    cluster_barrier_us=0.0,
    cluster_bytes_per_us=1e12,
    last_sums_us=0.0,
    part_us=0.0,
    partial_bytes_per_us=1e12,
)
"""Nothing takes time but the tensor cores, at their peak rate, and DRAM."""


def us(model: RingModel, tiles: Tiles, dtype: str = "bfloat16", bytes_moved: int = 0) -> float:
    return model.gemm_us(tiles, H100, dtype, bytes_moved)


@pytest.mark.parametrize(("dtype", "k"), [("bfloat16", 4096), ("float8_e4m3fn", 8192)])
def test_without_anything_else_a_product_takes_what_the_tensor_cores_take(dtype, k) -> None:
    flops = 2 * WHOLE_CHIP.rows * WHOLE_CHIP.cols * k
    assert us(IDEAL, WHOLE_CHIP, dtype) == pytest.approx(flops / H100.flops[dtype] * 1e6)


def test_without_products_an_array_takes_what_dram_takes() -> None:
    no_tiles = WHOLE_CHIP._replace(waves=0, stored=0, thread_blocks=0)
    assert us(IDEAL, no_tiles, bytes_moved=10**9) == pytest.approx(1e9 / H100.bandwidth * 1e6)


def test_what_runs_at_once_takes_longer_than_the_longest_and_less_than_the_sum() -> None:
    no_tiles = WHOLE_CHIP._replace(waves=0, stored=0)
    start = BITS_16.start_us
    products, memory = us(BITS_16, WHOLE_CHIP) - start, us(BITS_16, no_tiles, "bfloat16", 10**8)
    memory -= start
    both = us(BITS_16, WHOLE_CHIP, bytes_moved=10**8) - start
    assert max(products, memory) < both < products + memory


@pytest.mark.parametrize("model", [BITS_16, BITS_8])
def test_rows_that_begin_at_no_line_cost_more_and_those_of_16_bits_at_no_sector_most(model) -> None:
    line, sector, none = (
        us(model, WHOLE_CHIP._replace(row_bytes=row_bytes))
        for row_bytes in (8192, 8192 - 64, 8192 - 16)
    )
    assert line < sector < none if model is BITS_16 else line < sector == none


def test_a_cluster_pays_only_where_operands_limit() -> None:
    wide = WHOLE_CHIP._replace(block_n=256, cols=256)
    assert us(BITS_16, wide) < us(BITS_16, wide._replace(cluster_n=2))
    unaligned = {"row_bytes": 8192 - 16, "block_m": 128, "block_n": 64}
    assert us(BITS_16, WHOLE_CHIP._replace(**unaligned, cluster_n=2)) < us(
        BITS_16, WHOLE_CHIP._replace(**unaligned)
    )


def test_rows_outside_of_the_product_are_not_loaded() -> None:
    few = WHOLE_CHIP._replace(rows=5, thread_blocks=1)
    assert us(BITS_16, few) < us(BITS_16, few._replace(rows=128))


def test_tiles_between_fitted_widths_have_rates_between_theirs() -> None:
    narrow, middle, wide = (us(IDEAL, WHOLE_CHIP._replace(block_n=n)) / n for n in (64, 96, 128))
    assert narrow == pytest.approx(2 * wide)
    assert middle == pytest.approx(wide / 0.75)


def test_only_splits_have_partial_sums() -> None:
    area = 128 * 128
    assert BITS_16.sums_us(1, area) == BITS_16.cluster_sums_us(1, area) == 0.0
    assert 0 < BITS_16.cluster_sums_us(2, area) < BITS_16.cluster_sums_us(4, area)
    assert 0 < BITS_16.sums_us(2, area) < BITS_16.sums_us(4, area)


def test_each_further_split_costs_its_latency() -> None:
    model = replace(IDEAL, part_us=0.5)
    assert model.sums_us(4, 64) == pytest.approx(2.0)


def test_what_ends_a_product_overlaps_with_no_load() -> None:
    def took(**more: float) -> float:
        return BITS_16.gemm_us(WHOLE_CHIP, H100, "bfloat16", 10**8, **more)

    assert took(end_us=3.0) == pytest.approx(took() + 3.0)
    assert took() < took(extra_us=3.0) < took(end_us=3.0)


def test_a_few_tiles_get_more_of_l2_each_but_not_all_that_the_others_leave() -> None:
    """A third of the SMs loads: with a power of 1 each would get three times as much."""
    tiles = WHOLE_CHIP._replace(rows=44 * 128, thread_blocks=44)
    bound = replace(IDEAL, l2_bytes_per_us=1e3)
    even, less = us(bound, tiles), us(replace(bound, l2_power=0.5), tiles)
    assert 3 * even == pytest.approx(us(bound, WHOLE_CHIP))
    assert less == pytest.approx(3**0.5 * even)
