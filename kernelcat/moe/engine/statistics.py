"""Numbers of an engine: what it has counted, and the state of queues and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.step import Output, Step


@dataclass(frozen=True)
class Statistics:
    """Numbers of an engine; those called ``*_total`` only grow.

    Attributes
    ----------
    requests_waiting, requests_running : requests that have not ended
    pages, pages_in_use, pages_cached : of all layer groups; a cached page holds a block that only
        the prefix cache knows
    steps_total : steps that have ended, failed ones included
    failed_steps_total : steps that failed
    requests_total : requests that were accepted
    preemptions_total : how often a request lost its pages
    prompt_tokens_total : tokens of prompts whose requests have written a token
    cached_tokens_total : those of them that were found in the prefix cache, or in host memory
    output_tokens_total : tokens that were written
    draft_tokens_total, accepted_tokens_total : tokens that speculation proposed, and those of them
        that were right
    host_pages, host_pages_in_use : places for pages in host memory, and those that have one
    host_bandwidth : bytes a second of a copy from host memory to pages, measured at the start
    offloaded_pages_total, offloaded_bytes_total : copied to host memory
    fetched_pages_total, fetched_bytes_total : copied back
    fetched_tokens_total : tokens that need not be computed because their pages were copied back
    """

    requests_waiting: int = 0
    requests_running: int = 0
    pages: int = 0
    pages_in_use: int = 0
    pages_cached: int = 0
    steps_total: int = 0
    failed_steps_total: int = 0
    requests_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    output_tokens_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    host_pages: int = 0
    host_pages_in_use: int = 0
    host_bandwidth: float = 0.0
    offloaded_pages_total: int = 0
    offloaded_bytes_total: int = 0
    fetched_pages_total: int = 0
    fetched_bytes_total: int = 0
    fetched_tokens_total: int = 0

    @property
    def summary(self) -> str:
        """A line about what the counters do not show at a glance; "" for nothing."""
        return ""


class Counters:
    """Counts what steps do; its owner has a lock."""

    def __init__(self) -> None:
        self._totals = Statistics()

    def _add(self, **counts: int) -> None:
        sums = {name: getattr(self._totals, name) + count for name, count in counts.items()}
        self._totals = replace(self._totals, **sums)

    def count_request(self) -> None:
        """A request was accepted."""
        self._add(requests_total=1)

    def count_failure(self) -> None:
        """A step has failed."""
        self._add(steps_total=1, failed_steps_total=1)

    def count_step(self, step: Step, outputs: Sequence[Output]) -> None:
        """A step has ended with these outputs."""
        first = [o.request for o in outputs if o.request.num_written == len(o.tokens)]
        num_new = {output.request: len(output.tokens) for output in outputs}
        drafts = [(len(c.drafts), num_new.get(c.request, 1) - 1) for c in step.chunks if c.drafts]
        self._add(
            steps_total=1,
            prompt_tokens_total=sum(len(request.prompt) for request in first),
            cached_tokens_total=sum(request.num_cached or 0 for request in first),
            output_tokens_total=sum(num_new.values()),
            draft_tokens_total=sum(proposed for proposed, _ in drafts),
            accepted_tokens_total=sum(accepted for _, accepted in drafts),
        )

    def count_first(self, request: Request) -> None:
        """A request has its first token from another engine."""
        self._add(
            prompt_tokens_total=len(request.prompt),
            cached_tokens_total=request.num_cached or 0,
            output_tokens_total=1,
        )

    def read(self, scheduler: Scheduler) -> Statistics:
        """The counts, with the present state of queues and pages."""
        pools, host = scheduler.manager.pools, scheduler.manager.host
        totals = self._totals if host is None else replace(self._totals, **host.numbers())
        return replace(
            totals,
            requests_waiting=scheduler.queue.num_waiting,
            requests_running=len(scheduler.queue.running),
            pages=sum(pool.num_pages - 1 for pool in pools),
            pages_in_use=sum(pool.num_in_use for pool in pools),
            pages_cached=sum(pool.num_cached for pool in pools),
            preemptions_total=scheduler.queue.num_preemptions,
        )
