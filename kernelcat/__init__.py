"""A catalog of GPU kernels: ``kernelcat.get("gemm")`` finds the fastest one for your GPU.

>>> import kernelcat
>>> gemm = kernelcat.get("gemm")
>>> d = gemm(a, b)              # a (M, K), b (N, K): torch, CuPy or any DLPack array on a GPU
>>> print(gemm.explain(a, b))   # which implementation and configuration, and why

Importing this imports no array library and no compiler; they come with the first call.

The rooms: ``catalog`` says what there is, ``call`` serves a call, ``runtime`` is the machine,
``jit`` compiles, ``verify`` proves kernels right, ``bench`` and ``tune`` measure, ``store`` keeps
results, ``report`` shows them, ``layers`` is what surrounds kernels in a model, ``cli`` the command
line. A room stands above those it imports.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the 20 ms that importing typing takes
if TYPE_CHECKING:
    from kernelcat.call.operator import entries, get, reload
    from kernelcat.catalog.implementation import Config
    from kernelcat.catalog.spec import Problem
    from kernelcat.errors import KernelcatError
    from kernelcat.layers import checkpoint, fp4, mla

__all__ = [
    "Config",
    "KernelcatError",
    "Problem",
    "__version__",
    "checkpoint",
    "entries",
    "fp4",
    "get",
    "mla",
    "reload",
]

__version__ = "0.1.0"

_HOMES = {
    "Config": "kernelcat.catalog.implementation",
    "KernelcatError": "kernelcat.errors",
    "Problem": "kernelcat.catalog.spec",
    "checkpoint": "kernelcat.layers",
    "entries": "kernelcat.call.operator",
    "fp4": "kernelcat.layers",
    "get": "kernelcat.call.operator",
    "mla": "kernelcat.layers",
    "reload": "kernelcat.call.operator",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernelcat' has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES[name]
    found = getattr(import_module(home), name, None)
    globals()[name] = import_module(f"{home}.{name}") if found is None else found
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
