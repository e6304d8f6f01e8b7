"""compute-sanitizer sees our kernels, in allocations of their exact size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernelcat.errors import KernelcatError
from kernelcat.sanitizer import _errors, sanitizer_path

KERNEL = """
extern "C" __global__ void copy(const char* src, char* dst, int n) {
  const int i = threadIdx.x;
  if (i < n) dst[i] = src[i];
}
"""

RUN = """
import sys
from dataclasses import replace
from kernelcat import catalog, check
from kernelcat.device import MirroredDevice
from kernelcat.implementation import Config, Int32, Pointer, Program, Step
from kernelcat.jit.cuda import CudaSource

source = CudaSource(sys.argv[1], "copy")
params = (Pointer("src"), Pointer("dst"), Int32(100 + int(sys.argv[2])))
device = MirroredDevice()
planted = replace(
    catalog.in_language("tma_copy", "cuda")[0],
    program=lambda problem, config, gpu: Program((Step(source, (1, 1, 1), params, 128),)),
)
entry = catalog.entry("tma_copy")
problem = entry.problem(rows=1, cols=100, src_stride=100, dst_stride=100, dtype="uint8")
prepared = check.prepare(entry, problem, device)
assert prepared.verify(device.load(planted, problem, Config())).passed
"""


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [0, 1])
def test_one_byte_out_of_bounds_is_counted(tmp_path: Path, beyond: int) -> None:
    sanitizer = sanitizer_path()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not here")
    source = tmp_path / "copy.cu"
    source.write_text(KERNEL)
    command = [sanitizer, "--tool", "memcheck", sys.executable, "-c", RUN, str(source), str(beyond)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _errors("memcheck", done.stdout + done.stderr, done.returncode)
    assert (found > 0) == (beyond > 0), done.stdout[-2000:]


def test_a_summary_is_read_and_a_silent_failure_is_an_error() -> None:
    assert _errors("memcheck", "========= ERROR SUMMARY: 3 errors", 1) == 3
    assert _errors("racecheck", "= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", 0) == 0
    with pytest.raises(KernelcatError, match="exit 1"):
        _errors("memcheck", "Traceback\n========= ERROR SUMMARY: 0 errors", 1)
    with pytest.raises(KernelcatError, match="exit 9"):
        _errors("synccheck", "killed", 9)
