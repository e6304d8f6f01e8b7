"""nvMatmulHeuristics as a peer of gemm's cost models: the same races judge both.

The package has NVIDIA's model of matrix products. It is asked for the time of a kernel of CUTLASS
with the tile, cluster and splits of a configuration of ours. Source: NVIDIA, nvMatmulHeuristics
(https://docs.nvidia.com/cuda/nvidia-matmul-heuristics/).
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_int
from dataclasses import dataclass
from importlib.util import find_spec

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem

MODULE = "nvMatmulHeuristics"
GPUS = {
    "h100": "H100_SXM", "h100-pcie": "H100_PCIE", "h100-nvl": "H100_NVL", "h200": "H200_SXM",
    "b200": "B200", "gb200": "GB200_NVL",
}  # fmt: skip
"""SKU -> the package's name of the GPU."""
PRECISIONS = {"bfloat16": "TST", "float16": "HSH"}
"""Element type -> operands, sums and result in the package's letters; sums are float32."""
KERNELS = ("cuda/wgmma", "cute/wgmma", "triton/tma", "triton/persistent", "triton/gluon")
"""Implementations of gemm that are what the package models: TMA, wgmma, tiles of the result."""
WARPGROUP_ROWS, WGMMA_K = 64, 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a kernel: rows, columns and depth of a tile, blocks of a cluster along rows and
    columns, and splits of K."""

    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    splits: int = 1

    @staticmethod
    def of(config: Config) -> Shape:
        """The shape of a configuration of one of :data:`KERNELS`."""
        if "tile" in config:
            sizes = [int(size) for size in str(config["tile"]).split("x")]
        else:
            sizes = [int(config["block_m"]), int(config["block_n"])]
        m, n, k = (*sizes, 64)[:3]
        rows, cols = map(int, str(config.get("cluster", "1x1")).split("x"))
        if config.get("swap"):
            m, n, rows, cols = n, m, cols, rows
        return Shape((m, n, k), (rows, cols), int(config.get("split_k", 1)))


class Model:
    """The package's estimates for the GPU ``sku``.

    Raises ``KeyError`` for a SKU that is not in :data:`GPUS`.
    """

    def __init__(self, sku: str) -> None:
        import nvMatmulHeuristics as package

        self.package = package
        self.heuristics = package.NvMatmulHeuristicsInterfaceEx(
            backend=package.NvMatmulHeuristicsTarget.CUTLASS3,
            flags=package.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=package.NvMatmulHeuristicsNvidiaGpu[GPUS[sku]],
        )

    def us(self, problem: Problem, shape: Shape) -> float:
        """Microseconds of ``problem``, a problem of gemm, by a kernel of ``shape``."""
        layout = self.package.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
        sizes = self.heuristics.makeNvMatmulHeuristicsProblem(
            problem["M"], problem["N"], problem["K"], layout
        )
        precision = PRECISIONS[str(problem["dtype"])]
        # The first call for a layout and a precision loads what the estimate interpolates.
        first = self.heuristics.get(sizes, 1, precision=precision)[0]
        kernel = first["nvmmhKernelConfiguration"]
        m, n, k = shape.tile
        kernel.cta[:], kernel.warp[:] = (m, n, k), (WARPGROUP_ROWS, n, k)
        kernel.instr[:] = (WARPGROUP_ROWS, n, WGMMA_K)
        kernel.cluster[:], kernel.splitK = shape.cluster, shape.splits
        seconds: float = self.heuristics.nvMatmulHeuristicsEstimateRuntime(
            self.heuristics.handle, precision.encode("ascii"), c_int(self.heuristics.target),
            byref(sizes), byref(kernel), self.heuristics.hardware_descriptor,
        )  # fmt: skip
        return seconds * 1e6

    def estimate(self, problem: Problem, name: str, config: Config) -> float:
        """Microseconds of ``problem`` by a configuration of the implementation ``name``."""
        return self.us(problem, Shape.of(config))


def can_judge(entry: str, sku: str) -> bool:
    """Whether the package is installed and knows products on the GPU ``sku``."""
    return entry == "gemm" and sku in GPUS and find_spec(MODULE) is not None


def modelled(
    measured: Mapping[Problem, Mapping[tuple[str, Config], float]],
) -> dict[Problem, dict[tuple[str, Config], float]]:
    """The races ``measured`` of gemm with those contestants alone that the package can describe."""
    return {
        problem: {
            (name, config): us
            for (name, config), us in times.items()
            if name.partition("/")[2] in KERNELS
        }
        for problem, times in measured.items()
        if str(problem["dtype"]) in PRECISIONS
    }
