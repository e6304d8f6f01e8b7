"""Transfers on the device: streams that copy between pages and host memory beside steps."""

from __future__ import annotations

from functools import partial

from kernelcat.moe.engine.host_cache import Transfer
from kernelcat.moe.engine.host_memory import HostMemory
from kernelcat.moe.engine.streams import DeviceStream, Event


class HostCopies:
    """Starts transfers, and tells which have ended.

    Each direction has a stream and a staging buffer of its own, because a bus carries both
    directions at once. What a transfer to host memory reads was written by steps that have ended.
    What a fetch writes may still be written by steps that were launched before, for requests that
    have ended meanwhile: a fetch starts after them.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._fetches, self._offloads = (DeviceStream(memory.device) for _ in range(2))
        self._started: list[tuple[Transfer, Event]] = []
        self._error: Exception | None = None

    def start(self, transfer: Transfer, steps: Event) -> None:
        """Starts a transfer; ``steps`` is the end of the step that was launched last.

        What goes wrong here is raised by `ended`, as what goes wrong on the device.
        """
        try:
            if transfer.is_fetch:
                end = self._fetches.run(partial(self._memory.fetch, transfer.moves), steps)
            else:
                end = self._offloads.run(partial(self._memory.offload, transfer.moves))
        except Exception as error:
            self._error = self._error or error
        else:
            self._started.append((transfer, end))

    def ended(self) -> list[Transfer]:
        """The transfers whose copies have ended, once each; raises what a copy has raised."""
        if self._error is not None:
            raise self._error
        ended = [each for each in self._started if each[1] is None or each[1].query()]
        self._started = [each for each in self._started if each not in ended]
        return [transfer for transfer, _ in ended]

    def wait(self) -> None:
        """Waits for the fetch that was started first, if there is one."""
        for transfer, end in self._started:
            if transfer.is_fetch:
                if end is not None:
                    end.synchronize()
                return

    def abandoned(self) -> list[Event]:
        """The ends of fetches whose pages may have another owner now."""
        return [end for transfer, end in self._started if transfer.is_abandoned]

    def synchronize(self) -> None:
        """Waits for all transfers; raises what a copy has raised."""
        for stream in (self._fetches, self._offloads):
            stream.synchronize()

    def close(self) -> None:
        """Frees host memory; no transfer is on its way."""
        self._started.clear()
        self._memory.close()
