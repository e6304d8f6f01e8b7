"""The examples run: on a GPU as they are, elsewhere with the oracle in the kernel's place."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kernelcat
from kernelcat import catalog
from kernelcat.call import signature

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parent.parent / "examples"
LINE = re.compile(r"^(?:prefill|step \d+): largest difference from torch (\d\.\d+)$", re.MULTILINE)


class Oracle:
    """An operator on CPU tensors: what its entry's oracle says, with the real one's signature."""

    def __init__(self, name: str) -> None:
        self.entry = catalog.entry(name)

    def __call__(self, *arrays: Any, out: Any = None, **axes: Any) -> tuple[Any, ...]:
        inputs, axes = signature.arrange(self.entry, arrays, axes)
        outs = signature.outputs(self.entry, out)
        problem = signature.infer(self.entry, signature.describe(self.entry, inputs, outs), axes)
        told = [*zip(self.entry.inputs, inputs, strict=True)]
        told += [pair for pair in zip(self.entry.outputs, outs) if pair[0].updated]  # noqa: B905
        values = {
            tensor.name: array.numpy() if tensor.dtype == "int32" else array.float().numpy()
            for tensor, array in told
            if array is not None
        }
        found = self.entry.oracle(problem, values)
        results = tuple(
            torch.from_numpy(np.ascontiguousarray(found[tensor.name])).to(
                getattr(torch, tensor.dtype_of(problem))
            )
            for tensor in self.entry.outputs
        )
        for place, result in zip(outs, results):  # noqa: B905
            place.copy_(result)
        return outs or results

    def bind(self, *arrays: Any, **named: Any) -> Any:
        def run() -> None:
            run.out = self(*arrays, **named)

        return run


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(printed: str, steps: int) -> list[float]:
    found = [float(number) for number in LINE.findall(printed)]
    assert len(found) == 1 + steps, printed
    return found


PROMPTS = {"paged_attention": (70, 33, 1, 16), "mla_decode": (100, 33, 1, 64)}
"""Of a test without a GPU."""
ALLOWED = 0.04


@pytest.mark.parametrize("name", PROMPTS)
def test_an_example_step_by_step(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    monkeypatch.setattr(kernelcat, "get", Oracle)
    monkeypatch.setattr(example, "capture", lambda step: step)
    monkeypatch.setattr(example, "PROMPTS", PROMPTS[name])
    monkeypatch.setattr(example, "ROOM", 128)
    example.main()
    assert max(differences(capsys.readouterr().out, example.STEPS)) < ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROMPTS)
def test_an_example(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(differences(done.stdout, load(name).STEPS)) < ALLOWED
