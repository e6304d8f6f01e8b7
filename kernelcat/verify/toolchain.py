"""Compilers of given versions: those installed here, or an environment of their own.

What ran on a GPU can only be compared with what the same compilers make. So a receipt names them,
and where other versions are installed here, they get a virtual environment beside the cache.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from kernelcat.errors import MissingDependency
from kernelcat.runtime.environment import NONE, compilers

PACKAGES = (
    "cuda-bindings>=13.0",
    "ml-dtypes>=0.5",
    "numpy>=2.0",
    "nvidia-cuda-nvdisasm>=13.0",
    "platformdirs>=4.0",
)
"""What the package needs besides compilers to build kernels and read their machine code."""

HEADERS = ("runtime", "cccl", "crt")
"""Wheels of headers that NVRTC reads; those of its own CUDA version."""


def requirements(versions: Mapping[str, str]) -> list[str]:
    """What to install for compilers of these ``versions`` (``{"triton": "3.6.0"}``)."""
    found: list[str] = []
    for name, version in sorted(versions.items()):
        if version == NONE:
            continue
        if name == "nvrtc":
            cuda = ".".join(version.split(".")[:2])
            found.append(f"nvidia-cuda-nvrtc=={version}")
            found += [f"nvidia-cuda-{wheel}=={cuda}.*" for wheel in HEADERS]
        elif name == "cutlass-dsl":
            number, _, flavor = version.partition("+")
            found.append(f"nvidia-cutlass-dsl[{flavor}]=={number}")
        else:
            found.append(f"{name}=={version}")
    return found


def python_with(versions: Mapping[str, str]) -> Path:
    """A Python that has compilers of these ``versions``; makes its environment when first asked.

    Raises
    ------
    MissingDependency
        They cannot be installed; says what pip said.
    """
    here = compilers()
    if all(version in (NONE, here.get(name)) for name, version in versions.items()):
        return Path(sys.executable)
    words = [*requirements(versions), *PACKAGES]
    name = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]
    folder = platformdirs.user_cache_path("kernelcat", appauthor=False) / "toolchains" / name
    ready, python = folder / ".ready", folder / "bin" / "python"
    if not ready.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", *words])
        ready.touch()
    return python


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise MissingDependency(f"{' '.join(words[:4])} failed: {said[-1]}")
