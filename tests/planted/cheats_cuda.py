"""A backend with CUDA kernels that cheat, as an implementation of ``tma_copy``.

The processes of a tune load it by its name, ``cheats_cuda:Backend``.
"""

from __future__ import annotations

from pathlib import Path

from kernelcat.catalog.implementation import Config, Implementation, Int64, Pointer, Program, Step
from kernelcat.jit.cuda import CudaSource
from kernelcat.runtime.device import CudaDevice
from kernelcat.tune.backend import Cuda

SOURCE = str(Path(__file__).resolve().with_name("cheats.cu"))
OTHER_STREAM = "other_stream"
CHEATS = ("kAddress", "kPoison", "kBurst", "kTires", "kWritesFF", "kRestores", OTHER_STREAM)


def _program(problem, config, gpu):
    kind = "kHonest" if config["kind"] == OTHER_STREAM else config["kind"]
    params = (Pointer("src"), Pointer("dst"), Int64(problem["rows"] * problem["cols"]))
    source = CudaSource(SOURCE, f"planted::cheat<planted::{kind}>", ())
    return Program((Step(source, (264, 1, 1), params, 256),))


IMPLEMENTATION = Implementation(
    entry="tma_copy",
    language="cuda",
    variant="cheats",
    summary="Copies that are right in their first runs.",
    archs=("sm_80+",),
    space={"kind": ("kHonest", *CHEATS)},
    illegal=lambda config, problem, gpu: None,
    default=lambda problem, gpu: Config(kind="kHonest"),
    program=_program,
    estimate=lambda problem, config, gpu: 1.0,
)


class Device(CudaDevice):
    """Launches the kind ``other_stream`` on a stream that no timer sees."""

    def load(self, implementation, problem, config):
        bind = super().load(implementation, problem, config)
        if config["kind"] != OTHER_STREAM:
            return bind
        other = self.xp.cuda.Stream(non_blocking=True)

        def bind_to_other(arrays):
            run = bind(arrays)

            def run_on_other():
                with other:
                    run()

            return run_on_other

        return bind_to_other


class Backend(Cuda):
    """The CUDA backend with the cheating implementation only."""

    def implementations(self, name):
        return (IMPLEMENTATION,)

    def digest(self, implementation):
        return "cheats"

    def device(self, index):
        super().device(index)  # makes this GPU the only visible one
        return Device(0)
