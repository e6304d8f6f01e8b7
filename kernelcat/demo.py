"""`make demo`: runs the main commands as a user would type them, in less than two minutes.

With a GPU the demo checks, tunes and ranks `gemm`. Without a GPU it checks the Triton kernels of
`gemm` in the interpreter, ranks configurations for a B200 by the cost model, and shows the shipped
leaderboard of an H200. The last line says what was done and what was not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernelcat.runtime import children, driver, gpu

PROBLEMS = ("4096x4096x4096", "64x7168x16384", "16x7168x2048")
_NAMED = tuple(word for problem in PROBLEMS for word in ("--problem", problem))

WITH_GPU: tuple[Sequence[str], ...] = (
    ("doctor",),
    ("check", "gemm", *_NAMED, "--fuzz", "10", "--jobs", "4"),
    ("tune", "gemm", *_NAMED, "--language", "cuda", "--language", "triton", "--budget", "40s"),
    ("leaderboard", "gemm"),
)
WITHOUT_GPU: tuple[Sequence[str], ...] = (
    ("doctor",),
    ("check", "gemm", "--language", "triton", "--fuzz", "5", "--jobs", "2"),
    ("tune", "gemm", "--gpu", "b200", *_NAMED, "--budget", "45s"),
    ("leaderboard", "gemm", "--gpu", "h200"),
)
NOTHING_RAN = (
    "Done without a GPU: the Triton kernels of gemm passed in Triton's interpreter, kernels for a "
    "B200 were compiled and ranked by the cost model, and the last table is the shipped one, "
    "measured on an H200."
)


def main() -> None:
    """Run the commands one after another; the first command that fails ends the demo."""
    has_gpu = driver.count() > 0
    with tempfile.TemporaryDirectory() as folder:
        environment = {"KERNELCAT_DB": str(Path(folder) / "demo.sqlite3"), **os.environ}
        for words in WITH_GPU if has_gpu else WITHOUT_GPU:
            print(f"\n$ kernelcat {' '.join(words)}", flush=True)
            command = children.python("kernelcat", *words)
            if children.run(command, env=environment, stdout=None, stderr=None).returncode:
                sys.exit(f"\nthe demo ends here: kernelcat {words[0]} failed")
    if has_gpu:
        print(f"\nDone: gemm passed its checks and is tuned on this machine's {gpu.detect().name}; "
              "the last table compares gemm with its peers in the same race.")  # fmt: skip
    else:
        print(f"\n{NOTHING_RAN}")


if __name__ == "__main__":
    main()
