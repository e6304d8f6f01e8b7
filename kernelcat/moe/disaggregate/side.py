"""What the process of one of the two engines gets to know."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kernelcat.errors import InvalidArgument
from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.engine.pages_out import Link
from kernelcat.runtime import driver
from kernelcat.runtime.devices import VISIBLE, visible


@dataclass(frozen=True)
class Side:
    """One of the two engines.

    Attributes
    ----------
    is_decode : whether it is the one that writes
    path : the socket at which both meet
    router : where prompts are computed
    """

    is_decode: bool
    path: str
    router: Router = field(default_factory=Router)

    @property
    def name(self) -> str:
        """``decode`` or ``prefill``."""
        return "decode" if self.is_decode else "prefill"

    def link(self, device: str) -> Link:
        """The way to the other engine's cache; both engines' processes call this together."""
        from kernelcat.moe.disaggregate.device_link import DeviceLink
        from kernelcat.moe.disaggregate.host_link import HostLink

        link = DeviceLink if device == "cuda" else HostLink
        return link(0 if self.is_decode else 1, Path(self.path))

    def environment(self, device: str) -> dict[str, str]:
        """The environment of the side's process: its GPU is the first one, the other's the second.

        Raises ``InvalidArgument`` where there is one GPU.
        """
        if device != "cuda":
            return dict(os.environ)
        count = driver.count()
        if count < 2:
            raise InvalidArgument(f"--disaggregate needs two GPUs, and there is {count}")
        names = [visible(1), visible(0)] if self.is_decode else [visible(0), visible(1)]
        return {**os.environ, VISIBLE: ",".join(names)}
