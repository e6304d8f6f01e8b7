"""Lanes: work that runs in order, beside the work of other lanes. On a GPU a lane is a stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

Mark = torch.cuda.Event | None
"""A point in the work of a lane; None on a CPU, where work is done when `Lane.run` returns."""


class Lane:
    """Work on ``device`` in the order of the calls of `run`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], object], after: Mark = None) -> Mark:
        """Starts ``work`` behind what the lane has and behind the mark ``after`` of another lane.

        The host does not wait. Returns the mark of the end of ``work``.
        """
        if self.stream is None:
            work()
            return None
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            work()
            return self.stream.record_event()

    @staticmethod
    def wait(mark: Mark) -> None:
        """Waits on the host until the work before ``mark`` has ended; raises what it has raised."""
        if mark is not None:
            mark.synchronize()

    def drain(self) -> None:
        """Waits on the host for all work; raises what it has raised."""
        if self.stream is not None:
            self.stream.synchronize()
