"""The environment of a measurement: captured anywhere, plain data."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

from kernelcat.runtime import driver, gpu
from kernelcat.runtime.environment import NONE, Environment


def test_a_gpu_that_is_not_here_has_no_driver() -> None:
    found = Environment.capture(gpu.find("b200"))
    assert (found.sku, found.sms, found.power_w, found.mig) == ("b200", 148, 1000, None)
    assert (found.driver, found.cuda) == (NONE, NONE)
    assert set(found.compilers) == {"nvrtc", "triton", "cutlass-dsl"}
    assert found.compilers["nvrtc"] == metadata.version("nvidia-cuda-nvrtc")


def test_it_is_plain_json() -> None:
    record = Environment.capture(gpu.find("h200")).to_json()
    assert json.loads(json.dumps(record)) == record


def test_it_imports_no_compiler() -> None:
    code = (
        "import sys; from kernelcat.runtime import environment, gpu; "
        "environment.Environment.capture(gpu.find('h200')); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'cutlass')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(driver.count() > 0, reason="needs a machine without a GPU")
def test_without_a_driver_versions_are_none() -> None:
    found = Environment.capture(gpu.find("h200"), 0)
    assert (found.driver, found.cuda) == (NONE, NONE)


@pytest.mark.gpu
def test_with_a_driver_versions_are_numbers() -> None:
    found = Environment.capture(gpu.detect(0), 0)
    assert all(part.isdigit() for part in found.cuda.split("."))
    assert found.driver == NONE or found.driver.split(".")[0].isdigit()
