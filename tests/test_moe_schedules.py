"""The engine in 16 bits against transformers, under every schedule.

On a GPU kernels compute; on a CPU the oracles do, in bfloat16 too. The last tests plant faults,
which the comparison must see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import Case, made
from moe_schedules import SCHEDULES, check_near, drafted, engine, hit, preempted, scheduled, write

from kernelcat import moe
from kernelcat.moe.engine import integrity, queue, scheduler
from kernelcat.moe.engine.parameters import MAX_LOGPROBS
from kernelcat.moe.engine.speculation import Speculation

ASKED: Any = {"max_tokens": 24, "logprobs": MAX_LOGPROBS}


def on(cpu: Sequence[str], gpu: Sequence[str]) -> Any:
    """Runs a test with these models on a CPU, and with those on a GPU."""
    marked = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in gpu]
    return pytest.mark.parametrize(("name", "device"), [*((name, "cpu") for name in cpu), *marked])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    made.cache_clear()


@pytest.fixture
def case(name: str, folder: Path) -> Case:
    return made(name, folder)


@pytest.fixture
def model(case: Case, device: str) -> moe.Decoder:
    return moe.load(case.path, device, torch.bfloat16)


@on(cpu=("gpt-oss",), gpu=("gpt-oss", "llama", "qwen3-moe", "deepseek-v3"))
def test_greedy_tokens_are_those_of_transformers(case: Case, model: moe.Decoder) -> None:
    """Without log-probabilities `lm_head` chooses, and with them `sample`."""
    served = engine(model)
    for logprobs in (None, MAX_LOGPROBS):
        texts = write(served, case.prompts, max_tokens=24, logprobs=logprobs)
        check_near(case.theirs, texts)
    served.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@on(cpu=("llama",), gpu=("gpt-oss",))
def test_schedules_do_not_change_what_is_written(
    schedule: str, case: Case, model: moe.Decoder
) -> None:
    check_near(case.theirs, scheduled(schedule, model, case.prompts, **ASKED))


@pytest.mark.parametrize("schedule", ("chunks", "overlap, padding, drafts"))
@on(cpu=(), gpu=("deepseek-v3",))
def test_schedules_do_not_change_what_flashmla_writes(
    schedule: str, case: Case, model: moe.Decoder
) -> None:
    check_near(case.theirs, scheduled(schedule, model, case.prompts, **ASKED))


@on(cpu=("llama",), gpu=("gpt-oss", "deepseek-v3"))
def test_preempted_requests_write_the_same(case: Case, model: moe.Decoder) -> None:
    for texts in preempted(model, case.prompts, logprobs=MAX_LOGPROBS):
        check_near(case.theirs, texts)


@on(cpu=("llama",), gpu=("gpt-oss", "deepseek-v3"))
def test_a_prefix_hit_gives_what_a_cold_run_gives(case: Case, model: moe.Decoder) -> None:
    check_near(case.theirs, hit(model, case.prompts, **ASKED))


@on(cpu=("llama",), gpu=("llama",))
def test_accepted_drafts_save_steps_and_change_nothing(case: Case, model: moe.Decoder) -> None:
    for texts in drafted(model, logprobs=MAX_LOGPROBS):
        check_near(case.theirs, texts)


# ---- planted faults ------------------------------------------------------------------------------


class Faulty:
    """``model``, whose steps after a sequence's first one get what ``change`` makes of the batch.

    Everything but the call is the model's.
    """

    def __init__(self, model: moe.Decoder, change: Callable[[moe.Batch], moe.Batch]) -> None:
        self._model, self._change = model, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, batch: moe.Batch, cache: moe.KvCache, after_layer: Any) -> torch.Tensor:
        is_later = bool((batch.kv_lens > batch.cu_q.diff()).any())
        return self._model(self._change(batch) if is_later else batch, cache, after_layer)


def with_wrong_page(batch: moe.Batch) -> moe.Batch:
    """The first two pages of each sequence are swapped."""
    order = [1, 0, *range(2, batch.block_tables[0].shape[1])]
    return replace(batch, block_tables=tuple(t[:, order] for t in batch.block_tables))


def with_wrong_position(batch: moe.Batch) -> moe.Batch:
    """Each new token lies one place too far."""
    return replace(batch, kv_lens=batch.kv_lens + 1, positions=batch.positions + 1)


def with_wrong_expert(model: moe.Decoder) -> moe.Decoder:
    """The router's scores belong to the experts beside."""

    def moe_mlp(x: torch.Tensor, logits: torch.Tensor, **named: Any) -> torch.Tensor:
        found: torch.Tensor = right(x, logits.roll(1, 1), **named)
        return found

    right = model.ops.moe_mlp
    model.ops = replace(model.ops, moe_mlp=moe_mlp)
    return model


FAULTS: dict[str, Callable[[moe.Decoder], Any]] = {
    "page": partial(Faulty, change=with_wrong_page),
    "position": partial(Faulty, change=with_wrong_position),
    "expert": with_wrong_expert,
}


def refuses() -> Any:
    return pytest.raises(AssertionError, match="positions agree")


@pytest.mark.parametrize("fault", FAULTS)
@on(cpu=("gpt-oss",), gpu=())
def test_a_fault_is_seen(fault: str, case: Case, model: moe.Decoder) -> None:
    with refuses():
        check_near(case.theirs, write(engine(FAULTS[fault](model)), case.prompts, **ASKED))


@on(cpu=("gpt-oss",), gpu=())
def test_tokens_alone_show_a_wrong_expert(case: Case, model: moe.Decoder) -> None:
    texts = write(engine(with_wrong_expert(model)), case.prompts, max_tokens=24)
    with refuses():
        check_near(case.theirs, texts)


@on(cpu=("gpt-oss",), gpu=())
def test_a_prefix_of_another_prompt_is_seen(
    case: Case, model: moe.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks have the hash of their number alone."""

    def extend(hashes: list[bytes], tokens: Any, page_size: int, salt: str = "") -> None:
        hashes += [bytes([i]) * 16 for i in range(len(hashes), len(tokens) // page_size)]

    for module in (queue, scheduler, integrity):
        monkeypatch.setattr(module, "extend_hashes", extend)
    with refuses():
        check_near(case.theirs, hit(model, case.prompts, **ASKED))


@on(cpu=("llama",), gpu=())
def test_drafts_that_nobody_verifies_are_seen(
    case: Case, model: moe.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "verify", lambda drafts, tokens: [*drafts, tokens[-1]])
    served = engine(model, speculation=Speculation(4, 1))
    texts = write(served, [list(range(0, 256, 2))], **ASKED)  # wrong drafts for every other token
    with refuses():
        check_near(case.theirs, texts)
