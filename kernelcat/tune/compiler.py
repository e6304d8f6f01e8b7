"""A compiling process: ``python -m kernelcat.tune.compiler BACKEND``.

The process compiles candidates into the disk cache. The measuring process loads them from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelcat.tune import backend as backends
from kernelcat.tune.channel import Server
from kernelcat.tune.failure import failure
from kernelcat.tune.messages import Build, Built, Failed


class Compiler:
    """The child's side of a :class:`~kernelcat.tune.pool.CompilePool`."""

    def __init__(self, spec: str) -> None:
        self.backend = backends.load(spec)

    def answer(self, request: Build) -> Built | Failed:
        """The metadata of the artifacts, or why the candidate does not compile."""
        try:
            return self.build(request)
        except Exception as error:
            failed = failure(error)
        # This process launches nothing, so every exception is a failure to compile.
        return (
            replace(failed, status="compile_error") if failed.status == "launch_error" else failed
        )

    def build(self, request: Build) -> Built:
        candidate, problem = request.candidate, request.problem
        owner = (candidate.language, candidate.variant)
        for implementation in self.backend.implementations(problem.entry):
            if (implementation.language, implementation.variant) == owner:
                before = _cpu_s()
                steps = self.backend.build(implementation, problem, candidate.config, request.gpu)
                return Built(tuple(map(numbers, steps)), _cpu_s() - before)
        raise LookupError(f"{candidate} is not in the catalog")


def _cpu_s() -> float:
    """Seconds of a core that this process took, and its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def numbers(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The numeric fields of an artifact's metadata; the tuner needs no others."""
    return {k: v for k, v in metadata.items() if isinstance(v, (int, float))}


def main() -> None:
    server = Server()
    server.serve(Compiler(sys.argv[1]).answer)


if __name__ == "__main__":
    main()
