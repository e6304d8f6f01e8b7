"""The scheduler: which new tokens the next step computes.

Requests run in the order in which they arrived. A step has at most `Limits.step_tokens` new tokens.
Every request that writes gets one of them first, drafts and chunks of prompts share the rest. A
waiting request starts when the caches have room for its prompt beside the running ones; nobody
overtakes the request that waits longest, so every request starts.

Where pages run out, the request that arrived last loses all its pages and waits again. Its tokens
stay; their keys and values are computed anew. The oldest request never loses pages, and `Limits`
let no request in that could not run alone, so every request ends.

A step may be planned while the step before it runs (`schedule`, `schedule`, `update`, `schedule`,
`update` ...). The new token of a decoding request is then unknown on the host:
`ScheduledChunk.source_row` says which row of the step before chooses the token. Steps must run in
the order in which they were planned, on one stream: pages go to the next owner while an earlier
step may still read them.

A request whose prefix is in host memory runs when its blocks have arrived (`host_cache`); until
then it has its place among the running ones, and no token in any step.

Not thread-safe: one thread owns a scheduler and its manager.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.block_hashes import extend_hashes
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.host_cache import Transfer
from kernelcat.moe.engine.integrity import check_queue
from kernelcat.moe.engine.limits import MAX_IN_FLIGHT, Limits
from kernelcat.moe.engine.queue import RequestQueue
from kernelcat.moe.engine.request import FinishReason, Request, State
from kernelcat.moe.engine.speculation import NgramIndex, Speculation, verify
from kernelcat.moe.engine.step import Output, ScheduledChunk, Step


class Scheduler:
    """Continuous batching over a paged cache.

    Parameters
    ----------
    manager : the pages of the caches
    limits : of requests and steps
    speculation : how drafts are made; None for no speculation
    clock : seconds, for the times of requests

    Attributes
    ----------
    queue : requests that wait, and requests that run
    in_flight : steps that were planned and have no result yet
    num_steps : planned steps

    Raises
    ------
    InvalidArgument
        The caches are too small for any request.
    """

    def __init__(
        self,
        manager: BlockManager,
        limits: Limits,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = RequestQueue(manager, limits, clock)
        self.manager, self.limits, self.speculation = manager, limits, speculation
        self.in_flight: deque[Step] = deque()
        self.num_steps = 0
        self._last_end = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.queue.requests)

    def submit(self, request: Request) -> None:
        """Adds a request; see `RequestQueue.submit` for its errors.

        A request with a repetition penalty or a grammar does not speculate: both change with each
        token, drafts included.
        """
        self.queue.submit(request)
        if self.speculation and not request.parameters.has_penalty and not request.is_constrained:
            request.ngrams = NgramIndex(self.speculation, request.tokens)

    def cancel(self, request_id: str) -> bool:
        """Ends a request in any state and frees its pages; False if there is no such request."""
        request = self.queue.requests.get(request_id)
        if request is not None:
            self.queue.end(request, FinishReason.CANCELLED)
        return request is not None

    # ---- planning -------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Plans the next step; None if no request can run before a step in flight has ended.

        With host memory `transfers` follows, also where there is no step.

        Raises
        ------
        InvalidArgument
            `MAX_IN_FLIGHT` steps have no result yet.
        """
        if len(self.in_flight) == MAX_IN_FLIGHT:
            raise InvalidArgument(f"{MAX_IN_FLIGHT} steps are in flight: update one first")
        step = Step(self.num_steps)
        sizes, drafts = self._sizes()
        for request in list(self.queue.running):
            size = sizes.get(request, 0)
            if request.state is State.RUNNING and size:
                self._continue(step, request, size, drafts.get(request, []))
        while step.num_tokens < self.limits.step_tokens:
            started = self.queue.start(self.limits.step_tokens - step.num_tokens)
            if started is None:
                break
            if started[1]:
                self._add(step, *started, [])
        if self.manager.host is not None:
            self.manager.host.plan_offload()
            step.planned_at = self.queue.clock()
        return self._planned(step) if step.chunks else None

    def schedule_nothing(self) -> Step:
        """Plans a step without requests, which other ranks need that run steps together."""
        return self._planned(Step(self.num_steps))

    def _planned(self, step: Step) -> Step:
        self.num_steps += 1
        self.in_flight.append(step)
        return step

    def transfers(self) -> list[Transfer]:
        """The transfers that were planned with the last step, which start before it."""
        return [] if self.manager.host is None else self.manager.host.start()

    def end_transfer(self, transfer: Transfer) -> None:
        """The copies of a transfer have ended: requests that wait for its blocks can run."""
        assert self.manager.host is not None
        self.manager.host.end(transfer)

    def _sizes(self) -> tuple[dict[Request, int], dict[Request, list[int]]]:
        """New known tokens of running requests, and the draft tokens after them.

        Requests that write come first, then drafts, then prompts in the order of arrival.
        """
        running = [r for r in self.queue.running if r.table and not r.table.is_arriving]
        budget = self.limits.step_tokens
        sizes = {
            request: 1 for request in running if request.is_decoding and self._can_write(request)
        }
        # each running request is sure of one token, however many drafts there are
        drafts = self._drafts(sizes, budget - len(running))
        budget -= len(sizes) + sum(map(len, drafts.values()))
        for request in running:
            if not request.is_decoding and budget:
                left = len(request.tokens) - request.num_computed
                sizes[request] = min(left, budget, self.limits.chunk)
                budget -= sizes[request]
        return sizes, drafts

    @staticmethod
    def _can_write(request: Request) -> bool:
        """Whether the next token can be planned now."""
        if not request.num_pending:
            return True
        needs_tokens = request.is_constrained or request.ngrams is not None
        return not needs_tokens and len(request.tokens) + 1 < request.max_length

    def _drafts(self, requests: dict[Request, int], budget: int) -> dict[Request, list[int]]:
        """Drafts of the requests that write, ``budget`` tokens together at most."""
        drafts: dict[Request, list[int]] = {}
        if self.speculation is None:
            return drafts
        for request in requests:
            if request.ngrams is not None and budget:
                room = request.max_length - len(request.tokens) - 1
                count = min(self.speculation.num_drafts, budget, room)
                drafts[request] = request.ngrams.propose(count)
                budget -= len(drafts[request])
        return drafts

    def _continue(self, step: Step, request: Request, size: int, drafts: list[int]) -> None:
        """Adds a running request to the step, unless the request loses its pages to older ones."""
        table, end = request.table, request.num_computed + size
        assert table is not None
        if drafts and not self.manager.extend(table, end + len(drafts)):
            drafts = []
        while not self.manager.extend(table, end):
            victim = self.queue.preempt()
            step.preempted.append(victim)
            if victim is request:
                return
        self._add(step, request, size, drafts)

    @staticmethod
    def _add(step: Step, request: Request, size: int, drafts: list[int]) -> None:
        """Adds a chunk, whose pages the request has, to the step."""
        start, num_known = request.num_computed, len(request.tokens)
        is_pending = start >= num_known
        tokens = [0] if is_pending else request.tokens[start : start + size] + drafts
        num_rows = 1 + len(drafts) if start + size >= num_known else 0
        chunk = ScheduledChunk(
            request, start, tokens, drafts, num_rows,
            first_row=step.num_rows,
            source_row=request.pending_row if is_pending else -1,
            num_preemptions=request.num_preemptions,
        )  # fmt: skip
        step.add(chunk)
        request.num_computed = chunk.end
        request.num_pending += num_rows
        request.pending_row = chunk.first_row if num_rows else -1

    # ---- results --------------------------------------------------------------------------------

    def update(
        self, step: Step, tokens: Sequence[int], logprobs: Sequence[Any] | None = None
    ) -> list[Output]:
        """Takes the result of the step that was planned first among those in flight.

        Parameters
        ----------
        step : the step, which has run
        tokens : (rows,) the token that was chosen for each row
        logprobs : (rows,) anything that `Output.logprobs` shall have for these tokens

        Returns
        -------
        What is new of each request that has new tokens.

        Raises
        ------
        InvalidArgument
            The step is not the first one in flight, or ``tokens`` has another length.
        """
        if len(tokens) != step.num_rows:
            raise InvalidArgument(f"{len(tokens)} tokens for the {step.num_rows} rows of the step")
        self._land(step)
        self._observe(step)
        outputs = []
        for chunk in step.chunks:
            request = chunk.request
            if request.state is State.FINISHED:  # cancelled, or ended by the step before
                continue
            request.num_pending -= chunk.num_rows
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            output = self._append(request, verify(chunk.drafts, tokens[rows]))
            if logprobs is not None:
                output.logprobs += logprobs[rows][: len(output.tokens)]
            if chunk.num_preemptions == request.num_preemptions:
                self._keep(chunk, len(output.tokens))
            if request.finish_reason is not None:
                self.queue.end(request, request.finish_reason)
            if output.tokens:
                outputs.append(output)
        return outputs

    def _land(self, step: Step) -> None:
        """Removes ``step`` from the steps in flight."""
        if not self.in_flight or self.in_flight[0] is not step:
            raise InvalidArgument(f"step {step.index} is not the first step in flight")
        self.in_flight.popleft()

    def _observe(self, step: Step) -> None:
        """Tells how long the step took: since the step before it had ended."""
        if self.manager.host is not None:
            now, start = self.queue.clock(), max(step.planned_at, self._last_end)
            self._last_end = now
            self.manager.host.policy.observe(step.num_tokens, now - start)

    def _append(self, request: Request, tokens: list[int]) -> Output:
        """Adds tokens to the request until the request ends."""
        output = Output(request)
        for token in tokens:
            output.tokens.append(token)
            output.text += request.append(token)
            if request.finish_reason is not None:
                break
        if output.tokens and request.first_token_at is None:
            request.first_token_at = self.queue.clock()
        output.finish_reason = request.finish_reason
        return output

    def _keep(self, chunk: ScheduledChunk, num_new: int) -> None:
        """Takes back the slots of rejected drafts, publishes full blocks, frees those not needed.

        Pages are freed here, not when the next step is planned, so that each block is published
        before its window has passed.
        """
        request, table, end = chunk.request, chunk.request.table, chunk.end
        assert table is not None
        if chunk.drafts:
            end = request.num_computed = chunk.start + num_new
            self.manager.shrink(table, end)
        extend_hashes(request.hashes, request.tokens, self.manager.page_size, request.salt)
        self.manager.publish(table, end)
        self.manager.trim(table, end)

    def fail(self, step: Step) -> list[Output]:
        """Ends the requests of a step that failed; their pages are free, all others go on."""
        self._land(step)
        outputs = []
        for request in (chunk.request for chunk in step.chunks):
            if request.state is not State.FINISHED:
                self.queue.end(request, FinishReason.ERROR)
                outputs.append(Output(request, finish_reason=FinishReason.ERROR))
        return outputs

    def fail_request(self, request: Request, error: str) -> Output:
        """Ends one request; steps in flight that have the request go on."""
        request.error = error
        self.queue.end(request, FinishReason.ERROR)
        return Output(request, finish_reason=FinishReason.ERROR)

    def end_all(self, reason: FinishReason) -> list[Output]:
        """Ends all requests, and forgets steps in flight: their results will not come."""
        self.in_flight.clear()
        outputs = []
        for request in list(self.queue.requests.values()):
            self.queue.end(request, reason)
            outputs.append(Output(request, finish_reason=reason))
        return outputs

    # ---- proof ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Proves from first principles that pages, queues and requests agree.

        Raises
        ------
        IntegrityError
            The message lists all contradictions.
        """
        self.manager.check_integrity()
        check_queue(self.queue, self.in_flight)
