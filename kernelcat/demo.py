"""`make demo`: the main job, by the same commands a user would type, in less than two minutes.

With a GPU: check, tune and rank `gemm`. Without a GPU: check the Triton kernels of `gemm` in the
interpreter, tune `gemm` for a B200 by a model, and show the board of an H200 that is shipped. The
last line says what was done and what was not.
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
_NAMED = tuple(word for problem in PROBLEMS for word in ("--problem", problem))

WITH_GPU: tuple[Sequence[str], ...] = (
    ("doctor",),
    ("check", "gemm", *_NAMED, "--fuzz", "20"),
    ("tune", "gemm", *_NAMED, "--language", "cuda", "--language", "triton", "--budget", "60s"),
    ("leaderboard", "gemm"),
)
WITHOUT_GPU: tuple[Sequence[str], ...] = (
    ("doctor",),
    ("check", "gemm", "--language", "triton", "--fuzz", "5", "--jobs", "2"),
    ("tune", "gemm", "--gpu", "b200", *_NAMED, "--budget", "45s"),
    ("leaderboard", "gemm", "--gpu", "h200"),
)
NOTHING_RAN = (
    "Done without a GPU: Triton's gemm kernels gave right results in its interpreter, kernels for "
    "a B200 were compiled and ranked by a model, and the last table was measured on an H200 before."
)


def main() -> None:
    """Run the commands one after the other; the first that fails ends the demo."""
    here = driver.count() > 0
    with tempfile.TemporaryDirectory() as folder:
        environment = {"KERNELCAT_DB": str(Path(folder) / "demo.sqlite3"), **os.environ}
        for words in WITH_GPU if here else WITHOUT_GPU:
            print(f"\n$ kernelcat {' '.join(words)}", flush=True)
            command = [sys.executable, "-m", "kernelcat", *words]
            code = subprocess.run(command, env=environment, check=False).returncode
            if code:
                sys.exit(f"\nthe demo ends here: kernelcat {words[0]} failed")
    if here:
        print(f"\nDone: gemm is right and tuned on this machine's {gpu.detect().name}; the last "
              "table compares it with its peers in the same race.")  # fmt: skip
    else:
        print(f"\n{NOTHING_RAN}")


if __name__ == "__main__":
    main()
