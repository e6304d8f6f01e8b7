"""The decode engine's requests whose prompts another engine computes.

Such a request waits for pages (`ArrivalQueue.asking`), then for what the other engine writes into
them (`coming`), and then, with all its pages and its first token, for a place among those that run
(`waiting`, behind all others). If pages run out, the request that arrived last and waits with pages
loses them before any that runs; it is then computed here, like a preempted one. Pages that the
other engine may still write to are given back only when that engine has said that it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.engine.block_hashes import extend_hashes
from kernelcat.moe.engine.blocks import BlockTable
from kernelcat.moe.engine.pages import NULL_PAGE
from kernelcat.moe.engine.pages_out import Destination
from kernelcat.moe.engine.queue import RequestQueue
from kernelcat.moe.engine.request import FinishReason, Request, State
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.speculation import NgramIndex
from kernelcat.moe.engine.step import Output


class ArrivalQueue(RequestQueue):
    """A queue with requests whose prompts another engine computes.

    Attributes
    ----------
    asking : requests that wait for pages, in the order of arrival
    coming : id -> request whose pages the other engine fills
    abandoned : id -> pages of a request that has ended while they were filled
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asking: deque[Request] = deque()
        self.coming: dict[str, Request] = {}
        self.abandoned: dict[str, BlockTable] = {}

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.asking) + len(self.coming)

    @property
    def tables(self) -> set[BlockTable | None]:
        holding = (request.table for request in (*self.coming.values(), *self._arrived()))
        return super().tables | {*holding} | {*self.abandoned.values()}

    def _arrived(self) -> Iterator[Request]:
        """Requests that wait with pages, the one that arrived last first."""
        return (request for request in reversed(self.waiting) if request.table is not None)

    def named(self, request_id: str) -> Request | None:
        """The request with this id among those that the other engine computes."""
        asking = (request for request in self.asking if request.id == request_id)
        return self.coming.get(request_id) or next(asking, None)

    def knows(self, request_id: str) -> bool:
        is_elsewhere = self.named(request_id) is not None or request_id in self.abandoned
        return is_elsewhere or super().knows(request_id)

    def start(self, budget: int) -> tuple[Request, int] | None:
        request = self.waiting[0] if self.waiting else None
        if request is None or request.table is None:
            return self._start_without_pages(budget)
        if len(self.running) >= self.limits.max_running:
            return None
        while not self.manager.extend(request.table, len(request.tokens)):
            if self.running or not self._reclaim(request):
                return None
        self.waiting.popleft()
        self.running.append(request)
        request.state = State.RUNNING
        return request, len(request.tokens) - request.num_computed

    def _start_without_pages(self, budget: int) -> tuple[Request, int] | None:
        """As `RequestQueue.start`; if nothing runs, those that wait with pages give way."""
        started = super().start(budget)
        while started is None and self._is_stuck() and self._reclaim(None):
            started = super().start(budget)
        return started

    def _is_stuck(self) -> bool:
        """Whether nothing runs, and the first request that waits is short of nothing but pages."""
        return bool(self.waiting) and not self.running and not self.waiting[0].num_pending

    def _reclaim(self, keeper: Request | None) -> bool:
        """Takes the pages of the last request that waits with pages and is not ``keeper``."""
        request = next((r for r in self._arrived() if r is not keeper), None)
        if request is None:
            return False
        self._close(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        return True

    def _has_room(self, request: Request) -> bool:
        missing = [self._num_missing(request)]
        others = (*self.running, *self.coming.values(), *self._arrived())
        missing += [self._num_missing(other) + 1 for other in others]
        assert request.table is not None
        in_host = self.manager.num_in_host(request.table)
        return self.manager.has_room(missing, self.limits.span, in_host)

    def _num_missing(self, request: Request) -> int:
        assert request.table is not None
        return self.manager.num_missing(request.table, len(request.tokens))

    def preempt(self) -> Request:
        last = next(self._arrived(), None)
        if last is None:
            return super().preempt()
        self._reclaim(None)
        return last

    def end(self, request: Request, reason: FinishReason) -> None:
        if request.id not in self.requests:
            return self._end_elsewhere(request, reason)
        if request.state is State.WAITING and request.table is not None:
            self._close(request)
        super().end(request, reason)

    def _end_elsewhere(self, request: Request, reason: FinishReason) -> None:
        """Ends a request that asks for pages, or whose pages are filled."""
        if request in self.asking:
            self.asking.remove(request)
        else:
            del self.coming[request.id]
            assert request.table is not None
            self.abandoned[request.id] = request.table
            request.table = None
        request.state, request.finish_reason = State.FINISHED, reason
        request.ended_at = self.clock()

    def ask(self, request: Request) -> None:
        """Adds a request that was checked and whose prompt the other engine shall compute."""
        request.arrived_at = self.clock()
        request.state = State.WAITING
        self.asking.append(request)

    def admit(self) -> Iterator[tuple[Request, Destination]]:
        """Gives pages to requests that ask, as long as there is room; where their pages are.

        Those that lost their pages come first.
        """
        while self.asking and all(request.table for request in self.waiting):
            if len(self.requests) + len(self.coming) >= self.limits.max_running:
                return
            request = self.asking[0]
            self._open(request)
            table, num_cached = request.table, request.num_computed
            assert table is not None
            num_shared = table.num_blocks
            is_alone = not self.running and not self.coming and not self.waiting
            has_room = is_alone or self._has_room(request)
            if not has_room or not self.manager.reserve(table, len(request.prompt)):
                self._close(request)
                return
            self.asking.popleft()
            self.coming[request.id] = request
            request.num_computed, request.num_cached = 0, num_cached
            pages = table.pages[:, : table.num_blocks].copy()
            pages[:, :num_shared] = NULL_PAGE
            request.destination = Destination(pages.tolist())
            yield request, request.destination

    def release(self, request_id: str) -> None:
        """Gives back the pages of a request that has ended: nobody writes to them any more."""
        table = self.abandoned.pop(request_id, None)
        if table is not None:
            self.manager.close(table)

    def arrive(self, request: Request) -> None:
        """The prompt's pages are full; the request waits behind all others with its new token."""
        del self.coming[request.id]
        table, num_tokens = request.table, len(request.prompt)
        assert table is not None
        request.num_computed, request.destination = num_tokens, None
        extend_hashes(request.hashes, request.tokens, self.manager.page_size, request.salt)
        self.manager.publish(table, num_tokens)
        self.enter(request)


class ArrivalScheduler(Scheduler):
    """A scheduler of which another engine computes prompts.

    Attributes
    ----------
    router : chooses who computes a prompt
    num_queued : tokens of prompts that the other engine has to compute
    """

    queue: ArrivalQueue

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.queue = ArrivalQueue(self.manager, self.limits, self.queue.clock)
        self.router = Router()
        self.num_queued = 0
        self._granted: deque[tuple[int, Request, Destination]] = deque()

    def submit(self, request: Request) -> None:
        size, queue = self.manager.page_size, self.queue
        queue.check(request)
        extend_hashes(request.hashes, request.tokens, size, request.salt)
        max_cached = max(len(request.tokens) - 1, 0) // size
        num_cached = size * self.manager.num_cached_blocks(request.hashes[:max_cached])
        num_writing = len(queue.requests) + len(queue.coming) + len(queue.asking)
        num_new = len(request.tokens) - num_cached
        if self.router.is_local(num_new, self.num_queued, num_writing):
            return super().submit(request)
        queue.ask(request)

    def take_wanted(self) -> list[tuple[Request, Destination]]:
        """Requests whose prompts the other engine shall compute now, and where their pages go.

        A page may have had an owner whose last step is in flight, and would write after the other
        engine does. So a request waits here until the steps have ended that were planned before it
        got its pages.
        """
        last = self.in_flight[-1].index if self.in_flight else -1
        self._granted += ((last, *granted) for granted in self.queue.admit())
        first = self.in_flight[0].index if self.in_flight else self.num_steps
        wanted = []
        while self._granted and self._granted[0][0] < first:
            wanted.append(self._granted.popleft()[1:])
        return wanted

    def cancel(self, request_id: str) -> bool:
        request = self.queue.named(request_id)
        if request is not None:
            self.queue.end(request, FinishReason.CANCELLED)
        return request is not None or super().cancel(request_id)

    def arrive(self, request_id: str, token: int, num_cached: int) -> Output | None:
        """The other engine is done with a prompt, and has chosen the first token.

        Returns what is new of the request; None if it has ended meanwhile.
        """
        self.queue.release(request_id)
        request = self.queue.coming.get(request_id)
        if request is None:
            return None
        request.num_cached = max(request.num_cached or 0, num_cached)
        self.queue.arrive(request)
        output = self._append(request, [token])
        if request.finish_reason is not None:
            self.queue.end(request, request.finish_reason)
        elif self.speculation and not request.parameters.has_penalty and not request.is_constrained:
            request.ngrams = NgramIndex(self.speculation, request.tokens)
        return output

    def fail_arrival(self, request_id: str, error: str) -> Output | None:
        """The other engine has failed with a prompt, and writes no page of it any more."""
        request = self.queue.coming.get(request_id)
        output = None if request is None else self.fail_request(request, error)
        self.queue.release(request_id)
        return output

    def end_all(self, reason: FinishReason) -> list[Output]:
        outputs = super().end_all(reason)
        for request in (*self.queue.asking, *self.queue.coming.values()):
            self.queue.end(request, reason)
            outputs.append(Output(request, finish_reason=reason))
        return outputs
