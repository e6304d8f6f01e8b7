"""A backend with CUDA kernels that fail on purpose, as an implementation of ``tma_copy``.

The processes of a tune load it by its name, ``planted_cuda:Backend``.
"""

from __future__ import annotations

from pathlib import Path

from kernelcat.catalog.implementation import Config, Implementation, Int64, Pointer, Program, Step
from kernelcat.jit.cuda import CudaSource
from kernelcat.tune.backend import Cuda

SOURCE = str(Path(__file__).resolve().with_name("planted.cu"))
STATUS = {
    "kGood": "passed",
    "kSlow": "passed",
    "kHangs": "timeout",
    "kOverruns": "wrong",
    "kLies": "wrong",
    "kIllegal": "crashed",
    "refused": "compile_error",
    "too_many_threads": "launch_error",
}
"""Configuration -> the status that must be recorded."""


def _program(problem, config, gpu):
    kind = config["kind"]
    kernel = f"planted::copy<planted::{kind if kind.startswith('k') else 'kGood'}>"
    definitions = (("REFUSED", 1),) if kind == "refused" else ()
    params = (Pointer("src"), Pointer("dst"), Int64(problem["rows"] * problem["cols"]))
    block = 4096 if kind == "too_many_threads" else 256
    return Program((Step(CudaSource(SOURCE, kernel, definitions), (264, 1, 1), params, block),))


PLANTED = Implementation(
    entry="tma_copy",
    language="cuda",
    variant="planted",
    summary="A copy that fails in every known way.",
    archs=("sm_80+",),
    space={"kind": tuple(STATUS)},
    illegal=lambda config, problem, gpu: None,
    default=lambda problem, gpu: Config(kind="kGood"),
    program=_program,
    estimate=lambda problem, config, gpu: 1.0,
)


class Backend(Cuda):
    """The CUDA backend with the planted implementation only."""

    def implementations(self, name):
        return (PLANTED,)

    def digest(self, implementation):
        return "planted"
