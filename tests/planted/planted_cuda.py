"""The planted failures as real CUDA kernels, beside the entry ``tma_copy`` and its peer.

Loaded by the tuner's processes as the backend ``planted_cuda:Backend``.
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
"""Configuration -> what it must be recorded as."""


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
    summary="Everything that can go wrong.",
    archs=("sm_80+",),
    space={"kind": tuple(STATUS)},
    illegal=lambda config, problem, gpu: None,
    default=lambda problem, gpu: Config(kind="kGood"),
    program=_program,
    estimate=lambda problem, config, gpu: 1.0,
)


class Backend(Cuda):
    """The CUDA backend with the planted implementation alone."""

    def implementations(self, name):
        return (PLANTED,)

    def digest(self, implementation):
        return "planted"
