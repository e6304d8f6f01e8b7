"""g++ for kernels that run on the host. What it built is kept between runs of pytest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

COMPILER = shutil.which("g++")
FIBERS = Path(__file__).parent / "fibers_include"
"""A header of both stand-ins for CUDA's threads."""
OPTIONS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-gnu-unique", f"-I{FIBERS}")
"""Libraries of one process share no variables (``-fno-gnu-unique``)."""


@cache
def folder(name: str, *inputs: Path) -> Path:
    """Where files stay until the compiler, or a file among or below ``inputs``, changes."""
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version)
    for path in (Path(__file__), FIBERS, *inputs):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            digest.update(file.read_bytes() if file.is_file() else b"")
    chosen = Path(__file__).parents[1] / ".pytest_cache" / name / digest.hexdigest()[:16]
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def once(target: Path, make: Callable[[Path], object]) -> Path:
    """``target``; where it is missing, ``make(path)`` writes it at a temporary path.

    Processes that make one file at the same time do not disturb each other.
    """
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            temporary = Path(folder) / target.name
            make(temporary)
            temporary.replace(target)
    return target


def compile(arguments: Iterable[str]) -> None:
    """Runs g++; its messages are the error where it fails."""
    built = subprocess.run([str(COMPILER), *arguments], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def precompiled(header: Path, target: Path, options: Iterable[str]) -> Path:
    """A copy of ``header`` in the folder ``target``, beside which g++ finds it compiled.

    ``options`` must be those of the files that include it, where it comes first.
    """
    copied = once(target / header.name, lambda path: shutil.copy(header, path))
    command = [option for option in options if option != "-shared"]
    command += ["-x", "c++-header", str(copied), "-o"]
    once(target / f"{header.name}.gch", lambda path: compile([*command, str(path)]))
    return copied
