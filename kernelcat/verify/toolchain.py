"""Compilers of given versions: the installed ones, or ones in a separate virtual environment.

Machine code can only be compared with machine code of the same compilers. Therefore a receipt names
its compilers. If other versions are installed here, the receipt's versions are installed into a
virtual environment in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from kernelcat.errors import MissingDependency
from kernelcat.runtime import children
from kernelcat.runtime.environment import NONE, compilers

PACKAGES = (
    "cuda-bindings>=13.0",
    "ml-dtypes>=0.5",
    "numpy>=2.0",
    "nvidia-cuda-nvdisasm>=13.0",
    "platformdirs>=4.0",
)
"""Packages that building kernels and reading machine code need, besides the compilers."""

HEADERS = ("runtime", "cccl", "crt")
"""Wheels of headers that NVRTC reads; their CUDA version must be NVRTC's."""


def requirements(versions: Mapping[str, str]) -> list[str]:
    """Requirements for pip of compilers of these ``versions`` (``{"triton": "3.6.0"}``)."""
    wanted: list[str] = []
    for name, version in sorted(versions.items()):
        if version == NONE:
            continue
        if name == "nvrtc":
            cuda = ".".join(version.split(".")[:2])
            wanted.append(f"nvidia-cuda-nvrtc=={version}")
            wanted += [f"nvidia-cuda-{wheel}=={cuda}.*" for wheel in HEADERS]
        elif name == "cutlass-dsl":
            number, _, flavor = version.partition("+")
            wanted.append(f"nvidia-cutlass-dsl[{flavor}]=={number}")
        else:
            wanted.append(f"{name}=={version}")
    return wanted


def python_with(versions: Mapping[str, str]) -> Path:
    """A Python with compilers of these ``versions``; the first call makes its environment.

    Raises
    ------
    MissingDependency
        The compilers cannot be installed; the message has pip's last line.
    """
    installed = compilers()
    if all(version in (NONE, installed.get(name)) for name, version in versions.items()):
        return Path(sys.executable)
    words = [*requirements(versions), *PACKAGES]
    name = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]
    folder = platformdirs.user_cache_path("kernelcat", appauthor=False) / "toolchains" / name
    ready, python = folder / ".ready", folder / "bin" / "python"
    if not ready.exists():
        _run(children.python("venv", "--clear", str(folder)))
        _run(children.python("pip", "install", "--quiet", *words, executable=python))
        ready.touch()
    return python


def _run(words: list[str]) -> None:
    done = children.run(words)
    if done.returncode:
        errors = (done.stderr or done.stdout).strip().splitlines() or ["no error message"]
        raise MissingDependency(f"{' '.join(words[:5])} failed: {errors[-1]}")
