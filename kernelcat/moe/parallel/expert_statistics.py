"""Numbers of engines whose experts are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kernelcat.moe.engine.statistics import Statistics

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ExpertStatistics(Statistics):
    """Numbers of one rank, or of all ranks together.

    Attributes
    ----------
    expert_assignments_total : for each layer with experts, how many assignments of tokens each
        expert has served
    rank_assignments_total : for each such layer, how many the experts of each rank have served
    moved_experts_total : experts that came to another place
    """

    expert_assignments_total: Table = ()
    rank_assignments_total: Table = ()
    moved_experts_total: int = 0

    @staticmethod
    def of(engine: Statistics, served: Sequence[Sequence[int]], num_moved: int) -> ExpertStatistics:
        """Those of one rank, whose experts have ``served`` (layers, experts)."""
        experts = tuple(map(tuple, served))
        sums = tuple((sum(row),) for row in experts)
        return ExpertStatistics(
            **asdict(engine),
            expert_assignments_total=experts,
            rank_assignments_total=sums,
            moved_experts_total=num_moved,
        )

    @staticmethod
    def together(parts: Sequence[Statistics]) -> ExpertStatistics:
        """The sums over ranks, of which each part is one's `ExpertStatistics`."""
        each = [asdict(part) for part in parts]
        columns = zip(*(part.pop("rank_assignments_total") for part in each), strict=True)
        experts = np.sum([part.pop("expert_assignments_total") for part in each], axis=0)
        counts: dict[str, Any] = {name: sum(part[name] for part in each) for name in each[0]}
        return ExpertStatistics(
            **counts,
            expert_assignments_total=tuple(map(tuple, experts.tolist())),
            rank_assignments_total=tuple(sum(column, ()) for column in columns),
        )

    @property
    def summary(self) -> str:
        """How even the work of ranks and experts was.

        Ranks wait for each other in every layer, so the busiest of each layer counts.
        """
        ranks, experts = (
            np.array(table)
            for table in (self.rank_assignments_total, self.expert_assignments_total)
        )
        if not ranks.any():
            return ""
        busiest, hottest = (table.max(1).sum() / table.mean(1).sum() for table in (ranks, experts))
        return (
            f"the busiest rank of a layer served {busiest:.2f} times the mean, the busiest expert "
            f"{hottest:.2f} times; {self.moved_experts_total} experts have moved"
        )
