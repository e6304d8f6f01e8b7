"""Work beside other work of the same step: on a stream of its own that forks and joins."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Beside:
    """Starts work that may run beside what its caller launches next. On a CPU it runs at once.

    Memory is safe without further events: work begins behind all that its caller has launched, and
    `join` lets the caller's stream wait for it. Both hold in a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Starts ``work``; what is returned waits on the device, not on the host, for the result.

        The caller keeps what ``work`` reads until then.
        """
        if self._stream is None:
            result = work()
            return lambda: result
        caller, stream = torch.cuda.current_stream(self._stream.device), self._stream
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            result = work()

        def join() -> torch.Tensor:
            caller.wait_stream(stream)
            return result

        return join
