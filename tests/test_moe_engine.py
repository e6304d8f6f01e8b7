"""The engine on a CPU: models of `kernelcat.moe` with random weights, against transformers and
against themselves under other schedules."""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from moe_models import LENGTHS, NAMES, NUM_DECODED, Case, made
from moe_schedules import (
    PAGE,
    SCHEDULES,
    drafted,
    engine,
    hit,
    preempted,
    run,
    scheduled,
    tokens,
    write,
)

from kernelcat import moe
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.engine import Engine, EngineError
from kernelcat.moe.engine.limits import Limits, QueueFull
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason, Request
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation

GREEDY = SamplingParameters(temperature=0, max_tokens=NUM_DECODED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    made.cache_clear()


@pytest.fixture(scope="module")
def llama(folder: Path) -> Case:
    return made("llama", folder)


@pytest.fixture(scope="module")
def gpt_oss(folder: Path) -> Case:
    return made("gpt-oss", folder)


def texts(served: Engine, prompts: Sequence[Sequence[int]], **changed: Any) -> list[list[int]]:
    """Prompts with the tokens that the engine appends."""
    return tokens(write(served, prompts, **{"max_tokens": NUM_DECODED, **changed}))


# ---- greedy: every schedule gives transformers' tokens -------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name: str, folder: Path) -> None:
    case = made(name, folder)
    assert texts(engine(case.model), case.prompts) == case.texts


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_do_not_change_greedy_tokens(name: str, gpt_oss: Case) -> None:
    found = scheduled(name, gpt_oss.model, gpt_oss.prompts, max_tokens=NUM_DECODED)
    assert tokens(found) == gpt_oss.texts


def test_preempted_requests_write_the_same_tokens(gpt_oss: Case) -> None:
    ample, scarce = preempted(gpt_oss.model, gpt_oss.prompts)
    assert tokens(scarce) == tokens(ample)


def test_a_prefix_hit_gives_the_tokens_of_a_cold_run(gpt_oss: Case) -> None:
    found = hit(gpt_oss.model, gpt_oss.prompts, max_tokens=NUM_DECODED)
    assert tokens(found) == gpt_oss.texts


def test_accepted_drafts_save_steps_and_keep_tokens(llama: Case) -> None:
    plain, drafts = drafted(llama.model)
    assert tokens(drafts) == tokens(plain)


# ---- sampling ------------------------------------------------------------------------------------

SAMPLED = {
    "temperature": {"temperature": 1.5},
    "filters": {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_seeds_are_reproducible_whatever_else_is_in_the_batch(kind: str, llama: Case) -> None:
    parameters = SamplingParameters(**SAMPLED[kind], seed=11, max_tokens=NUM_DECODED)
    prompt = llama.prompts[2]
    found = []
    neighbours = [*SAMPLED.values(), {"temperature": 0.0, "logprobs": 2}]
    for others, settings in (
        ([], {}),
        (neighbours[:1], {"speculation": Speculation(2, 1)}),
        (neighbours, {"is_overlapped": True, "batch_sizes": (1, 4)}),
    ):
        served = engine(llama.model, **settings)
        for other in others:
            served.submit(llama.prompts[2][1:], SamplingParameters(**other, max_tokens=3))
        request = served.submit(prompt, parameters)
        run(served)
        found.append(request.tokens)
    assert all(tokens == found[0] for tokens in found)
    assert found[0] != llama.texts[2]
    assert found[0] != texts(engine(llama.model), [prompt], **{**SAMPLED[kind], "seed": 12})[0]


def test_a_repetition_penalty_counts_prompt_and_written_tokens(llama: Case) -> None:
    """With a large penalty no token with a positive logit comes twice."""
    prompt = llama.prompts[2]
    served = engine(llama.model)
    request = served.submit(
        prompt, SamplingParameters(temperature=0, repetition_penalty=1e6, max_tokens=30)
    )
    run(served)
    assert len(set(request.tokens)) == len(prompt) + 30


def test_logprobs_are_those_of_the_logits(llama: Case) -> None:
    text, length = llama.texts[1], LENGTHS[1]
    served = engine(llama.model)
    served.submit(llama.prompts[1], SamplingParameters(temperature=0, max_tokens=1, logprobs=3))
    [output] = run(served)
    expected = llama.logits[1][length - 1].log_softmax(0)
    [logprob] = output.logprobs
    assert output.tokens == [text[length]]
    assert logprob.logprob == pytest.approx(expected[text[length]].item(), abs=1e-4)
    values, ids = expected.topk(3)
    assert [token for token, _ in logprob.top] == ids.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(values.tolist(), abs=1e-4)


class EvenThenStop:
    """Even tokens only, in rising order, then token 255."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self, mask: np.ndarray) -> None:
        mask[:] = 0
        tokens = range(2 * len(self.tokens), 200, 2) if len(self.tokens) < 4 else [255]
        for token in tokens:
            mask[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))

    def append(self, token: int) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize("is_overlapped", (False, True))
def test_a_constraint_limits_tokens(is_overlapped: bool, llama: Case) -> None:
    served = engine(llama.model, is_overlapped=is_overlapped, speculation=Speculation(2, 1))
    constraint = EvenThenStop()
    parameters = SamplingParameters(max_tokens=9, stop_tokens=frozenset([255]))
    request = served.submit(llama.prompts[2], parameters, constraint=constraint)
    free = served.submit(llama.prompts[1], GREEDY)
    run(served)
    written = request.tokens[LENGTHS[2] :]
    assert written == constraint.tokens and len(written) == 5 and written[-1] == 255
    assert all(token % 2 == 0 and token >= 2 * i for i, token in enumerate(written[:-1]))
    assert request.finish_reason is FinishReason.STOP
    assert free.tokens == llama.texts[1]


class FailingConstraint(EvenThenStop):
    """Raises in its method ``name`` when two tokens are known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def allowed(self, mask: np.ndarray) -> None:
        super().allowed(mask)
        if self.name == "allowed" and len(self.tokens) == 2:
            mask[:] = 0
            raise KeyError("no rule")

    def append(self, token: int) -> None:
        super().append(token)
        if self.name == "append" and len(self.tokens) == 2:
            raise KeyError("no rule")


@pytest.mark.parametrize("name", ("allowed", "append"))
def test_a_constraint_that_fails_ends_its_request_only(name: str, llama: Case) -> None:
    served = engine(llama.model, is_overlapped=True)
    request = served.submit(llama.prompts[2], GREEDY, constraint=FailingConstraint(name))
    others = [served.submit(prompt, GREEDY) for prompt in llama.prompts]
    outputs = run(served, has_faults=True)
    [failed] = [output for output in outputs if output.error]
    assert (failed.request_id, failed.finish_reason) == (request.id, FinishReason.ERROR)
    assert failed.error == "KeyError: 'no rule'"
    assert len(request.tokens) == LENGTHS[2] + 2
    assert [other.tokens for other in others] == llama.texts
    assert served.statistics().failed_steps_total == 0 and served.is_healthy


# ---- text ----------------------------------------------------------------------------------------


def letters(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def test_a_stop_string_ends_the_text_before_it(llama: Case) -> None:
    written = llama.texts[0][LENGTHS[0] :]
    stop = f"<{written[3]}>"
    assert written[3] not in written[:3]
    served = engine(llama.model, decode=letters, is_overlapped=True)
    request = served.submit(
        llama.prompts[0], SamplingParameters(temperature=0, max_tokens=6, stop=(stop,))
    )
    outputs = run(served)
    assert "".join(output.text for output in outputs) == letters(written[:3])
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert request.tokens == llama.texts[0][: LENGTHS[0] + 4]
    with pytest.raises(InvalidArgument, match="needs text"):
        served.submit([1], SamplingParameters(stop=("x",)), needs_text=False)


# ---- limits and faults ---------------------------------------------------------------------------


def test_what_cannot_run_is_refused(llama: Case) -> None:
    served = engine(llama.model, limits={"max_waiting": 2})
    assert served.limits.vocab_size == 256
    for prompt, message in (([], "no token"), ([256], "token ids"), ([1] * 160, "context")):
        with pytest.raises(InvalidArgument, match=message):
            served.submit(prompt)
    served.submit([1], GREEDY, request_id="same")
    with pytest.raises(InvalidArgument, match="submitted already"):
        served.submit([1], GREEDY, request_id="same")
    served.submit([1], GREEDY)
    with pytest.raises(QueueFull, match="try again"):
        served.submit([1], GREEDY)
    assert served.statistics().requests_total == 2
    run(served)


def test_the_context_ends_a_request_without_max_tokens(llama: Case) -> None:
    served = engine(llama.model)
    request = served.submit([5] * 150, SamplingParameters(temperature=0))
    run(served)
    assert len(request.tokens) == 160 and request.finish_reason is FinishReason.LENGTH


def test_too_little_memory_is_told_at_the_start(llama: Case) -> None:
    limits = Limits(step_tokens=128, max_running=4, context=160)
    page = moe.page_bytes(llama.model.cache_layers, PAGE, torch.float32)[0]
    with pytest.raises(InvalidArgument, match="one request of context=160 tokens needs"):
        Engine(
            llama.model, EngineSettings(limits=limits, page_size=PAGE, cpu_cache_bytes=10 * page)
        )
    settings = EngineSettings(limits=limits, page_size=PAGE, cpu_cache_bytes=11 * page)
    served = Engine(llama.model, settings)
    assert texts(served, llama.prompts) == llama.texts
    assert served.statistics().pages == 10


def test_memory_that_is_full_is_told(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(moe.KvCache, "allocate", full)
    with pytest.raises(InvalidArgument, match=r"CUDA graphs do not fit .* lower memory .*2\.00"):
        engine(llama.model)
    monkeypatch.setattr(moe, "random_model", full)
    command = ["moe", "generate", "gpt-oss-120b", "a", "--random-weights", "--device", "cpu"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1 and "the weights of gpt-oss-120b do not fit" in done.output


def test_memory_is_divided_so_that_all_groups_serve_as_many_requests(gpt_oss: Case) -> None:
    limits = Limits(step_tokens=32, max_running=4, context=512)
    settings = EngineSettings(limits=limits, page_size=PAGE, cpu_cache_bytes=32 << 20)
    served = Engine(gpt_oss.model, settings)
    window, full = (group.num_pages for group in served._scheduler.manager.groups)
    assert served._scheduler.manager.groups[0].window == 24
    assert 2 * window < full
    each = moe.page_bytes(gpt_oss.model.cache_layers, PAGE, torch.float32)
    used = window * each[0] + full * each[1]
    assert 0.99 * (32 << 20) < used <= 32 << 20


class Fault(RuntimeError):
    """An error of a kernel."""


class Failing:
    """Runs ``model``, but raises in calls number ``faults``."""

    def __init__(self, served: Engine, faults: set[int]) -> None:
        self._model, self._faults, self._count = served._runner.model, faults, itertools.count()
        served._runner.model = self

    def __call__(self, *args: Any) -> torch.Tensor:
        x = self._model(*args)  # the caches change before the error
        if next(self._count) in self._faults:
            raise Fault("a kernel failed")
        return x


@pytest.mark.parametrize("is_overlapped", (False, True))
@pytest.mark.parametrize("fault", (0, 2))
def test_a_step_that_fails_ends_its_requests_only(
    fault: int, is_overlapped: bool, gpt_oss: Case
) -> None:
    served = engine(gpt_oss.model, limits={"max_running": 2}, is_overlapped=is_overlapped)
    Failing(served, {fault})
    requests = [served.submit(prompt, GREEDY) for prompt in gpt_oss.prompts]
    outputs = run(served, has_faults=True)
    reasons = [request.finish_reason for request in requests]
    assert reasons == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    failed = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert [output.error for output in failed] == ["Fault: a kernel failed"] * 2
    assert requests[2].tokens == gpt_oss.texts[2]
    assert served.statistics().failed_steps_total == 1
    assert texts(served, gpt_oss.prompts) == gpt_oss.texts


def test_a_lost_device_ends_all_requests(llama: Case) -> None:
    served = engine(llama.model, limits={"max_running": 2}, is_overlapped=True)
    requests = [served.submit(prompt, GREEDY) for prompt in llama.prompts]
    served.step()
    Failing(served, {0})

    def lost() -> None:
        raise Fault("no device")

    served._runner.synchronize = lost
    outputs = run(served, has_faults=True)
    ended = {output.request_id: output for output in outputs if output.finish_reason}
    assert set(ended) == {request.id for request in requests}
    assert all("the device is lost: Fault: no device" in o.error for o in ended.values())
    assert not served.is_healthy
    with pytest.raises(EngineError, match="the device is lost"):
        served.submit([1])


def test_a_cancelled_request_leaves_the_others_alone(llama: Case) -> None:
    served = engine(llama.model, is_overlapped=True)
    requests = [served.submit(prompt, GREEDY) for prompt in llama.prompts]
    served.step()
    assert served.cancel(requests[0].id) and not served.cancel(requests[0].id)
    run(served)
    assert [request.tokens for request in requests[1:]] == llama.texts[1:]


def test_memory_stays_flat_over_steps_of_mixed_sizes(llama: Case) -> None:
    """Ten thousand steps of the scheduler are in test_moe_step_arrays.py, of a GPU's in
    test_moe_engine_gpu.py; these run the model."""
    dice, num_objects = random.Random(0), []
    served = engine(llama.model, 20, is_overlapped=True, batch_sizes=(2,), decode=letters)
    kinds = [{"temperature": 0.0}, *SAMPLED.values(), {"logprobs": 2}]
    for _ in range(3):
        end = served.statistics().steps_total + 20
        while served.statistics().steps_total < end:
            while served.statistics().requests_waiting < 2:
                prompt = dice.choices(range(256), k=dice.choice((1, 9, 20)))
                parameters = SamplingParameters(**dice.choice(kinds), max_tokens=dice.randint(1, 9))
                served.submit(prompt, parameters)
            served.step()
        run(served)
        gc.collect()
        num_objects.append(sys.getallocatedblocks())
    assert max(num_objects[1:]) - num_objects[0] < 500


def test_closing_ends_requests_and_frees_pages(llama: Case) -> None:
    served = engine(llama.model)
    request: Request = served.submit(llama.prompts[0], GREEDY)
    served.step()
    [output] = served.close()
    assert output.request_id == request.id and output.finish_reason is FinishReason.CANCELLED
    served.check_integrity()
    assert not served.has_work and served.statistics().pages_in_use == 0
    assert served.close() == []
    with pytest.raises(EngineError, match="closed"):
        served.submit([1])
