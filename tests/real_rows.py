"""The shipped rows, read once, and a machine without a GPU on which calls choose from rows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from kernelcat.store import Measurement, shipped

SHIPPED = list(shipped())
NEWEST = max(row.created_at for row in SHIPPED)


def hours_later(hours: float) -> str:
    """A time after that of every shipped row."""
    return (datetime.fromisoformat(NEWEST) + timedelta(hours=hours)).isoformat()


LOCAL = {"run": "local", "created_at": hours_later(1)}
"""What a row has that this machine measured."""


def raced(entry: str, problem_name: str) -> tuple[Measurement, ...]:
    """The rows of the catalog's candidates in the sustained race of a problem, in graphs."""
    wanted = (entry, problem_name, "graph", "sustained", False)
    return tuple(
        row
        for row in SHIPPED
        if (row.entry, row.problem_name, row.regime, row.state, row.is_peer) == wanted
    )


class Machine:
    """An H200 without a driver: programs are made, and neither compiled nor launched."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, dict[str, Any]]] = []
        self.broken: Callable[[str, Any], Exception | None] = lambda name, config: None

    def load(self, implementation, problem, config, target, device, zeros=None):
        assert all(step.grid for step in implementation.program(problem, config, target).steps)
        error = self.broken(implementation.name, config)
        if error is not None:
            raise error
        self.loads.append((implementation.name, dict(config)))
        return object()
