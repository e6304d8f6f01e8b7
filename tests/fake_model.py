"""A model without weights for tests of the engine: the next token is a function of the prefix.

The model keeps (position, token) of each token in a paged cache, reads its prefix back through the
block tables, and hashes what it reads. A wrong page, a slot that another request has overwritten,
or a window that was freed too early changes the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.fetch_policy import FetchPolicy
from kernelcat.moe.engine.host_cache import HostCache, Transfer
from kernelcat.moe.engine.limits import MAX_IN_FLIGHT, Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.step import Output, Step
from kernelcat.moe.engine.step_arrays import StepArrays
from kernelcat.moe.engine.step_sizes import Size, StepSizes

VOCAB = 7
PAGE_BYTES = 1000
WIDTH = 64
"""Columns of block tables."""


def choose(reads: Sequence[np.ndarray], temperature: float, seed: int, offset: int) -> int:
    """The next token after what each group reads: (positions, 2) of positions and tokens.

    Three times of four the token three places before is repeated, so that drafts are right often.
    """
    draw = (seed, offset) if temperature > 0 else (0, 0)
    code = crc32(repr(draw).encode())
    for read in reads:
        code = crc32(np.ascontiguousarray(read, np.int32).tobytes(), code)
    if code % 4 and len(reads[0]) >= 3:
        return int(reads[0][-3, 1])
    return code // 4 % VOCAB


def plain(
    prompt: Sequence[int],
    parameters: SamplingParameters,
    windows: Sequence[int],
    max_length: int,
    seed: int = 0,
) -> list[int]:
    """The tokens of a request that has the machine alone, without a cache."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        both = np.stack([np.arange(len(tokens)), tokens], axis=1)
        reads = [both[-window:] if window else both for window in windows]
        tokens.append(choose(reads, parameters.temperature, seed, len(tokens)))
        if tokens[-1] in parameters.stop_tokens:
            break
    return tokens


class FakeModel:
    """Caches of all groups, and a run over the arrays of a step."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        shape = manager.page_size, 2
        self.caches = [np.full((g.num_pages, *shape), -1, np.int32) for g in manager.groups]
        num_slots = manager.host.slots[0].num_slots if manager.host else 0
        self.slots = [np.full((num_slots, *shape), -1, np.int32) for _ in manager.groups]

    def run(self, arrays: StepArrays, previous: np.ndarray, num_rows: int) -> np.ndarray:
        """Tokens (num_rows,) of a step; ``previous`` are those of the step before."""
        sources = arrays.source_rows
        tokens = arrays.tokens.copy()
        tokens[sources >= 0] = previous[sources[sources >= 0]]
        size, cu_q = self.manager.page_size, arrays.cu_q
        for s in range(len(arrays.kv_lens)):
            at = arrays.positions[cu_q[s] : cu_q[s + 1]]
            assert at.tolist() == list(range(arrays.kv_lens[s] - len(at), arrays.kv_lens[s]))
            for cache, table in zip(self.caches, arrays.block_tables, strict=True):
                new = np.stack([at, tokens[cu_q[s] : cu_q[s + 1]]], axis=1)
                cache[table[s, at // size], at % size] = new
        return np.array([self._next(arrays, i) for i in range(num_rows)], np.int64)

    def copy(self, transfer: Transfer) -> None:
        """Copies the blocks of a transfer."""
        for move in transfer.moves:
            page, slot = self.caches[move.group][move.page], self.slots[move.group][move.slot]
            if transfer.is_fetch:
                page[:] = slot
            else:
                slot[:] = page

    def _next(self, arrays: StepArrays, i: int) -> int:
        row = arrays.rows[i]
        s = int(np.searchsorted(arrays.cu_q, row, side="right")) - 1
        end, reads = int(arrays.positions[row]) + 1, []
        for group, cache, table in zip(
            self.manager.groups, self.caches, arrays.block_tables, strict=True
        ):
            first = max(0, end - group.window) if group.window else 0
            at = np.arange(first, end)
            read = cache[table[s, at // self.manager.page_size], at % self.manager.page_size]
            assert read[:, 0].tolist() == at.tolist(), "a slot holds another position"
            reads.append(read)
        return choose(
            reads, float(arrays.temperature[i]), int(arrays.seed[i]), int(arrays.offset[i])
        )


class FakeEngine:
    """A scheduler and a model; steps may overlap, and are padded where there are ``batches``.

    ``sizes_used`` are those of the steps so far. With ``num_slots`` there is host memory, in which
    blocks are copied when a transfer ends: as late as possible.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        page_size: int = 4,
        limits: Limits | None = None,
        speculation: Speculation | None = None,
        has_prefix_cache: bool = True,
        batches: Sequence[int] = (),
        num_slots: int = 0,
        reserve: int = 20,
        policy: FetchPolicy | None = None,
        scheduler_type: type[Scheduler] = Scheduler,
    ) -> None:
        self.limits = limits or Limits(step_tokens=16, max_running=8, max_waiting=64, context=64)
        self.manager = BlockManager(groups, page_size, WIDTH, has_prefix_cache)
        if num_slots:
            self.manager.host = HostCache(
                self.manager.pools, num_slots, [PAGE_BYTES] * len(groups), [reserve] * len(groups),
                policy or FetchPolicy(1, bandwidth=1e9),
            )  # fmt: skip
        self.transfers: list[Transfer] = []
        self.scheduler = scheduler_type(self.manager, self.limits, speculation)
        num_drafts = speculation.num_drafts if speculation else 0
        self.sizes = StepSizes(self.limits, num_drafts, batches)
        self.sizes_used: set[Size] = set()
        self.arrays = StepArrays(self.manager, StepSizes(self.limits, num_drafts, batches or [8]))
        self.model = FakeModel(self.manager)
        self.results: list[tuple[Step, np.ndarray]] = []
        self.outputs: list[Output] = []
        self._previous = np.zeros(0, np.int64)

    def submit(self, prompt: Sequence[int], id: str = "", salt: str = "", **parameters) -> Request:
        sampling = SamplingParameters(**{"temperature": 0.0, **parameters})
        request = Request(id or str(self.scheduler.queue._num_arrived), prompt, sampling, salt=salt)
        self.scheduler.submit(request)
        return request

    def plan(self) -> Step | None:
        """Plans a step and lets the model run; the scheduler does not see the result yet."""
        step = self.scheduler.schedule()
        self.transfers += self.scheduler.transfers()
        for transfer in list(self.transfers):
            if transfer.is_abandoned:
                self.end_transfer(transfer)  # the step starts after it
        if step is not None:
            size = self.sizes.of(step)
            self.sizes_used.add(size)
            self.arrays.fill(step, size)
            self._previous = self.model.run(self.arrays, self._previous, step.num_rows)
            self.results.append((step, self._previous))
        return step

    def end_transfer(self, transfer: Transfer) -> None:
        """Copies the blocks of a transfer that has started, and tells the scheduler."""
        self.transfers.remove(transfer)
        self.model.copy(transfer)
        self.scheduler.end_transfer(transfer)

    def end_transfers(self) -> None:
        while self.transfers:
            self.end_transfer(self.transfers[0])

    def fail(self) -> list[Output]:
        """The oldest step has failed."""
        self.end_transfers()
        step, _ = self.results.pop(0)
        outputs = self.scheduler.fail(step)
        self.manager.forget_blocks()
        return outputs

    def land(self) -> list[Output]:
        """Hands the oldest result to the scheduler."""
        step, tokens = self.results.pop(0)
        outputs = self.scheduler.update(step, tokens.tolist())
        self.outputs += outputs
        return outputs

    def step(self) -> Step | None:
        step = self.plan()
        if step is not None:
            self.land()
        return step

    def finish(self, is_overlapped: bool = False, max_steps: int = 10000) -> int:
        """Runs until all requests have ended, proving integrity; the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_work and not self.results:
                return count
            planned = self.plan() if len(self.results) < MAX_IN_FLIGHT else None
            has_fetch = any(transfer.is_fetch for transfer in self.transfers)
            is_stuck = not (planned or self.results or has_fetch) and self.scheduler.has_work
            assert not is_stuck, "nothing can run"
            if count % 3 == 0 or not (planned or self.results):
                self.end_transfers()
            self.scheduler.check_integrity()
            while len(self.results) > (1 if is_overlapped and planned else 0):
                self.land()
            self.scheduler.check_integrity()
        raise AssertionError(f"{self.scheduler.queue.requests} have not ended")

    def check(self, request: Request) -> None:
        """Compares a finished request with the plain run."""
        windows = [group.window for group in self.manager.groups]
        seed = request.seed
        expected = plain(request.prompt, request.parameters, windows, request.max_length, seed)
        assert request.tokens == expected


def engine(
    *windows, num_pages=200, speculation=None, has_prefix_cache=True, page_size=4, batches=(),
    num_slots=0, reserve=20, policy=None, **limits,
):  # fmt: skip
    """An engine with a layer group for each of ``windows``; ``limits`` are those of `Limits`."""
    groups = [LayerGroup(f"g{i}", num_pages, window) for i, window in enumerate(windows or (0,))]
    defaults = {"step_tokens": 16, "max_running": 8, "max_waiting": 64, "context": 64}
    return FakeEngine(
        groups, page_size, Limits(**{**defaults, **limits}), speculation, has_prefix_cache, batches,
        num_slots, reserve, policy,
    )  # fmt: skip
