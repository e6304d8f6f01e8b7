"""A catalog of GPU kernels: ``kernelcat.get("gemm")`` finds the fastest one for your GPU.

>>> import kernelcat
>>> gemm = kernelcat.get("gemm")
>>> d = gemm(a, b)              # a (M, K), b (N, K): torch, CuPy or any DLPack array on a GPU
>>> print(gemm.explain(a, b))   # which implementation and configuration, and why

Importing this imports no array library and no compiler; they come with the first call.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the 20 ms that importing typing takes
if TYPE_CHECKING:
    from kernelcat.dispatch import entries, get, reload
    from kernelcat.errors import KernelcatError
    from kernelcat.implementation import Config
    from kernelcat.spec import Problem

    __version__: str

__all__ = ["Config", "KernelcatError", "Problem", "__version__", "entries", "get", "reload"]

_HOMES = {
    "Config": "kernelcat.implementation",
    "KernelcatError": "kernelcat.errors",
    "Problem": "kernelcat.spec",
    "entries": "kernelcat.dispatch",
    "get": "kernelcat.dispatch",
    "reload": "kernelcat.dispatch",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kernelcat' has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kernelcat")
    except PackageNotFoundError:
        return "0+checkout"  # run from a checkout that is not installed


def __dir__() -> list[str]:
    return sorted(__all__)
