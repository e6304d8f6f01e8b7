"""Stand-ins for a GPU and its kernels, for the calls of `test_dispatch.py`.

CPU tensors are described as tensors on ``cuda:0``. The launcher computes the product on the CPU,
from the addresses in its arguments.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kernelcat import catalog, store
from kernelcat.bounded import Bounded
from kernelcat.call import adapters, arrays, evidence, fast_path, operator, registry
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.errors import MissingDependency
from kernelcat.runtime import driver, gpu, launcher
from kernelcat.store import Choice, Measurement, calibration

torch = pytest.importorskip("torch")

STREAM = 77


class HostTorch(arrays.Torch):
    """CPU tensors, described as tensors on ``cuda:0``."""

    def describe(self, array):
        return dataclasses.replace(super().describe(array), device="cuda:0")

    def allocator(self, shape, dtype, device):
        return lambda: torch.full(shape, float("nan"), dtype=getattr(torch, dtype))

    def stream(self):
        return lambda device: STREAM


def view(pointer: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A float16 tensor of ``shape`` that shares the memory at the address ``pointer``."""
    count = int(np.prod(shape))
    if not count:
        return torch.empty(shape, dtype=torch.float16)
    raw = (ctypes.c_uint16 * count).from_address(pointer)
    return torch.from_numpy(np.frombuffer(raw, np.uint16)).view(torch.float16).view(shape)


class HostLauncher:
    """A ``launcher.Launcher`` for gemm in host memory; records its calls in ``host.launches``."""

    tensors = ("a", "b", "bias", "residual", "d")

    def __init__(self, host: Host, problem, name: str, config) -> None:
        self.host, self.problem, self.name, self.config = host, problem, name, config

    def __call__(self, pointers, stream: int) -> None:
        m, n, k = (self.problem[axis] for axis in "MNK")
        a, b, bias, residual, d = pointers
        assert type(pointers) is tuple and (bias != 0) == self.problem["bias"]
        assert residual == 0
        assert all(pointer % 16 == 0 for pointer in pointers)
        product = view(a, (m, k)).float() @ view(b, (n, k)).float().t()
        view(d, (m, n)).copy_(product + view(bias, (n,)) if bias else product)
        self.host.launches.append((self.name, stream))

    def clone(self) -> HostLauncher:
        self.host.clones += 1
        return HostLauncher(self.host, self.problem, self.name, self.config)


class Rows:
    """A snapshot of the database that never changes."""

    def __init__(self, rows: tuple[Choice, ...], wrong: tuple[Measurement, ...] = ()) -> None:
        self.rows, self.wrong = rows, wrong

    def choices(self, entry: str) -> tuple[Choice, ...]:
        return self.rows

    def refuted(self, entry: str) -> tuple[Measurement, ...]:
        return self.wrong


class Host:
    """The stand-in machine: records loads, launches and clones."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int]] = []
        self.loads: list[tuple[str, Config]] = []
        self.clones = 0
        self.rows: tuple[Choice, ...] = ()
        self.uninstalled: set[str] = set()
        self.capturing = False

    def is_capturing(self, stream: int) -> bool:
        """As the driver's."""
        return self.capturing

    def capture_query(self) -> driver.CaptureQuery:
        """As the driver's."""

        def query(stream: Any, status: Any) -> int:
            status._obj.value = self.capturing
            return 0

        return driver.CaptureQuery(query)

    def load(self, implementation, problem, config, where, device):
        if implementation.language in self.uninstalled:
            raise MissingDependency(f"{implementation.language} needs x: pip install x")
        assert (where.sku, device) == ("h200", 0)
        self.loads.append((implementation.name, config))
        return HostLauncher(self, problem, implementation.name, config)


def kernel(language: str, variant: str, rank: int, **more) -> Implementation:
    """An implementation of gemm; ``more`` replaces fields."""
    facts = {
        "archs": ("sm_80+",),
        "space": {"tile": (16, 64)},
        "illegal": lambda config, problem, where: None,
        "default": lambda problem, where: Config(tile=16),
        "program": lambda problem, config, where: None,
        "estimate": lambda problem, config, where: 1.0,
    }
    return Implementation("gemm", language, variant, "", rank=rank, **{**facts, **more})


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, library: HostTorch | None = None) -> Iterator[Host]:
    """Replaces the GPU, torch's tensors, gemm's kernels and the database; the host machine."""
    host, plain = Host(), library or HostTorch()
    kernels = {
        "cuda": (kernel("cuda", "tiled", 2),),
        "triton": (kernel("triton", "tiled", 1),),
        "cute": (kernel("cute", "new", 0, unverified="never ran"),),
    }
    for module in (catalog, catalog.discovery):
        monkeypatch.setattr(module, "in_language", lambda name, language: kernels[language])
        monkeypatch.setattr(module, "languages", lambda name: tuple(kernels))
    for name in ("models", "lent"):  # the shipped ones are of other kernels
        monkeypatch.setattr(calibration, name, lambda sku: {})
    monkeypatch.setattr(arrays, "torch", lambda: plain)
    monkeypatch.setattr(launcher, "load", lambda *facts, device, zeros: host.load(*facts, device))
    monkeypatch.setattr(driver, "opened", lambda: host)
    monkeypatch.setattr(operator, "_gpu", lambda index: gpu.SKUS["h200"])
    monkeypatch.setattr(store, "snapshot", lambda: Rows(host.rows))
    monkeypatch.setattr(registry, "_ops", {})
    monkeypatch.setattr(operator, "_scans", {})
    monkeypatch.setattr(adapters, "_warned", set())
    monkeypatch.setattr(fast_path, "_missed", Bounded(4096))
    evidence.snapshot.cache_clear()
    yield host
    evidence.snapshot.cache_clear()


def half(*shape: int, offset: int = 0) -> torch.Tensor:
    """Random float16 values at an address ``offset`` elements after a multiple of 16 bytes."""
    count = int(np.prod(shape))
    base = torch.randn(count + 16).half()
    start = (-base.data_ptr() // 2) % 8 + offset
    return base[start : start + count].view(shape)


def choice(m: int, variant: str = "triton/tiled", tile: int = 64, **more) -> Choice:
    problem = catalog.entry("gemm").problem(M=m, N=6, K=8, dtype="float16", bias=False)
    language, _, variant = variant.partition("/")
    facts = {"gpu": "h200", "kind": "measured", "median_us": 1.0, "source": "", "run": "r",
             "origin": "local", **more}  # fmt: skip
    owner = {"language": language, "variant": variant, "config": Config(tile=tile)}
    return Choice("gemm", problem=problem, **owner, **facts)
