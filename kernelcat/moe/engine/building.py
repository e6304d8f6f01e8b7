"""From a model and settings to a scheduler and a runner that fit into the memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.moe.cache import KvCache, page_bytes, windows
from kernelcat.moe.engine.ahead import compile_steps
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.fetch_policy import FetchPolicy
from kernelcat.moe.engine.host_cache import HostCache
from kernelcat.moe.engine.host_copies import HostCopies
from kernelcat.moe.engine.host_memory import HostMemory, staging_bytes
from kernelcat.moe.engine.limits import MAX_IN_FLIGHT, Limits
from kernelcat.moe.engine.memory import GIB, divide
from kernelcat.moe.engine.pages_out import Link
from kernelcat.moe.engine.runner import Runner
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.settings import BATCH_SIZES, EngineSettings
from kernelcat.moe.engine.step_sizes import StepSizes
from kernelcat.moe.model import Decoder
from kernelcat.moe.parallel.beside import Beside
from kernelcat.moe.parallel.halves import Halves, split_tokens
from kernelcat.moe.parallel.messages import Build

RESERVED_BYTES = 3 * GIB
"""Memory for CUDA graphs, and for kernels' workspaces: kernels of each size have their own."""


def build(
    model: Decoder,
    settings: EngineSettings,
    link: Link | None = None,
    scheduler_type: type[Scheduler] = Scheduler,
) -> tuple[Scheduler, Runner]:
    """The scheduler and the runner of an engine; on a GPU everything is compiled and captured.

    On several ranks all do the same, with as many pages as the rank with the least memory has. The
    engine at the other end of ``link`` is built at the same time.

    Raises
    ------
    InvalidArgument
        The memory is too small, or a setting does not fit the model.
    RankFailed
        Another rank has failed.
    """
    exchange = model.peers
    if settings.host_cache_bytes and (exchange is not None or link is not None):
        raise InvalidArgument(
            f"host_cache_bytes={settings.host_cache_bytes} are for an engine alone: blocks of "
            "several ranks or engines stay on their GPUs"
        )
    if exchange is not None:
        exchange.prepare()
        if exchange.followers is not None:
            exchange.tell(Build(settings))
        tokens = split_tokens(settings.split_tokens, exchange.ranks, model.divided is not None)
        model.halves = Halves(exchange, Beside(model.device), tokens)
    limits = _limits(model, settings.limits)
    is_cuda = model.device.type == "cuda"
    batches = settings.batch_sizes
    if batches is None:
        batches = BATCH_SIZES if is_cuda else ()
    num_drafts = settings.speculation.num_drafts if settings.speculation else 0
    sizes = StepSizes(limits, num_drafts, batches, settings.is_lockstep)
    # Enough for the new tokens of the largest step, which runs before the caches have their size.
    num_trial = -(-limits.step_tokens // settings.page_size) + 1
    pages = [num_trial] * len(windows(model.cache_layers))
    trial = _manager(model, settings, limits, pages)
    runner = Runner(model, trial, sizes, _cache(model, settings, pages))
    if is_cuda:
        _compile(runner, trial.table_width)
    if settings.num_pages is not None:
        pages = list(settings.num_pages)
        if len(pages) != len(trial.groups):
            raise InvalidArgument(
                f"num_pages={settings.num_pages} must have {len(trial.groups)} numbers, one for "
                "each layer group of the model"
            )
    else:
        num_bytes, budget = _gpu_budget(runner, settings) if is_cuda else _cpu_budget(settings)
        each = _page_bytes(model, settings)
        if settings.host_cache_bytes and is_cuda:
            num_bytes -= staging_bytes(each)
        if exchange is not None:
            num_bytes = min(exchange.gather(num_bytes))
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
    if settings.host_cache_bytes:
        _add_host_cache(manager, runner, limits, settings, _page_bytes(model, settings))
    if exchange is not None:
        exchange.start()
    return scheduler, runner


def _compile(runner: Runner, table_width: int) -> None:
    """Compiles what steps call: rank 0 first, and the other ranks find it in the cache."""
    exchange = runner.model.peers
    if exchange is not None and exchange.rank:
        exchange.gather(None)
    compile_steps(runner.model, runner.cache, runner.sizes, table_width)
    if exchange is not None and not exchange.rank:
        exchange.gather(None)


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


def _page_bytes(model: Decoder, settings: EngineSettings) -> list[int]:
    dtype = cache_type(model, settings.cache_dtype)
    return page_bytes(model.cache_layers, settings.page_size, dtype)


def _add_host_cache(
    manager: BlockManager, runner: Runner, limits: Limits, settings: EngineSettings, each: list[int]
) -> None:
    """Gives ``manager`` and ``runner`` slots in host memory, as many for each group.

    Raises ``InvalidArgument`` if there is no room for a block.
    """
    num_slots = settings.host_cache_bytes // sum(each)
    if not num_slots:
        raise InvalidArgument(
            f"host_cache_bytes={settings.host_cache_bytes} have no room for a block of "
            f"{settings.page_size} tokens, {sum(each)} bytes"
        )
    memory = HostMemory(runner.cache, num_slots, num_slots * sum(each))
    policy = FetchPolicy(settings.min_fetch, memory.measure())
    # what the steps in flight and one request that starts may take
    reserve = MAX_IN_FLIGHT * (manager.blocks_of(limits.step_tokens) + limits.max_running)
    reserves = [reserve + manager.max_pages(group, limits.span) for group in manager.groups]
    manager.host = HostCache(manager.pools, num_slots, each, reserves, policy)
    runner.copies = HostCopies(memory)


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
