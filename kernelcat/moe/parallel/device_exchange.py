"""The exchange of GPUs: kernels of the catalog that write to the windows of the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from kernelcat import catalog
from kernelcat.call import evidence, signature
from kernelcat.call.building import warn_of_doubt
from kernelcat.call.choice import choose
from kernelcat.catalog.cost_model import least_estimate
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import KernelcatError, RankFailed
from kernelcat.moe.parallel.exchange import Exchange, Tensors
from kernelcat.ranks import shares
from kernelcat.ranks.group import Group
from kernelcat.ranks.rendezvous import Watch
from kernelcat.reference.all_reduce import SM_BLOCKS
from kernelcat.runtime.device import CudaDevice
from kernelcat.runtime.gpu import Gpu
from kernelcat.runtime.launcher import Launcher

REASON_S = 0.1
"""Seconds in which a rank that a kernel missed may say why it has failed."""


class DeviceExchange(Exchange):
    """Rank ``rank`` of ``ranks`` processes that meet at the socket ``path``, on a GPU of each.

    Kernels run on torch's current stream, one after another in all calls: who calls on several
    streams lets each wait for the one before. They may be captured in CUDA graphs. The first call
    with new shapes prepares a kernel on all ranks: capture a step that has run once. The kernel is
    the one that the database or, where nothing was measured, the least estimate names; rank 0
    chooses for all. `within` few SMs it is the one with the least estimate of those whose thread
    blocks fit.

    Raises
    ------
    RankFailed
        As `Group`: a rank did not come, or the ranks' drivers and GPUs do not fit together.
    """

    def __init__(
        self, rank: int, ranks: int, path: Path, gpu: int, watch: Watch | None = None
    ) -> None:
        self.group = Group(rank, ranks, path, CudaDevice(gpu), watch)
        super().__init__(self.group.rendezvous)
        self.device = torch.device("cuda", gpu)
        self._launchers: dict[Any, Launcher] = {}

    def _run(self, name: str, inputs: Tensors, out: Tensors, axes: Mapping[str, Any]) -> None:
        tensors = (*inputs, *out)
        kinds = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]
        key = (name, self.sms, *kinds, *axes.items())
        launch = self._launchers.get(key)
        if launch is None:
            launch = self._launchers[key] = self._prepare(name, inputs, out, axes)
        if not (self._has_started or torch.cuda.is_current_stream_capturing()):
            self.gather(None)  # the others may be compiling, and kernels wait seconds at most
        pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        launch(pointers, torch.cuda.current_stream(self.device).cuda_stream)

    def _shared_bytes(self, size: int) -> list[torch.Tensor]:
        own = self.group.share(size)
        return [torch.from_dlpack(part) for part in self.group.at_ranks(own)]

    def _prepare(
        self, name: str, inputs: Tensors, out: Tensors, axes: Mapping[str, Any]
    ) -> Launcher:
        """Choose and load a kernel on all ranks."""
        entry = catalog.entry(name)
        part = shares.of_rank(entry)
        infos = signature.describe(part, inputs, out)
        problem = signature.infer(part, infos, {str(entry.ranks): self.ranks, **axes})
        chosen = None
        if self.rank == 0:
            try:
                implementation, config, sms = best(entry, problem, self.group, self.sms)
            except KernelcatError as error:
                self.fail(str(error))
                raise
            warn_of_doubt(implementation)
            chosen = implementation.language, implementation.variant, dict(config), sms
        language, variant, values, sms = self.broadcast(chosen)
        implementation = catalog.implementation(name, language, variant)
        return self.group.launcher(implementation, problem, Config(values), sms)

    def check(self) -> None:
        if not self._failure and (missing := self.group.missing()) is not None:
            reason = f"rank {missing} did not answer a kernel of rank {self.rank} in time"
            try:  # it may have said why
                self.rendezvous.gather(None, limit_s=REASON_S)
            except RankFailed as error:
                reason += f": {error}"
            self.fail(reason)
        super().check()

    def _leave(self) -> None:
        with contextlib.suppress(RankFailed):  # windows then end with the process
            self.check()
            self.group.close()
        super()._leave()


def best(
    entry: Entry, problem: Problem, group: Group, sms: int | None = None
) -> tuple[Implementation, Config, int | None]:
    """The implementation and configuration that serve a problem of several ranks on these GPUs.

    What was measured on such GPUs decides; where nothing was, the least estimate does. With ``sms``
    the least estimate decides among those whose thread blocks run at once on so many SMs. The last
    result is the number of SMs for which launches are sized: ``sms``, or None for all of the GPU,
    also where no launch fits on fewer.

    Raises ``Unsupported`` where no implementation serves.
    """
    if sms is not None:
        part = replace(group.gpu, sms=sms)
        if (found := _best_within(entry, problem, part)) is not None:
            return *found, sms
    rows, refuted = evidence.of_entry(entry.name)
    decision = choose(entry, problem, group.machine, rows, refuted=refuted)
    if decision.why != "default":
        return decision.implementation, decision.config, None
    offers = [
        (*least, implementation)
        for implementation in catalog.implementations(entry.name)
        if (least := least_estimate(implementation, problem, group.gpu)) is not None
    ]
    _, config, implementation = min(offers, key=lambda offer: offer[0])
    return implementation, config, None


def _best_within(entry: Entry, problem: Problem, part: Gpu) -> tuple[Implementation, Config] | None:
    """The least estimate of what leaves all SMs but those of ``part`` of a GPU to others, or None.

    Launches whose thread blocks need not run at once must fit too: they would take other SMs.
    """
    offers = [
        (implementation.estimate(problem, config, part), config, implementation)
        for implementation in catalog.implementations(entry.name)
        for config in implementation.promising(problem, part)
        if all(
            prod(step.grid) <= SM_BLOCKS * part.sms
            for step in implementation.program(problem, config, part).steps
        )
    ]
    if not offers:
        return None
    _, config, implementation = min(offers, key=lambda offer: offer[0])
    return implementation, config
