"""The kernels of an engine, compiled by all cores before the first step.

A step that is run for the first time compiles its kernels one after another. So the steps of all
sizes first run on tensors without memory, which tells their problems (`kernelcat.call.outline`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from kernelcat.call.operator import Op
from kernelcat.call.oracle import Oracle
from kernelcat.call.outline import Outline
from kernelcat.catalog.spec import Problem
from kernelcat.moe.batch import Batch
from kernelcat.moe.cache import KvCache
from kernelcat.moe.engine.sampling import Sampler, every_choice
from kernelcat.moe.engine.step_arrays import PARAMETERS
from kernelcat.moe.engine.step_sizes import Size, StepSizes
from kernelcat.moe.grouped_experts import GroupedExperts
from kernelcat.moe.model import Decoder
from kernelcat.runtime import gpu
from kernelcat.tune.ahead import compile_ahead


def compile_steps(model: Decoder, cache: KvCache, sizes: StepSizes, table_width: int) -> int:
    """Compiles what steps of ``sizes`` will call; returns the number of kernels that were missing.

    A model with operations in torch, which need values, compiles its kernels in its first steps.
    """
    if not all(isinstance(op, (Op, GroupedExperts, int)) for op in vars(model.ops).values()):
        return 0
    problems = called(model, cache, sizes.every(), table_width)
    return compile_ahead(problems, gpu.detect(model.device.index or 0))


def called(
    model: Decoder, cache: KvCache, sizes: Iterable[Size], table_width: int
) -> list[Problem]:
    """The problems of steps of ``sizes``, each once; nothing is computed.

    Parameters
    ----------
    model, cache : on any device; no value is read
    table_width : columns of block tables
    """
    found: dict[Problem, None] = {}
    outlined = partial(_outlined, found.setdefault)
    outline = copy.copy(model)
    for name, value in vars(model).items():
        setattr(outline, name, outlined(value))
    pairs = zip(outline.layers, outlined(cache.layers), cache.groups, strict=True)
    kinds = {repr(pair): pair for pair in pairs}  # layers that make the same calls are equal texts
    outline.layers, layers, groups = (list(part) for part in zip(*kinds.values(), strict=True))
    one_of_each = KvCache(tuple(layers), tuple(groups))
    sampler, rows = Sampler(outline), set[int]()
    for size in sizes:
        x = outline(_batch(size, max(cache.groups) + 1, table_width), one_of_each)
        if size.rows not in rows:
            rows.add(size.rows)
            for choices in every_choice(size.rows, sampler.vocab_size):
                sampler.choose(x, choices, partial(_parameter, size.rows), _int32(size.rows))
    return list(found)


def _outlined(tell: Callable[[Problem], object], value: Any) -> Any:
    """``value`` with tensors on the device ``meta``, and outlines in place of entries."""
    outlined = partial(_outlined, tell)
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (Op, Oracle)):
        return Outline(value.entry.name, tell)
    if isinstance(value, (list, tuple)):
        return type(value)(map(outlined, value))
    if isinstance(value, dict):
        return {name: outlined(part) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: outlined(part) for name, part in parts.items()})
    return value


def _batch(size: Size, num_groups: int, table_width: int) -> Batch:
    """A batch of ``size`` without memory."""
    return Batch(
        tokens=_int32(size.tokens),
        positions=_int32(size.tokens),
        block_tables=tuple(_int32(size.batch, table_width) for _ in range(num_groups)),
        kv_lens=_int32(size.batch),
        cu_q=_int32(size.batch + 1),
        rows=_int32(size.rows),
        max_q=size.max_q,
        num_tokens=_int32(1),
    )


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _parameter(num_rows: int, name: str) -> torch.Tensor:
    """The sampling parameter called ``name`` of each row, without memory."""
    dtype = getattr(torch, PARAMETERS.get(name, "int64"))
    return torch.empty(num_rows, dtype=dtype, device="meta")
