"""Which kernels would serve models at their true sizes on an H200: every call, on any machine.

Weights and activations are meta tensors, which have shapes but no memory. Calls are explained, not
launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch

import kernelcat
from kernelcat import moe
from kernelcat.call.outline import Outline
from kernelcat.catalog.spec import Problem
from kernelcat.moe.engine.building import RESERVED_BYTES
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.memory import GIB, divide
from kernelcat.moe.weights import MetaWeights
from kernelcat.runtime import gpu as gpus
from kernelcat.store import lines

H200 = gpus.find("h200")
PAGE = 64
MAX_LAUNCHES = 7
"""Launches of a layer in decode at batch 8 or less."""


@dataclass(frozen=True)
class Served:
    """A call, the implementation that would serve it, and its launches."""

    problem: Problem
    implementation: str
    num_launches: int


def explained(name: str, calls: list[Served]) -> Outline:
    """The entry called ``name``; a call adds to ``calls``, and returns meta tensors."""
    op = kernelcat.get(name)

    def tell(problem: Problem) -> None:
        chosen = op.explain(**problem.values, gpu="h200")  # raises where nothing serves
        program = chosen.implementation.program(problem, chosen.config, H200)
        calls.append(Served(problem, chosen.implementation.name, len(program.steps)))

    return Outline(name, tell)


def calls_of(name: str, batch: int, q_len: int, **fields_: Any) -> list[Served]:
    """The calls of one forward pass of the model called ``name``, changed by ``fields_``."""
    calls: list[Served] = []
    names = [field.name for field in fields(moe.Ops) if not field.name.endswith("_tokens")]
    ops = moe.Ops(**{entry: explained(entry, calls) for entry in names})
    config = replace(moe.SIZES[name], **fields_)
    model = moe.build(config, MetaWeights("meta", torch.bfloat16), ops, 8192)
    width, num_groups = max(1024, q_len) // PAGE, len(moe.windows(model.cache_layers))

    def indices(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    cache = moe.KvCache.allocate(
        model.cache_layers, [batch * width] * num_groups, PAGE, torch.bfloat16, "meta"
    )
    tables = (indices(batch, width),) * num_groups
    tokens = indices(batch * q_len)
    batch_ = moe.Batch(
        tokens, tokens, tables, indices(batch), indices(batch + 1), indices(batch), q_len
    )
    model.best(model(batch_, cache))
    return calls


@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (8, 1), (8, 5), (64, 1), (128, 1), (1, 4096)])
@pytest.mark.parametrize(
    ("name", "fields_"),
    [
        ("gpt-oss-20b", {"num_hidden_layers": 2, "layer_types": ()}),
        ("gpt-oss-120b", {"num_hidden_layers": 1, "layer_types": ()}),
        ("qwen3-30b-a3b", {"num_hidden_layers": 1}),
        ("deepseek-v3", {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
        ("mixtral-8x7b", {"num_hidden_layers": 1}),
        ("llama-3.1-8b", {"num_hidden_layers": 1}),
        ("smollm2-135m", {"num_hidden_layers": 1}),
    ],
)
def test_every_call_of_a_model_is_served(
    name: str, fields_: dict[str, Any], batch: int, q_len: int
) -> None:
    calls = calls_of(name, batch, q_len, **fields_)
    assert {"embedding", "rms_norm", "lm_head"} < {call.problem.entry for call in calls}
    naive = {call.implementation for call in calls if call.implementation.endswith("/naive")}
    raced = {f"{row.entry}/{row.language}/{row.variant}" for row in lines.shipped() if row.winner}
    assert naive <= raced  # where little is to be done, the plainest kernel may be the fastest


def tensors_of(holder: Any) -> Iterator[torch.Tensor]:
    """All tensors in an object, its fields, and so on."""
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, (list, tuple, dict)) or is_dataclass(holder):
        parts = holder.values() if isinstance(holder, dict) else holder
        for part in vars(holder).values() if is_dataclass(holder) else parts:
            yield from tensors_of(part)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("gpt-oss-20b", 13.8), ("gpt-oss-120b", 65.2), ("deepseek-v3-4-layers", 30.2)],
)
def test_weights_and_256_requests_fit_into_the_memory_of_an_h200(
    name: str, gigabytes: float
) -> None:
    """Requests of 2,048 tokens, beside 5 GiB for what a step computes."""
    model = moe.build(moe.SIZES[name], MetaWeights("meta", torch.bfloat16), moe.on("cpu"), 8192)
    each = {id(tensor): tensor.nbytes for tensor in tensors_of(vars(model))}  # the head may be tied
    weights = sum(each.values())
    assert weights == pytest.approx(1e9 * gigabytes, rel=0.01)
    limits = Limits(step_tokens=2048, max_running=256, context=2048)
    left = int(0.9 * H200.memory_bytes) - weights - 5 * GIB - RESERVED_BYTES
    windows = moe.windows(model.cache_layers)
    sizes = moe.page_bytes(model.cache_layers, PAGE, torch.bfloat16)
    pages = divide(left, sizes, windows, PAGE, limits, "")
    assert pages[windows.index(0)] > 256 * 2048 // PAGE


@pytest.mark.parametrize("batch", (1, 8))
def test_a_layer_of_gpt_oss_is_few_launches(batch: int) -> None:
    def launches(num_layers: int) -> int:
        calls = calls_of("gpt-oss-20b", batch, 1, num_hidden_layers=num_layers, layer_types=())
        return sum(call.num_launches for call in calls)

    assert launches(3) - launches(1) <= 2 * MAX_LAUNCHES
