"""A catalog of GPU kernels: ``kernelcat.get("gemm")`` finds the fastest one for your GPU.

>>> import kernelcat
>>> gemm = kernelcat.get("gemm")
>>> d = gemm(a, b)              # a (M, K), b (N, K): torch, CuPy or any DLPack array on a GPU
>>> print(gemm.explain(a, b))   # which implementation and configuration, and why
>>> d = kernelcat.reference("gemm")(a.cpu(), b.cpu())  # the definition, on a CPU

``import kernelcat`` imports no array library and no compiler; the first call imports both.

Subpackages: ``catalog`` (specifications and implementations), ``call`` (calls of operators),
``runtime`` (GPUs, driver, launches), ``jit`` (compilers), ``verify`` (proof that kernels are
right), ``bench`` and ``tune`` (measurement and search), ``store`` (the database of results),
``report`` (tables and explanations for people), ``layers`` (the parts of a model around kernels),
``moe`` (models that are built from entries) and ``cli`` (the command line).
"""

from __future__ import annotations

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing typing would take 20 ms
if TYPE_CHECKING:
    from kernelcat.call.debugging import debug
    from kernelcat.call.locking import use_lock
    from kernelcat.call.oracle import reference
    from kernelcat.call.recording import record
    from kernelcat.call.registry import entries, reload
    from kernelcat.call.typed import get
    from kernelcat.catalog.implementation import Config
    from kernelcat.catalog.spec import Problem
    from kernelcat.errors import KernelcatError
    from kernelcat.jit.bundle import prepare
    from kernelcat.layers import checkpoint, fp4, mla

__all__ = [
    "Config",
    "KernelcatError",
    "Problem",
    "__version__",
    "checkpoint",
    "debug",
    "entries",
    "fp4",
    "get",
    "mla",
    "prepare",
    "record",
    "reference",
    "reload",
    "use_lock",
]

__version__ = "0.1.0"

_HOMES = {
    "Config": "kernelcat.catalog.implementation",
    "KernelcatError": "kernelcat.errors",
    "Problem": "kernelcat.catalog.spec",
    "checkpoint": "kernelcat.layers",
    "debug": "kernelcat.call.debugging",
    "entries": "kernelcat.call.registry",
    "fp4": "kernelcat.layers",
    "get": "kernelcat.call.registry",
    "mla": "kernelcat.layers",
    "prepare": "kernelcat.jit.bundle",
    "record": "kernelcat.call.recording",
    "reference": "kernelcat",
    "reload": "kernelcat.call.registry",
    "use_lock": "kernelcat.call.locking",
}
"""Public name -> the module that defines the name, or the package that holds the module."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernelcat' has no attribute {name!r}")
    from kernelcat.importing import import_module

    home = _HOMES[name]
    value = None if home == __name__ else getattr(import_module(home), name, None)
    globals()[name] = import_module(f"{home}.{name}") if value is None else value
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
