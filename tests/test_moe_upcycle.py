"""Upcycled models compute what their dense model computes, and a wrong expert shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_models import Sequences, check

from kernelcat import moe
from kernelcat.errors import InvalidArgument
from kernelcat.moe.upcycle import UpcycledWeights, upcycled_config

CONFIG: Any = replace(moe.SIZES["small-smollm2"], intermediate_size=128)
TEXT = list(range(3, 203, 7))


def logits(model: moe.Decoder) -> torch.Tensor:
    sequences = Sequences(model, 1)
    return sequences.run(sequences.chunk(0, TEXT, 0, len(TEXT)))[0]


def upcycled(way: str, num_experts: int, top_k: int) -> moe.Decoder:
    config = upcycled_config(CONFIG, way, num_experts, top_k)
    dense = moe.RandomWeights("cpu", torch.float32)
    return moe.build(config, UpcycledWeights(dense, CONFIG, way, num_experts))


def with_swapped_experts(model: moe.Decoder, name: str) -> moe.Decoder:
    """``model``, whose first layer has another order of experts in the tensor ``name``."""
    layer: Any = model.layers[0]
    experts = {**layer.experts, name: layer.experts[name].roll(1, 0)}
    other = object.__new__(type(model))
    layers = [replace(layer, experts=experts), *model.layers[1:]]
    other.__dict__ = {**model.__dict__, "layers": layers}
    return other


@pytest.mark.parametrize(
    ("way", "num_experts", "top_k"), [("copies", 4, 2), ("copies", 3, 1), ("columns", 4, 4)]
)
def test_logits_are_those_of_the_dense_model(way: str, num_experts: int, top_k: int) -> None:
    check(
        logits(upcycled(way, num_experts, top_k)),
        logits(moe.build(CONFIG, moe.RandomWeights("cpu", torch.float32))),
    )


def test_a_wrong_expert_changes_the_logits() -> None:
    model = upcycled("columns", 4, 4)
    right = logits(model)
    for name in ("w1", "w2"):
        wrong = logits(with_swapped_experts(model, name))
        assert (wrong - right).abs().max() > 0.05 * right.abs().max()
    fewer = replace(model.config, num_experts_per_tok=3)
    model.config = fewer  # the fourth expert is left out
    assert (logits(model) - right).abs().max() > 0.05 * right.abs().max()


@pytest.mark.parametrize(
    ("way", "num_experts", "top_k"),
    [("rows", 4, 4), ("columns", 4, 2), ("columns", 3, 3), ("columns", 256, 256)],
)
def test_numbers_that_do_not_fit_are_refused(way: str, num_experts: int, top_k: int) -> None:
    with pytest.raises(InvalidArgument, match=r"must be one of|columns need"):
        upcycled_config(CONFIG, way, num_experts, top_k)
