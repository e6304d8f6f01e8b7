"""From a model and settings to a scheduler and a runner that fit into the memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.moe.cache import KvCache, page_bytes, windows
from kernelcat.moe.engine.ahead import compile_steps
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.memory import GIB, divide
from kernelcat.moe.engine.pages_out import Link
from kernelcat.moe.engine.runner import Runner
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.settings import BATCH_SIZES, EngineSettings
from kernelcat.moe.engine.step_sizes import StepSizes
from kernelcat.moe.model import Decoder

RESERVED_BYTES = 3 * GIB
"""Memory for CUDA graphs, and for kernels' workspaces: kernels of each size have their own."""


def build(
    model: Decoder,
    settings: EngineSettings,
    link: Link | None = None,
    scheduler_type: type[Scheduler] = Scheduler,
) -> tuple[Scheduler, Runner]:
    """The scheduler and the runner of an engine; on a GPU everything is compiled and captured.

    The engine at the other end of ``link`` is built at the same time.

    Raises
    ------
    InvalidArgument
        The memory is too small, or a setting does not fit the model.
    """
    limits = _limits(model, settings.limits)
    is_cuda = model.device.type == "cuda"
    batches = settings.batch_sizes
    if batches is None:
        batches = BATCH_SIZES if is_cuda else ()
    num_drafts = settings.speculation.num_drafts if settings.speculation else 0
    sizes = StepSizes(limits, num_drafts, batches)
    # Enough for the new tokens of the largest step, which runs before the caches have their size.
    num_trial = -(-limits.step_tokens // settings.page_size) + 1
    pages = [num_trial] * len(windows(model.cache_layers))
    trial = _manager(model, settings, limits, pages)
    runner = Runner(model, trial, sizes, _cache(model, settings, pages))
    if is_cuda:
        compile_steps(model, runner.cache, sizes, trial.table_width)
    if settings.num_pages is not None:
        pages = list(settings.num_pages)
        if len(pages) != len(trial.groups):
            raise InvalidArgument(
                f"num_pages={settings.num_pages} must have {len(trial.groups)} numbers, one for "
                "each layer group of the model"
            )
    else:
        num_bytes, budget = _gpu_budget(runner, settings) if is_cuda else _cpu_budget(settings)
        dtype = cache_type(model, settings.cache_dtype)
        each = page_bytes(model.cache_layers, settings.page_size, dtype)
        pages = divide(
            num_bytes, each, windows(model.cache_layers), settings.page_size, limits, budget
        )
    runner.cache = KvCache((), ())
    if link is None:
        runner.cache = _cache(model, settings, pages)
    else:
        pages, runner.link = link.agree(pages), link
        dtype = cache_type(model, settings.cache_dtype)
        runner.cache = link.allocate(model.cache_layers, pages, settings.page_size, dtype)
    manager = _manager(model, settings, limits, pages)
    scheduler = scheduler_type(manager, limits, settings.speculation)
    if is_cuda:
        runner.warm_up(settings.has_graphs)
    return scheduler, runner


def _limits(model: Decoder, limits: Limits) -> Limits:
    """Limits that the model can keep."""
    context = min(limits.context, model.max_positions)
    return replace(limits, context=context, vocab_size=model.config.vocab_size)


def _manager(
    model: Decoder, settings: EngineSettings, limits: Limits, pages: list[int]
) -> BlockManager:
    groups = [
        LayerGroup(f"window {window}" if window else "full", count, window)
        for count, window in zip(pages, windows(model.cache_layers), strict=True)
    ]
    size = settings.page_size
    return BlockManager(groups, size, -(-limits.context // size), settings.has_prefix_cache)


def cache_type(model: Decoder, name: str) -> torch.dtype:
    """The element type of caches that torch calls ``name``; "" for the model's.

    Raises ``InvalidArgument`` for a name that is no element type of torch.
    """
    dtype = getattr(torch, name, None) if name else model.dtype
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"cache_dtype={name!r} is no element type of torch")
    return dtype


def _cache(model: Decoder, settings: EngineSettings, pages: list[int]) -> KvCache:
    dtype = cache_type(model, settings.cache_dtype)
    return KvCache.allocate(model.cache_layers, pages, settings.page_size, dtype, model.device)


def _cpu_budget(settings: EngineSettings) -> tuple[int, str]:
    return settings.cpu_cache_bytes, f"cpu_cache_bytes={settings.cpu_cache_bytes}"


def _gpu_budget(runner: Runner, settings: EngineSettings) -> tuple[int, str]:
    """Bytes for pages, after the largest steps have allocated what they need."""
    torch.cuda.empty_cache()  # what torch keeps of loading, gigabytes for a large vocabulary
    runner.run_largest()
    free, total = torch.cuda.mem_get_info(runner.model.device)
    taken = total - free
    budget = (
        f"memory={settings.memory} of the GPU's {total / GIB:.1f} GiB, of which weights and the "
        f"largest step take {taken / GIB:.1f} GiB and graphs and workspaces "
        f"{RESERVED_BYTES / GIB:.0f} GiB,"
    )
    return int(settings.memory * total) - taken - RESERVED_BYTES, budget
