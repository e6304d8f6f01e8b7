"""Work beside other work of the same step: on a stream of its own that forks and joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
Mark = torch.cuda.Event | None
"""A place in the caller's stream; None on a CPU."""


class Beside:
    """Starts work that may run beside what its caller launches next. On a CPU it runs at once.

    Memory is safe without further events: work begins behind all that its caller has launched, or
    had launched at a mark, and `join` lets the caller's stream wait for it. Both hold in a CUDA
    graph.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """What the caller has launched so far."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    def start(self, work: Callable[[], Result], after: Mark = None) -> Callable[[], Result]:
        """Starts ``work``; what is returned waits on the device, not on the host, for the result.

        It also waits for all work that was started before. The caller keeps what ``work`` reads
        until then, and what it reads itself of earlier results: their memory is this stream's.

        Parameters
        ----------
        after : a mark, behind which ``work`` may begin; None for behind all that was launched
        """
        if self._stream is None:
            result = work()
            return lambda: result
        caller, stream = torch.cuda.current_stream(self._stream.device), self._stream
        if after is None:
            stream.wait_stream(caller)
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            result = work()

        def join() -> Result:
            caller.wait_stream(stream)
            return result

        return join
