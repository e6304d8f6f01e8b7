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

import torch
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


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
TOKENS = re.compile(
    r"^greedy tokens that are the same from the start: (\d+) of (\d+)$", re.MULTILINE
)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example of transformers with a small model in float32 and oracles instead of kernels."""
    pytest.importorskip("transformers")
    example = load("transformers_model")
    monkeypatch.setattr(kernelcat, "get", OracleOperator)
    for name, value in {"CONFIG": SMALL, "DTYPE": torch.float32, "BATCH": 2, "PROMPT": 20,
                        "NEW_TOKENS": 15}.items():  # fmt: skip
        monkeypatch.setattr(example, name, value)
    return example


def test_a_model_of_transformers_writes_the_same_tokens(
    small_model: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    small_model.main()
    assert TOKENS.findall(capsys.readouterr().out) == [("30", "30")]


def test_the_example_compares_tokens_that_a_wrong_length_changes(
    small_model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = small_model.Pages.attention

    def forgets(pages, *arguments, **options):
        pages.length -= 5
        return attention(pages, *arguments, **options)

    monkeypatch.setattr(small_model.Pages, "attention", forgets)
    small_model.main()
    ((equal, total),) = TOKENS.findall(capsys.readouterr().out)
    assert int(equal) < int(total)


@pytest.mark.gpu
def test_a_model_of_transformers_on_a_gpu() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(FOLDER / "transformers_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ((equal, total),) = TOKENS.findall(done.stdout)
    assert int(equal) > int(total) // 2  # bfloat16: a near tie may go the other way
    assert "tokens/s, with the catalog: " in done.stdout
