"""`make demo`: the main job, by the same commands a user would type.

With a GPU: check, tune and rank `gemm`. Without one: check the Triton kernels in the interpreter,
cross-tune `gemm` for a B200 and show the shipped H200 leaderboard; and say what was not done.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernelcat.runtime import driver, gpu

PROBLEMS = ("4096x4096x4096", "64x7168x16384", "16x7168x2048")


def with_gpu() -> list[Sequence[str]]:
    """Two minutes of work on this machine's GPU."""
    named = [word for problem in PROBLEMS for word in ("--problem", problem)]
    return [
        ("doctor",),
        ("check", "gemm", *named, "--fuzz", "20"),
        ("tune", "gemm", *named, "--language", "cuda", "--language", "triton", "--budget", "60s"),
        ("leaderboard", "gemm"),
    ]


def without_gpu() -> list[Sequence[str]]:
    """What can be done, and is true, without a GPU."""
    named = [word for problem in PROBLEMS for word in ("--problem", problem)]
    return [
        ("doctor",),
        ("check", "--all", "--language", "triton", "--fuzz", "5", "--jobs", "2"),
        ("tune", "gemm", "--gpu", "b200", *named, "--budget", "60s"),
        ("leaderboard", "gemm", "--gpu", "h200"),
    ]


def main() -> None:
    """Run the commands one after the other; the first that fails ends the demo."""
    here = driver.count() > 0
    with tempfile.TemporaryDirectory() as folder:
        environment = {"KERNELCAT_DB": str(Path(folder) / "demo.sqlite3"), **os.environ}
        for words in with_gpu() if here else without_gpu():
            print(f"\n$ kernelcat {' '.join(words)}", flush=True)
            command = [sys.executable, "-m", "kernelcat", *words]
            code = subprocess.run(command, env=environment, check=False).returncode
            if code:
                sys.exit(f"\nthe demo ends here: kernelcat {words[0]} failed")
    if here:
        print(f"\nMeasured on this machine's {gpu.detect().name}, with its peers in the same race.")
    else:
        print(
            "\nThere is no GPU here. Nothing was measured: the Triton kernels ran in the "
            "interpreter, the B200\nranking is the analytic model's over kernels that compiled, "
            "and the H200 board was shipped.\nCUDA C++ and CuTe kernels were compiled, not run."
        )


if __name__ == "__main__":
    main()
