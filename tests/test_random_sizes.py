"""Random sizes: skewed lengths of sequences, and shapes of models, which are the engine's."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.catalog import sample
from kernelcat.catalog.random_problems import draw
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.moe.sizes import SIZES
from kernelcat.reference import _random_sizes
from kernelcat.reference._models import MODELS, projections
from kernelcat.reference._random_sizes import (
    SPARE_PAGES,
    log_uniform,
    near,
    pages_needed,
    weight_sizes,
    with_pages,
)
from kernelcat.reference._sequences import lengths, tables
from kernelcat.reference.paged_attn import ENTRY, attention
from kernelcat.store.random_races import percentile


def skewed(batch: int, tokens: int, max_q: int, context: int) -> Problem:
    axes = {**attention(batch, 8, 8, 64, context, 16).values, "tokens": tokens, "max_q": max_q}
    return ENTRY.problem(**{**axes, "lengths": "skewed"})


def test_skewed_lengths_are_short_beside_the_longest_which_fills_its_row() -> None:
    q_lens, kv_lens = lengths(skewed(200, 200, 1, 65536))
    assert set(q_lens) == {1} and max(kv_lens) == 65536 and min(kv_lens) >= 1
    assert percentile(sorted(map(float, kv_lens)), 0.5) < 65536 / 32
    assert np.mean(kv_lens) > 8 * np.median(kv_lens)


def test_first_sequences_get_the_new_tokens_that_are_more_than_one_for_each() -> None:
    assert lengths(skewed(4, 103, 100, 4096))[0] == (100, 1, 1, 1)
    assert lengths(skewed(3, 250, 100, 4096))[0] == (100, 100, 50)
    assert lengths(skewed(4, 2, 1, 4096))[0] == (1, 1, 0, 0)
    assert lengths(skewed(1, 0, 1, 64))[0] == (0,)


def test_pages_follow_from_skewed_lengths_which_do_not_follow_from_pages() -> None:
    problem = skewed(32, 32, 1, 8192)
    needed = pages_needed(problem)
    exact = ENTRY.problem(**{**problem.values, "pages": needed})
    assert lengths(exact) == lengths(problem) and needed < problem["pages"]
    table, slots = tables(exact)
    used = [page for row in table for page in row if page >= 0]
    assert sorted(used) == list(range(needed)) and min(slots) > 0


@pytest.mark.parametrize("name", ["paged_attn", "flashmla"])
def test_sequences_of_random_problems_fill_the_cache(name: str) -> None:
    """Pages tell the model how long sequences are, so they must not speak of other lengths."""
    problems = draw(catalog.entry(name), "a seed", 100)
    assert {problem["lengths"] for problem in problems} == {"equal", "ragged", "skewed"}
    unused = [(problem["pages"] - pages_needed(problem), problem["pages"]) for problem in problems]
    fitting = [0 <= rest <= max(1, SPARE_PAGES * pages) for rest, pages in unused]
    assert sum(fitting) >= 97  # of a few short sequences no number of pages is what they need


def test_the_last_number_of_pages_stays_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = skewed(4, 4, 1, 4096)
    monkeypatch.setattr(_random_sizes, "pages_needed", lambda other: other["pages"] + 1)
    assert with_pages(problem)["pages"] == problem["pages"] + _random_sizes.TRIES - 1


def test_extra_values_are_allowed_but_no_sample_takes_them() -> None:
    axis = ENTRY.axis("lengths")
    assert axis.extra == ("skewed",) and axis.parse("Skewed") == "skewed"
    assert {sample._draw_value(axis, draw) for draw in range(100)} == {"equal", "ragged"}
    with pytest.raises(InvalidArgument, match="equal, ragged, skewed"):
        axis.check("zipf")


@pytest.mark.parametrize("name", sorted(MODELS.keys() & SIZES.keys()))
def test_shapes_of_models_are_those_of_the_engine(name: str) -> None:
    shape, config = MODELS[name], vars(SIZES[name])
    named = {"hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}
    assert {f: getattr(shape, f) for f in named} == {f: config[c] for f, c in named.items()}
    if shape.kv_heads:
        assert shape.kv_heads == config["num_key_value_heads"]
        assert shape.head_dim == config.get("head_dim", shape.hidden // shape.heads)
    if shape.experts:
        counts = ("num_local_experts", "n_routed_experts", "num_experts")
        assert shape.experts == next(config[c] for c in counts if c in config)
        assert shape.top_k == config["num_experts_per_tok"]
        widths = ("moe_intermediate_size", "intermediate_size")
        assert shape.expert_inter == next(config[c] for c in widths if c in config)
    else:
        assert shape.inter == config["intermediate_size"]


def test_sizes_are_multiples_of_the_step_and_each_doubling_is_as_likely() -> None:
    dice = Random(1)
    drawn = [log_uniform(dice, 1, 1024) for _ in range(4000)]
    assert min(drawn) == 1 and max(drawn) <= 1024
    below = sum(size <= 32 for size in drawn) / len(drawn)
    assert 0.46 < below < 0.56
    weights = [weight_sizes(dice, 128) for _ in range(500)]
    assert all(size % 128 == 0 and size >= 128 for pair in weights for size in pair)
    published = {(n, k) for model in MODELS.values() for n, k, _ in projections(model)}
    assert 0.1 < sum(pair in published for pair in weights) / len(weights) < 0.6
    assert {near(dice, 96, 8) == 96 for _ in range(100)} == {True, False}


def test_entries_with_peers_that_serve_a_model_draw_random_problems() -> None:
    without = {name for name in catalog.names() if catalog.entry(name).random_problem is None}
    assert without.isdisjoint(
        ("gemm", "fp8_gemm", "nvfp4_matmul", "paged_attn", "flashmla", "moe_gemm", "moe_mlp",
         "moe_route", "rms_norm", "lm_head", "sample", "qkv_rope_write", "out_router", "embedding")
    )  # fmt: skip
