"""Ranks of expert parallelism as threads of one process, which exchange by the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_models import PAGE

from kernelcat import moe
from kernelcat.errors import KernelcatError
from kernelcat.moe.engine.engine import RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.parallel.expert_lockstep import LockstepEngine
from kernelcat.moe.parallel.expert_model import divide
from kernelcat.moe.parallel.host_exchange import HostExchange
from kernelcat.moe.weights import ExpertShare

LIMITS = {"step_tokens": 64, "max_running": 8, "context": 160}


@dataclass
class Ranks:
    """Engines that take every step together; ``outputs`` is what each has returned."""

    engines: list[LockstepEngine]
    outputs: list[RequestOutput] = field(default_factory=list)

    @staticmethod
    def opened(
        path: Path, folder: Path, ranks: int = 2, rebalance_every: int = 0, **settings: Any
    ) -> Ranks:
        """Engines of the checkpoint ``path``, which meet in ``folder``."""
        engines: list[Any] = [None] * ranks

        def open_one(rank: int) -> None:
            exchange = HostExchange(rank, ranks, folder / "ranks")
            model = moe.load(path, "cpu", share=ExpertShare(rank, ranks))
            load = divide(model, exchange, bool(rebalance_every))
            pages = (60,) * len(moe.windows(model.cache_layers))
            fields: dict[str, Any] = {"page_size": PAGE, "num_pages": pages, "is_lockstep": True}
            fields |= {"limits": Limits(**LIMITS), **settings}
            engines[rank] = LockstepEngine(
                model, EngineSettings(**fields), None, exchange, load, rebalance_every
            )

        together([lambda rank=rank: open_one(rank) for rank in range(ranks)])
        return Ranks(engines)

    def submit(self, rank: int, prompt: Sequence[int], **asked: Any) -> Request:
        """A request of one rank, of which all hear."""
        parameters = SamplingParameters(**{"temperature": 0.0, **asked})
        request = self.engines[rank].submit(prompt, parameters)
        for engine in self.engines:
            engine.wake()
        return request

    def run(self) -> None:
        """Takes steps until all ranks sleep; pages and queues must agree after each."""

        def steps(engine: LockstepEngine) -> None:
            while engine.has_work and engine.is_healthy:
                self.outputs += engine.step()
                engine.check_integrity()

        together([lambda engine=engine: steps(engine) for engine in self.engines])

    def write(self, ranks: Sequence[int], prompts: Sequence[Sequence[int]], **asked: Any) -> Any:
        """The prompts with what follows them; prompt i is a request of ``ranks[i]``."""
        requests = [
            self.submit(rank, prompt, **asked) for rank, prompt in zip(ranks, prompts, strict=True)
        ]
        self.run()
        assert not [output.error for output in self.outputs if output.error]
        return [request.tokens for request in requests]


def together(functions: Sequence[Callable[[], None]]) -> None:
    """Runs all functions at a time; raises the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except (KernelcatError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
