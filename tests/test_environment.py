"""The environment of a measurement: captured with and without a GPU, stored as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

from kernelcat.runtime import driver, gpu
from kernelcat.runtime.environment import NONE, Environment


def test_the_environment_of_an_absent_gpu_has_no_driver() -> None:
    environment = Environment.capture(gpu.find("b200"))
    assert (environment.sku, environment.sms, environment.power_w, environment.mig) == (
        "b200",
        148,
        1000,
        None,
    )
    assert (environment.driver, environment.cuda) == (NONE, NONE)
    assert set(environment.compilers) == {"nvrtc", "triton", "cutlass-dsl"}
    assert environment.compilers["nvrtc"] == metadata.version("nvidia-cuda-nvrtc")


def test_an_environment_survives_json() -> None:
    record = Environment.capture(gpu.find("h200")).to_json()
    assert json.loads(json.dumps(record)) == record


def test_capturing_imports_no_compiler() -> None:
    code = (
        "import sys; from kernelcat.runtime import environment, gpu; "
        "environment.Environment.capture(gpu.find('h200')); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'cutlass')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(driver.count() > 0, reason="needs a machine without a GPU")
def test_without_a_driver_versions_are_none() -> None:
    environment = Environment.capture(gpu.find("h200"), 0)
    assert (environment.driver, environment.cuda) == (NONE, NONE)


@pytest.mark.gpu
def test_with_a_driver_versions_are_numbers() -> None:
    environment = Environment.capture(gpu.detect(0), 0)
    assert all(part.isdigit() for part in environment.cuda.split("."))
    assert environment.driver == NONE or environment.driver.split(".")[0].isdigit()
