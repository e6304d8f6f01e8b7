"""Who waits, who runs, and which pages those who run have.

Requests wait and run in the order of arrival: everybody who runs arrived before everybody who
waits. A request that starts takes a block table; a request that is preempted or ends gives all its
pages back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.block_hashes import extend_hashes
from kernelcat.moe.engine.blocks import BlockManager, BlockTable
from kernelcat.moe.engine.limits import Limits, QueueFull
from kernelcat.moe.engine.request import FinishReason, Request, State


class RequestQueue:
    """Requests that have not ended.

    Parameters
    ----------
    manager : the pages of the caches
    limits : of requests
    clock : seconds, for the times of requests

    Attributes
    ----------
    requests : by id
    waiting, running : in the order of arrival
    num_preemptions : counted since the start

    Raises
    ------
    InvalidArgument
        The caches are too small for any request.
    """

    def __init__(
        self, manager: BlockManager, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        limits.check_cache(manager)
        self.manager, self.limits, self.clock = manager, limits, clock
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._num_arrived = 0

    def submit(self, request: Request) -> None:
        """Adds a request that waits.

        Raises
        ------
        QueueFull
            `Limits.max_waiting` requests wait.
        InvalidArgument
            The request does not fit into the limits, or its id is in use.
        """
        self.check(request)
        request.arrived_at = self.clock()
        self.enter(request)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self.waiting)

    @property
    def tables(self) -> set[BlockTable | None]:
        """The block tables that are open."""
        return {request.table for request in self.running}

    def knows(self, request_id: str) -> bool:
        """Whether a request that has not ended has this id."""
        return request_id in self.requests

    def check(self, request: Request) -> None:
        """Refuses a request as `submit` does, and sets its ``max_length``."""
        if self.knows(request.id) or request.state is not State.NEW:
            raise InvalidArgument(f"request {request.id!r} has been submitted already")
        if self.num_waiting >= self.limits.max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests wait, and the limit is {self.limits.max_waiting}: "
                "try again later"
            )
        request.max_length = self.limits.max_length(request, self.manager)

    def enter(self, request: Request) -> None:
        """Adds a request that was checked; it waits behind all others."""
        request.order, self._num_arrived = self._num_arrived, self._num_arrived + 1
        request.state = State.WAITING
        self.requests[request.id] = request
        self.waiting.append(request)

    def start(self, budget: int) -> tuple[Request, int] | None:
        """Starts the request that waits longest, if the caches have room for it.

        A request whose prefix is in host memory has no new token yet, but waits for its blocks.

        Parameters
        ----------
        budget : new tokens that the step can take, at least 1

        Returns
        -------
        The request, which runs now, and how many new tokens it has pages for; or None.
        """
        if not self.waiting or len(self.running) >= self.limits.max_running:
            return None
        request = self.waiting[0]
        if request.num_pending:  # preempted while a step in flight chooses its next token
            return None
        self._open(request)
        table = request.table
        assert table is not None
        size = min(len(request.tokens) - request.num_computed, budget, self.limits.chunk)
        if table.in_host:
            size = 0
        has_room = (not self.running or self._has_room(request)) and self.manager.fetch(table)
        if not has_room or not self.manager.extend(table, request.num_computed + size):
            self._close(request)
            return None
        self.waiting.popleft()
        self.running.append(request)
        request.state = State.RUNNING
        if request.num_cached is None:
            request.num_cached = request.num_computed
        return request, size

    def _open(self, request: Request) -> None:
        """Opens a block table with the blocks that the cache has."""
        page_size = self.manager.page_size
        extend_hashes(request.hashes, request.tokens, page_size, request.salt)
        # the last token must be computed: its logits are needed
        max_cached = (len(request.tokens) - 1) // page_size
        request.table = self.manager.open(request.hashes, max_cached)
        request.num_computed = request.table.num_blocks * page_size

    def _has_room(self, request: Request) -> bool:
        """Whether all known tokens of ``request`` fit beside those of the running requests.

        A running request counts one page more, lest ``request`` be preempted as soon as a running
        request needs its next page.
        """
        missing = []
        for other in (request, *self.running):
            assert other.table is not None
            count = self.manager.num_missing(other.table, len(other.tokens))
            missing.append(count + (other is not request))
        assert request.table is not None
        in_host = self.manager.num_in_host(request.table)
        return self.manager.has_room(missing, self.limits.span, in_host)

    def _close(self, request: Request) -> None:
        """Gives back all pages of ``request``."""
        assert request.table is not None
        self.manager.close(request.table)
        request.table, request.num_computed = None, 0

    def preempt(self) -> Request:
        """Takes all pages of the running request that arrived last; it waits before all others."""
        request = self.running.pop()
        self._close(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.state = State.WAITING
        self.waiting.appendleft(request)
        return request

    def end(self, request: Request, reason: FinishReason) -> None:
        """Removes a request; its published blocks stay in the cache."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._close(request)
        else:
            self.waiting.remove(request)
        del self.requests[request.id]
        request.state, request.finish_reason = State.FINISHED, reason
        request.ended_at = self.clock()
