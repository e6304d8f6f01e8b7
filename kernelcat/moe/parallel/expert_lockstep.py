"""An engine of one rank whose experts are divided among ranks: all ranks take each step together.

Every rank has requests of its own. Before a step the hosts agree on its size, the largest that a
rank needs, so that all run kernels and graphs of the same shapes; a rank without requests runs a
step of added tokens. They agree while the step before runs on the device, so the device waits for
no host. When no rank has work all of them sleep, until a message wakes them all.

Now and then the ranks compare what their experts have served. Where that is uneven, experts change
places, the weights of one layer before a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from kernelcat.errors import KernelcatError, RankFailed
from kernelcat.moe.engine.engine import Decode, Engine, Planned, RequestOutput
from kernelcat.moe.engine.request import FinishReason, describe
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.step_sizes import Size
from kernelcat.moe.model import Decoder
from kernelcat.moe.parallel.exchange import ANSWER_S, Exchange
from kernelcat.moe.parallel.expert_load import ExpertLoad
from kernelcat.moe.parallel.expert_moves import ExpertMoves
from kernelcat.moe.parallel.expert_placement import Counts, evened
from kernelcat.moe.parallel.expert_statistics import ExpertStatistics
from kernelcat.moe.profile import (
    StepProfile,
    profile_of,
    recorded,
    take_step,
    take_steps,
    writing,
)

LAYERS_A_PAUSE = 4
"""Layers whose experts move between two steps, at most."""


class LockstepEngine(Engine):
    """An engine that takes each step together with those of the other ranks.

    Parameters
    ----------
    model : with the experts of ``load``'s share (`expert_model`)
    exchange : the model's
    load : counts of the model's experts
    rebalance_every : steps after which experts may change places; 0 for never

    A rank that fails, hangs or ends is an error of all requests on every other rank.
    """

    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings,
        decode: Decode | None,
        exchange: Exchange,
        load: ExpertLoad,
        rebalance_every: int = 0,
    ) -> None:
        self._move_experts = ExpertMoves(exchange, load.layers[0]) if rebalance_every else None
        super().__init__(model, settings, decode)
        self._exchange, self._load, self._every = exchange, load, rebalance_every
        self._wakes = self._slept_after = 0
        self._num_steps = self._compared_at = 0  # of all ranks
        self._before: Counts = np.zeros(0)
        self._moves: deque[tuple[int, Counts]] = deque()
        self._num_moved = 0

    def wake(self) -> None:
        """A rank has got a request. Every rank is told of each, in any order."""
        with self._lock:
            self._wakes += 1

    @property
    def has_work(self) -> bool:
        """Whether this rank must take part in a step."""
        return super().has_work or self._wakes != self._slept_after

    def step(self) -> list[RequestOutput]:
        """As `Engine.step`; all requests end if a rank has failed."""
        outputs: list[RequestOutput] = []
        try:
            if self._moves:
                while self._runs:
                    outputs += self._collect()
                for _ in range(min(LAYERS_A_PAUSE, len(self._moves))):
                    if self.is_healthy:
                        self._move()
            return outputs + super().step()
        except RankFailed as error:
            return outputs + self._fail(error)

    def _plan(self) -> Planned | None:
        step = self._scheduler.schedule()
        is_idle = step is None and not super().has_work
        wakes, wanted = self._wakes, None if step is None else Size.of(step)
        answers = self._exchange.gather(
            {"size": wanted, "idle": is_idle, "wakes": wakes, "load": self._compared()}, ANSWER_S
        )
        if None in answers:  # what a rank says that leaves
            raise RankFailed(f"rank {answers.index(None)} has ended")
        self._compare([answer["load"] for answer in answers])
        sizes = [Size(*answer["size"]) for answer in answers if answer["size"]]
        if not sizes:
            if all(answer["idle"] and answer["wakes"] == wakes for answer in answers):
                self._slept_after = wakes
            return None
        self._num_steps += 1
        if step is None:
            step = self._scheduler.schedule_nothing()
        return Planned(step, self._runner.sizes.padded(Size.largest(sizes)))

    def _fail(self, error: Exception) -> list[RequestOutput]:
        """Ends all requests: the others cannot take a step without this rank."""
        message = str(error) if isinstance(error, RankFailed) else describe(error)
        if not isinstance(error, RankFailed):
            self._exchange.fail(message)
        return self._end_all(FinishReason.ERROR, message)

    # ---- recorded steps -------------------------------------------------------------------------

    def profile(
        self, prompts: Sequence[Sequence[int]], batch: int, trace: Path, num_steps: int
    ) -> StepProfile | None:
        """Records ``num_steps`` steps of rank 0 in which all ranks write on.

        All ranks call this together, while none has work. They take the same number of steps, and
        wait for each other before and after those that are recorded: the profiler takes long to
        start and to stop.

        Parameters
        ----------
        prompts : of this rank, of equal length; rank 0 has one at least
        batch : prompts of all ranks
        trace : the file that rank 0 writes; its name may end in .gz

        Returns
        -------
        The summary on rank 0, None on the others.

        Raises
        ------
        KernelcatError
            A rank has ended, a request has failed or is refused, or the engine's context is so
            short that one has ended. The engines of all ranks have ended then, with this reason.
        """
        is_recorded = self._exchange.rank == 0
        self.wake()
        try:
            with writing(self, prompts) as requests:
                while not all(
                    self._exchange.gather(all(r.num_written for r in requests), ANSWER_S)
                ):
                    take_step(self)
                with recorded(self) if is_recorded else nullcontext() as profiler:
                    self._exchange.gather(None)
                    seconds = take_steps(self, num_steps)
                self._exchange.gather(None)
            while self.has_work:
                self.step()
                if not self.is_healthy:
                    raise RankFailed(self.failure)
        except KernelcatError as error:
            reason = self.failure or str(error)
            self._exchange.fail(reason)
            self._end_all(FinishReason.ERROR, reason)
            raise
        if profiler is None:
            return None
        profiler.export_chrome_trace(str(trace))
        return profile_of(self, requests, batch, trace, num_steps, seconds)

    # ---- experts that change places -------------------------------------------------------------

    def _compared(self) -> list[list[int]] | None:
        """What the rank's places have served since the last comparison, if it is time for one."""
        is_early = self._num_steps < self._compared_at + self._every
        if not self._every or self._moves or is_early:
            return None
        self._compared_at = self._num_steps
        served = self._load.by_place()
        recent = served - self._before if self._before.size else served
        self._before = served
        return recent.tolist()

    def _compare(self, loads: list[list[list[int]] | None]) -> None:
        """Finds the experts that shall change places, from what all ranks' places have served."""
        told = [np.array(load) for load in loads if load is not None]
        if len(told) == self._exchange.ranks:
            for layer, load in enumerate(np.concatenate(told, axis=1)):
                sources = evened(load, self._exchange.ranks)
                if (sources != np.arange(len(sources))).any():
                    self._moves.append((layer, sources))

    def _move(self) -> None:
        """Moves the experts of one layer; no step is in flight, on no rank."""
        assert self._move_experts is not None
        layer, sources = self._moves.popleft()
        self._runner.synchronize_device()
        self._move_experts(self._load.layers[layer], sources)
        with self._lock:
            self._num_moved += self._load.place(layer, sources)
        self._before[layer] = 0
        self._runner.synchronize_device()

    def statistics(self) -> ExpertStatistics:
        """Numbers at this moment, with those of the experts that this rank has."""
        with self._lock:
            served = self._load.by_expert()
        return ExpertStatistics.of(super().statistics(), served.tolist(), self._num_moved)

    def close(self) -> list[RequestOutput]:
        """As `Engine.close`; leaves the other ranks."""
        outputs = super().close()
        self._exchange.close()
        return outputs
