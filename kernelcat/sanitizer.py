"""NVIDIA's compute-sanitizer over a small fuzz run of one implementation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.implementation import Implementation

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED_SIZE = 160
"""Largest size axis while the sanitizer watches, which slows kernels by 10 to 100 times."""
SANITIZED_S = 300
"""Seconds after which a sanitized run counts as hung."""


def command_line(verb: str, implementation: Implementation) -> list[str]:
    """The command that runs ``kernelcat VERB`` on one implementation in a process of its own."""
    return [
        *(sys.executable, "-m", "kernelcat", verb, implementation.entry),
        *("--language", implementation.language, "--variant", implementation.variant),
    ]


def sanitizer_path() -> str | None:
    """compute-sanitizer on the path, or in the CUDA toolkit."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = Path(root) / "bin" / "compute-sanitizer"
    return str(path) if path.is_file() else None


def sanitize(implementation: Implementation, examples: int) -> dict[str, int]:
    """Errors that each compute-sanitizer tool finds in a small fuzz run of the implementation.

    Raises
    ------
    MissingDependency
        When compute-sanitizer (part of the CUDA toolkit) is not on the path.
    KernelcatError
        When a tool ran but said no number.
    """
    sanitizer = sanitizer_path()
    if sanitizer is None:
        raise MissingDependency("compute-sanitizer is not on the path: install the CUDA toolkit")
    fuzzing = [*command_line("fuzz", implementation), "--examples", str(examples)]
    fuzzing += ["--limit", str(SANITIZED_SIZE), "--kernels", "6", "--mirrored"]
    found = {}
    for tool in SANITIZERS:
        command = [sanitizer, "--tool", tool, *fuzzing]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=SANITIZED_S
            )
        except subprocess.TimeoutExpired as error:
            raise KernelcatError(
                f"compute-sanitizer --tool {tool}: over {SANITIZED_S} s"
            ) from error
        found[tool] = _errors(tool, done.stdout + done.stderr, done.returncode)
    return found


def _errors(tool: str, output: str, code: int) -> int:
    """What a tool counted; an error where it counted nothing and the run failed all the same."""
    match = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    if not match or (code and not int(match[1])):
        tail = " | ".join(output.strip().splitlines()[-4:])
        raise KernelcatError(f"compute-sanitizer --tool {tool}: exit {code}: {tail}")
    return int(match[1])
