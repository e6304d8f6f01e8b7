"""Plans: the choice for one problem, made and built ahead of calls."""

from __future__ import annotations

from typing import Any, Protocol

from kernelcat.call.choice import Decision
from kernelcat.call.fast_path import Bound
from kernelcat.catalog.spec import Problem


class _Operator(Protocol):
    """The operator of a plan, which serves one problem only."""

    def _load(self, problem: Problem, device: int) -> tuple[Decision, Any]: ...

    def bind(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Bound: ...

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any: ...


class Plan:
    """A problem whose implementation is chosen and built; call it with arrays of that problem."""

    def __init__(self, op: _Operator, problem: Problem, device: int) -> None:
        self._op = op
        self.problem = problem
        self.device = device
        self.decision, _ = self._op._load(problem, device)

    def __repr__(self) -> str:
        chosen = self.decision
        return f"<kernelcat.Plan {self.problem}: {chosen.implementation.name} {chosen.config}>"

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        return self._op(*args, out=out, **named)

    def bind(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Bound:
        """:meth:`Op.bind` with this plan's choice."""
        return self._op.bind(*args, out=out, stream=stream, **named)
