"""The engine that writes: it takes all requests, and asks another engine for most prompts."""

from __future__ import annotations

from kernelcat.moe.disaggregate.arrivals import ArrivalScheduler
from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.engine.engine import Engine, RequestOutput
from kernelcat.moe.engine.pages_out import Destination


class DecodeEngine(Engine):
    """An engine whose cache another engine writes to.

    Requests are submitted and cancelled as in `Engine`. Those of `take_wanted` wait until `arrive`
    says that the other engine is done with them.
    """

    scheduler_type = ArrivalScheduler
    _scheduler: ArrivalScheduler

    def use_router(self, router: Router) -> None:
        """From now on ``router`` chooses where prompts are computed."""
        self._scheduler.router = router

    def note_queue(self, num_tokens: int) -> None:
        """The other engine has prompts of ``num_tokens`` tokens to compute."""
        with self._lock:
            self._scheduler.num_queued = num_tokens

    def take_wanted(self) -> list[tuple[str, Destination]]:
        """Requests whose prompts the other engine shall compute, since the last call."""
        with self._lock:
            return [(request.id, to) for request, to in self._scheduler.take_wanted()]

    def arrive(self, output: RequestOutput) -> list[RequestOutput]:
        """The other engine is done with a request: ``output`` has its first token, or an error.

        The other engine writes no page of the request any more. The thread that runs `step` calls
        this. Returns what is new of the request, if it has not ended meanwhile.
        """
        with self._lock:
            if not output.tokens:
                error = output.error or f"its prompt was not computed: {output.finish_reason}"
                found = self._scheduler.fail_arrival(output.request_id, error)
            else:
                self._receive(output.request_id)
                token, num_cached = output.tokens[0], output.num_cached
                found = self._scheduler.arrive(output.request_id, token, num_cached)
                if found is not None:
                    found.logprobs += output.logprobs[:1]
                    self._counters.count_first(found.request)
        return [] if found is None else [RequestOutput.of(found)]

    def _receive(self, request_id: str) -> None:
        """Takes the pages of a request that has not ended."""
        request, link = self._scheduler.queue.coming.get(request_id), self._runner.link
        if request is not None and request.destination is not None and link is not None:
            link.receive(request.destination)
