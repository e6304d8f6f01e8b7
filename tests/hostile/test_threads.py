"""First use from several threads at once, in fresh processes."""

from __future__ import annotations

import subprocess
import sys

from campaign import seeds

FIRST_USE = """
import sys, threading, warnings
warnings.simplefilter("ignore")
sys.setswitchinterval(1e-5)
seed = int(sys.argv[1])
if seed % 2:
    import torch
import kernelcat
start, failures = threading.Barrier(8), []

def use(number):
    try:
        start.wait()
        names = kernelcat.entries()
        for shift in range(len(names)):
            op = kernelcat.get(names[(shift + number * seed) % len(names)])
            if number % 4 == 3:
                kernelcat.reload()
        kernelcat.get("gemm", language="cuda").explain(
            M=64, N=64, K=64, dtype="bfloat16", gpu="h200")
        if number == 0 and seed % 2 == 0:
            import torch
        kernelcat.get("gemm")
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if "torch" in sys.modules:
    import torch
    kernelcat.get("gemm")
    assert torch.ops.kernelcat.gemm is not None
sys.exit("\\n".join(failures) or 0)
"""


@seeds(40)
def test_eight_threads_may_use_the_package_first(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE, str(seed)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
