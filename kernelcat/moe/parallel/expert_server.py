"""The process of one of the ranks that divide experts: `EngineServer` with what lockstep adds."""

from __future__ import annotations

from typing import Any

from kernelcat.errors import KernelcatError
from kernelcat.moe.parallel.expert_lockstep import LockstepEngine
from kernelcat.moe.serve.engine_child import EngineServer
from kernelcat.moe.serve.engine_messages import Profile, ToEngine


class ExpertServer(EngineServer):
    """A rank's engine behind a pipe, which wakes with the others and may record its steps."""

    _engine: LockstepEngine

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: Profile | None = None

    @property
    def has_work(self) -> bool:
        return self._asked is not None or super().has_work

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Profile):
            self._asked = message
            return super()._notify()  # the engine sleeps on: all ranks begin after the same step
        return super().take(message)

    def step(self) -> None:
        if self._asked is None or self._engine.has_work:
            return super().step()
        asked, self._asked = self._asked, None
        try:
            profile = self._engine.profile(asked.prompts, asked.batch, asked.trace, asked.num_steps)
        except KernelcatError:  # the engine has ended, and `run` says why
            return None
        return None if profile is None else self._send(profile)

    def _notify(self) -> None:
        self._engine.wake()
        super()._notify()
