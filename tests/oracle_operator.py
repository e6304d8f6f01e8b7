"""The oracle in the place of an operator, for models and examples that run on a CPU."""

from __future__ import annotations

from typing import Any

from kernelcat import catalog
from kernelcat.call.oracle import Oracle


class OracleOperator(Oracle):
    """An oracle that can be bound like an operator of ``kernelcat.get``."""

    def __init__(self, name: str) -> None:
        super().__init__(catalog.entry(name))

    def bind(self, *arrays: Any, **named: Any) -> Any:
        """A function without arguments that leaves its results in its attribute ``out``."""

        def run() -> None:
            run.out = self(*arrays, **named)

        return run
