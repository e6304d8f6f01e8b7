"""Streams of the device: work runs in order in a stream, and beside the work of other streams."""

from __future__ import annotations

from collections.abc import Callable

import torch

Event = torch.cuda.Event | None
"""A point of a stream; None on a CPU, where work has ended when `DeviceStream.run` returns."""


class DeviceStream:
    """A stream of ``device``. On a CPU work runs when it is started."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], object], after: Event = None) -> Event:
        """Starts ``work`` behind what the stream has and behind ``after``, of another stream.

        The host does not wait. Returns the end of ``work``.
        """
        if self.cuda is None:
            work()
            return None
        with torch.cuda.device(self.device), torch.cuda.stream(self.cuda):
            if after is not None:
                self.cuda.wait_event(after)
            work()
            return self.cuda.record_event()

    def wait(self, event: Event) -> None:
        """Work that is started later starts after ``event``, of another stream."""
        if self.cuda is not None and event is not None:
            self.cuda.wait_event(event)

    def synchronize(self) -> None:
        """Waits on the host for all work; raises what a kernel has raised."""
        if self.cuda is not None:
            self.cuda.synchronize()
