"""Child processes on a machine of a Ray cluster: the machine's end and the tune's end.

The machine's end is :class:`Relay`, an actor of Ray that has one GPU and starts the same child
processes as a tune on this machine. The tune's end of a child is :class:`RemoteChannel`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelcat.tune import backend as backends
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout, Lost, Stopped
from kernelcat.tune.messages import Failed, Reply, Request
from kernelcat.tune.supervisor import Limits

BEAT_S = 10.0
"""Seconds without a reply after which the tune asks the machine whether it still works."""
MAX_REASON = 300
"""Characters of an error's text."""
PATIENCE_S = 30.0
"""Seconds without an answer to that question after which the machine counts as lost."""


@dataclass(frozen=True)
class Facts:
    """What a machine tells before anything is measured there.

    Attributes
    ----------
    digests : (language, variant) -> digest of each implementation of the entry
    limits : the limits of the tune, longer if the machine cannot keep compiled kernels
    notes : sentences for the user
    """

    digests: Mapping[tuple[str, str], str]
    limits: Limits
    notes: list[str]


class Relay:
    """An actor of Ray: child processes by number, and requests to them.

    Ray calls the methods in several threads, one for each child and some more.
    """

    def __init__(self) -> None:
        self.channels: dict[int, Channel] = {}
        self.numbers = itertools.count()

    def where(self) -> tuple[str, str]:
        """The identifier of the machine in the cluster, and its address."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def facts(self, spec: str, entry: str, limits: Limits) -> Facts:
        backend = backends.load(spec)
        found = backend.implementations(entry)
        limits, notes = limits.for_cache()
        return Facts({(i.language, i.variant): backend.digest(i) for i in found}, limits, notes)

    def start(self, module: str, *args: str) -> int:
        number = next(self.numbers)
        self.channels[number] = Channel(module, *args)
        return number

    def request(
        self, number: int, request: Request[Any], timeout: float
    ) -> tuple[Any, Candidate | None]:
        """The reply, or the exception in its place, and the last candidate that was announced."""
        channel = self.channels[number]
        try:
            return channel.request(request, timeout), channel.announced
        except (ChildTimeout, ChildDied) as error:
            return error, channel.announced

    def kill(self, number: int) -> None:
        self.channels.pop(number).kill()

    def beat(self) -> None:
        """Answers."""


class Machine:
    """The tune's end of a :class:`Relay`: ``node`` of the cluster, with one of its GPUs."""

    def __init__(self, actor: Any, node: str, address: str) -> None:
        self.actor, self.node = actor, node
        self.name = f"{address} (node {node[:8]})"
        self.is_closed = False

    def call(self, method: str, *args: Any, limit_s: float = float("inf")) -> Any:
        """The result of a method of the relay.

        Raises
        ------
        Lost
            The machine or the relay died, or does not answer, or there is no result in ``limit_s``
            seconds.
        Stopped
            This object was closed.
        """
        import ray
        from ray.exceptions import RayError

        result, waited_s = getattr(self.actor, method).remote(*args), 0.0
        try:
            while not ray.wait([result], timeout=BEAT_S)[0]:
                waited_s += BEAT_S
                if waited_s > limit_s:
                    raise Lost(f"{self.name} does not end {method} in {limit_s:g} s")
                ray.get(self.actor.beat.remote(), timeout=PATIENCE_S)
            return ray.get(result)
        except RayError as error:
            if self.is_closed:
                raise Stopped from error
            raise Lost(f"{self.name} is lost: {reason(error)}") from error

    def start(self, module: str, *args: str) -> RemoteChannel:
        """A child on this machine; a ``kernelcat.tune.channel.Start``."""
        return RemoteChannel(self, self.call("start", module, *args))

    def close(self) -> None:
        """Ends the relay and its children; a thread in :meth:`call` gets ``Stopped``."""
        import ray

        self.is_closed = True
        ray.kill(self.actor)


class RemoteChannel:
    """The tune's end of the connection to child ``number`` of a machine."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.announced: Candidate | None = None

    def request(self, request: Request[Reply], timeout: float) -> Reply | Failed:
        """As ``Channel.request``; raises ``Lost`` too, if the machine is lost."""
        reply, self.announced = self.machine.call("request", self.number, request, timeout)
        if isinstance(reply, (ChildTimeout, ChildDied)):
            raise reply
        checked: Reply | Failed = reply
        return checked

    def kill(self) -> None:
        if not self.machine.is_closed:
            self.machine.actor.kill.remote(self.number)


def reason(error: Exception) -> str:
    """What an error of Ray says, in one line without the traceback of the other machine."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    dead = [line for line in lines if line.startswith("The actor is dead because")]
    raised = [line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)]
    text = f"{type(cause).__name__}: {next(iter((*dead, *raised, *lines)), '')}"
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 3]}..."
