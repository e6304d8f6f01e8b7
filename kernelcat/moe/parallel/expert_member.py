"""One of the ranks that divide the experts of a model: how its process opens the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kernelcat.errors import KernelcatError
from kernelcat.moe.engine.engine import Decode
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.parallel.expert_lockstep import LockstepEngine
from kernelcat.moe.parallel.expert_model import divide
from kernelcat.moe.source import ModelSource


@dataclass(frozen=True)
class ExpertMember:
    """Rank ``rank`` of ``ranks`` processes, which meet at the socket ``path``.

    ``rebalance_every`` is the number of steps after which experts may change places, 0 for never.
    """

    rank: int
    ranks: int
    path: Path
    rebalance_every: int = 0

    def engine(
        self, source: ModelSource, settings: EngineSettings, decode: Decode
    ) -> LockstepEngine:
        """The rank's engine; all ranks open theirs together.

        Raises
        ------
        RankFailed
            Another rank has failed or ended.
        KernelcatError
            This rank has failed; see `ModelSource.open` and `Engine`.
        """
        exchange = source.join(self.rank, self.path, ranks=self.ranks)
        try:
            model = source.share(exchange)
            load = divide(model, exchange, can_move=bool(self.rebalance_every))
            return LockstepEngine(
                model, replace(settings, is_lockstep=True), decode, exchange, load,
                self.rebalance_every,
            )  # fmt: skip
        except KernelcatError as error:
            exchange.fail(str(error))
            raise
