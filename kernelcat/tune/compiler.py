"""A compiling process: ``python -m kernelcat.tune.compiler BACKEND``.

The process builds what it is asked for into the shared disk cache, where the measuring process
finds it.
"""

from __future__ import annotations

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
        """The artifacts' metadata, or why the candidate does not compile."""
        try:
            return self.build(request)
        except Exception as error:
            failed = failure(error)
        # Nothing is launched here: whatever a compiler raises is an error of compiling.
        return (
            replace(failed, status="compile_error") if failed.status == "launch_error" else failed
        )

    def build(self, request: Build) -> Built:
        candidate, problem = request.candidate, request.problem
        owner = (candidate.language, candidate.variant)
        for implementation in self.backend.implementations(problem.entry):
            if (implementation.language, implementation.variant) == owner:
                steps = self.backend.build(implementation, problem, candidate.config, request.gpu)
                return Built(tuple(map(numbers, steps)))
        raise LookupError(f"{candidate} is not in the catalog")


def numbers(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an artifact's metadata: all that the tuner looks at."""
    return {k: v for k, v in metadata.items() if isinstance(v, (int, float))}


def main() -> None:
    server = Server()
    server.serve(Compiler(sys.argv[1]).answer)


if __name__ == "__main__":
    main()
