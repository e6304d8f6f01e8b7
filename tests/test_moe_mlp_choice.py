"""moe_mlp untuned: which variant and which configuration serve a problem that nobody measured."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.call.choice import choose
from kernelcat.catalog.implementation import Config, LeastEstimate
from kernelcat.catalog.random_problems import as_called
from kernelcat.reference._assignments import row_blocks
from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_mlp import ENTRY, layer
from kernelcat.reference.moe_route import routed
from kernelcat.runtime import gpu
from kernelcat.store import Choice

H200 = gpu.find("h200")
MXFP4 = {"format": "mxfp4", "packing": "tiles"}

WINNERS = {
    ("gptoss-1-mxfp4", "stream"): {"col_tiles": 1, "row_tiles": 2, "team": 4, "depth": 3},
    ("gptoss-8-mxfp4", "stream"): {"col_tiles": 1, "row_tiles": 2, "team": 2, "depth": 3},
    ("gptoss-64-mxfp4", "stream"): {"col_tiles": 2, "row_tiles": 2, "team": 2, "depth": 3},
    ("gptoss-64-mxfp4", "grouped"): {"first_tile": "16x128", "second_tile": "16x128"},
    ("gptoss-256-mxfp4", "grouped"): {"first_tile": "48x128", "second_tile": "48x128"},
    ("gptoss-1024-mxfp4-zipf", "grouped"): {"first_tile": "128x192", "second_tile": "192x128"},
    ("gptoss-4096-mxfp4", "grouped"): {"first_tile": "128x192", "second_tile": "192x128"},
    ("gptoss-16384-mxfp4", "grouped"): {"first_tile": "128x192", "second_tile": "256x128"},
}
"""Problem and variant -> the configuration that won on an H200, or was within 2 % of the winner."""


@pytest.mark.parametrize(("name", "variant"), WINNERS)
def test_the_default_is_what_a_tune_found_on_an_h200(name: str, variant: str) -> None:
    implementation = catalog.implementation("moe_mlp", "cuda", variant)
    problem = ENTRY.problems[name]
    assert implementation.default(problem, H200) == WINNERS[name, variant]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "axes", "variant"),
    [
        (8, 4, 32, MXFP4, "stream"),
        (64, 1, 64, MXFP4, "stream"),
        (64, 8, 8, MXFP4, "grouped"),
        (256, 4, 32, MXFP4, "grouped"),
        (256, 2, 256, MXFP4, "stream"),
        (16, 8, 256, {}, "stream"),
        (16, 8, 8, {}, "stream"),
        (96, 6, 16, {}, "grouped"),
        (512, 8, 128, {"format": "fp8", "act_dtype": FP8}, "grouped"),
        (1, 8, 128, {"format": "fp8", "act_dtype": FP8}, "stream"),
    ],
)
def test_rows_of_an_expert_decide_and_not_tokens(
    tokens: int, top_k: int, experts: int, axes: dict, variant: str
) -> None:
    problem = layer(tokens, top_k, experts, 2048, 1536, **axes)
    assert choose(ENTRY, problem, H200).implementation.name == f"moe_mlp/cuda/{variant}"


def test_the_winner_of_a_near_problem_declines_many_rows_an_expert() -> None:
    """Four times the tokens of a measured problem are too many for its variant."""
    near, problem = (layer(tokens, 4, 32, 2880, 2880, **MXFP4) for tokens in (33, 256))
    config = Config(WINNERS["gptoss-64-mxfp4", "stream"])
    row = Choice(
        "moe_mlp", "h200", near, "cuda", "stream", config, "measured", 1.0, "", "", "local"
    )
    assert choose(ENTRY, layer(40, 4, 32, 2880, 2880, **MXFP4), H200, [row]).why == "bucket"
    decision = choose(ENTRY, problem, H200, [row])
    assert (decision.implementation.variant, decision.why) == ("grouped", "default")
    declined = next(each for each in decision.considered if each.why == "nearest")
    assert "grouped takes" in declined.rejected


def test_one_thread_block_of_stream_fits_on_an_sm() -> None:
    """Where two fit, the thread blocks of a launch gather on the SMs that become free first."""
    stream = catalog.implementation("moe_mlp", "cuda", "stream")
    for name in ("gptoss-1-mxfp4", "qwen3-8-bf16"):
        problem = ENTRY.problems[name]
        for config in stream.legal(problem, H200):
            *_, first, second, _ = stream.program(problem, config, H200).steps
            for step in (first, second):
                assert H200.shared_bytes // 2 <= step.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(24, 4, 32), (64, 4, 32), (256, 4, 32), (300, 8, 8)]
)
def test_blocks_of_rows_are_those_of_random_assignments(
    tokens: int, top_k: int, experts: int
) -> None:
    dice, problem = np.random.default_rng(0), layer(tokens, top_k, experts, 2048, 1536)
    scores = dice.random((200, tokens, experts))
    ids = np.argsort(scores, axis=2)[:, :, :top_k]
    counts = (ids[..., None] == np.arange(experts)).sum(axis=(1, 2))
    for size in (8, 16, 48, 128):
        expected = np.ceil(counts / size).sum(axis=1).mean()
        assert row_blocks(problem, size) == pytest.approx(expected, rel=0.08)


def test_dispatch_does_not_see_how_tokens_spread_over_experts() -> None:
    hot = layer(64, 4, 32, 2880, 2880, skew="hot", **MXFP4)
    assert as_called(ENTRY, hot) == layer(64, 4, 32, 2880, 2880, **MXFP4)


@pytest.mark.parametrize(
    "more",
    [{}, {"groups": 8, "top_groups": 4}, {"capacity_factor": 1.0, "overflow": "reroute"}],
    ids=["plain", "groups", "reroute"],
)
def test_problems_alike_have_the_default_that_a_search_finds(more: dict) -> None:
    bitmask, h200 = catalog.implementation("moe_route", "cuda", "bitmask"), gpu.SKUS["h200"]
    search = LeastEstimate(bitmask)
    for tokens in (*range(20), *range(61, 67), *range(253, 260), *range(509, 516)):
        problem = routed(tokens, 128, 8, **more)
        assert bitmask.default(problem, h200) == search(problem, h200)
