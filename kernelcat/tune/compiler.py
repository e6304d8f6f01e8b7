"""A compiling process: ``python -m kernelcat.tune.compiler BACKEND``.

It builds what it is asked for into the shared disk cache, where the worker finds it.
"""

from __future__ import annotations

import sys
from typing import Any

from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune import backend as backends
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Message, Server
from kernelcat.tune.failure import failure


class Compiler:
    """The child's side."""

    def __init__(self, spec: str) -> None:
        self.backend = backends.load(spec)

    def handle(self, request: Message) -> Message:
        try:
            problem = Problem.of(request["entry"], **request["axes"])
            steps = self.build(problem, request["lane"], Gpu(**request["gpu"]))
            return {"status": "passed", "steps": steps}
        except Exception as error:
            reply = failure(error)
            status = "compile_error" if reply["status"] == "launch_error" else reply["status"]
            return {**reply, "status": status}

    def build(self, problem: Problem, lane: str, gpu: Gpu) -> list[Any]:
        candidate = Candidate.parse(lane)
        owner = (candidate.language, candidate.variant)
        for implementation in self.backend.implementations(problem.entry):
            if (implementation.language, implementation.variant) == owner:
                built = self.backend.build(implementation, problem, candidate.config, gpu)
                return [plain(step) for step in built]
        raise LookupError(f"{candidate} is not in the catalog")


def plain(metadata: Any) -> dict[str, Any]:
    """The numbers of an artifact's metadata: all that pruning looks at."""
    return {k: v for k, v in metadata.items() if isinstance(v, (int, float))}


def main() -> None:
    server = Server()
    server.serve(Compiler(sys.argv[1]).handle)


if __name__ == "__main__":
    main()
