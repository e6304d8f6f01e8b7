"""The examples run: unchanged on a GPU, elsewhere with oracles instead of kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from oracle_operator import OracleOperator

import kernelcat

FOLDER = Path(__file__).parent.parent / "examples"
LINE = re.compile(r"^(?:prefill|step \d+): largest difference from torch (\d\.\d+)$", re.MULTILINE)


def load(name: str) -> ModuleType:
    """The example's module, freshly imported."""
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(printed: str, steps: int) -> list[float]:
    """The differences that an example prints: of the prefill and of each of ``steps`` steps."""
    numbers = [float(number) for number in LINE.findall(printed)]
    assert len(numbers) == 1 + steps, printed
    return numbers


PROMPTS = {"paged_attention": (70, 33, 1, 16), "mla_decode": (100, 33, 1, 64)}
"""Shorter prompts for the test without a GPU."""
ALLOWED = 0.04
"""The largest difference from torch that is allowed."""


@pytest.mark.parametrize("name", PROMPTS)
def test_an_example_with_oracles(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    monkeypatch.setattr(kernelcat, "get", OracleOperator)
    monkeypatch.setattr(example, "capture", lambda step: step)
    monkeypatch.setattr(example, "PROMPTS", PROMPTS[name])
    monkeypatch.setattr(example, "MAX_TOKENS", 128)
    example.main()
    assert max(differences(capsys.readouterr().out, example.STEPS)) < ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROMPTS)
def test_an_example_on_a_gpu(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(differences(done.stdout, load(name).STEPS)) < ALLOWED
