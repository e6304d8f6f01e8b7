"""Host memory with models: bits that return, tokens that stay. On a CPU slots are plain memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import NAMES, NUM_DECODED, Case, made
from moe_schedules import PAGE, check_near, engine, run, tokens, write

from kernelcat import moe
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine import host_memory
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.host_cache import Move
from kernelcat.moe.engine.host_memory import HostMemory, staging_bytes
from kernelcat.moe.engine.parameters import MAX_LOGPROBS, SamplingParameters
from kernelcat.moe.engine.request import FinishReason

GREEDY = SamplingParameters(temperature=0, max_tokens=NUM_DECODED)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SCARCE = 11
"""Pages of each group: a request of `Limits.context` tokens has all of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    made.cache_clear()


@pytest.fixture(scope="module")
def gpt_oss(folder: Path) -> Case:
    return made("gpt-oss", folder)


def hosted(model: moe.Decoder, num_pages: int = SCARCE, **settings: Any) -> Engine:
    """An engine with few pages, and host memory for every block."""
    defaults = {"host_cache_bytes": 8 << 20, "min_fetch": PAGE, "limits": {"max_chunk": 32}}
    return engine(model, num_pages, **{**defaults, **settings})


def evict(served: Engine, count: int = 3) -> None:
    """Requests that need all pages, one after another."""
    for i in range(count):
        write(served, [[i + 1] * 150], max_tokens=2)


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("staged", [1, 3, 64])
def test_blocks_return_to_other_pages_bit_by_bit(
    staged: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups with pages of different sizes; slots and pages in a random order."""
    layers = [moe.CacheLayer(((2, 16), (2, 32)), w) for w in (0, 24, 24)]
    page = 16 * 2 * 48 * dtype.itemsize
    monkeypatch.setattr(host_memory, "STAGING_BYTES", 2 * page * staged)
    cache = moe.KvCache.allocate(layers, [10, 12], 16, dtype, device)
    for tensor in itertools.chain(*cache.layers):
        tensor.view(torch.uint8).random_(0, 256)
    before = [tensor.cpu().clone() for tensor in itertools.chain(*cache.layers)]
    memory = HostMemory(cache, 9, 9 * 3 * page)
    slots, pages = torch.randperm(9).tolist(), (torch.randperm(9) + 1).tolist()
    moves = [Move(g, pages[i], slots[i], b"") for i in range(7) for g in (0, 1)]
    memory.offload(moves)
    others = [Move(m.group, pages[(pages.index(m.page) + 3) % 9], m.slot, b"") for m in moves]
    memory.fetch(others)
    if device == "cuda":
        torch.cuda.synchronize()
    groups = [cache.groups[i] for i in range(3) for _ in range(2)]
    for old, new, g in zip(before, itertools.chain(*cache.layers), groups, strict=True):
        expected, rows = old.view(torch.uint8).clone(), old.view(torch.uint8)
        for move, other in zip(moves, others, strict=True):
            if move.group == g:
                expected[other.page] = rows[move.page]
        assert torch.equal(new.cpu().view(torch.uint8), expected)
    memory.close()


@pytest.mark.parametrize("device", DEVICES)
def test_the_bandwidth_is_measured_with_zeros(device: str) -> None:
    """Queries with a window give the null page's values a weight of zero; NaN would remain NaN."""
    cache = moe.KvCache.allocate([moe.CacheLayer(((2, 16),), 24)], [5], 16, torch.float32, device)
    memory = HostMemory(cache, 4, 4 * 16 * 2 * 16 * 4)
    memory.groups[0].slots.fill_(-1)
    assert memory.measure() > 0
    assert not cache.layers[0][0].any()  # NaN counts as true
    memory.close()


def test_host_memory_that_is_not_there_is_refused(gpt_oss: Case) -> None:
    with pytest.raises(InvalidArgument, match="and the host has"):
        hosted(gpt_oss.model, host_cache_bytes=10**17 * 4)
    with pytest.raises(InvalidArgument, match="no room for a block of 16 tokens"):
        hosted(gpt_oss.model, host_cache_bytes=1000)
    with pytest.raises(InvalidArgument, match="needs the prefix cache"):
        hosted(gpt_oss.model, has_prefix_cache=False)
    with pytest.raises(InvalidArgument, match="min_fetch=0 must be positive"):
        hosted(gpt_oss.model, min_fetch=0)


def test_a_container_limits_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8 kB\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: files[str(self)])
    with pytest.raises(KeyError):
        host_memory.available_bytes()
    files |= {"/sys/fs/cgroup/memory.current": "1000\n", "/sys/fs/cgroup/memory.max": "max\n"}
    assert host_memory.available_bytes() == 8192
    files["/sys/fs/cgroup/memory.max"] = "4000\n"
    assert host_memory.available_bytes() == 3000


def test_staging_holds_a_page() -> None:
    assert staging_bytes([1 << 20, 3 << 20]) == 2 * host_memory.STAGING_BYTES
    assert staging_bytes([1 << 20, 200 << 20]) == 400 << 20


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_fetched_prefix_gives_the_tokens_of_a_cold_run(
    name: str, is_overlapped: bool, folder: Path
) -> None:
    case = made(name, folder)
    served = hosted(case.model, is_overlapped=is_overlapped)
    assert tokens(write(served, case.prompts, max_tokens=NUM_DECODED)) == case.texts
    evict(served)
    before = served.statistics()
    assert before.offloaded_pages_total > 0 == before.fetched_pages_total
    assert tokens(write(served, case.prompts, max_tokens=NUM_DECODED)) == case.texts
    after = served.statistics()
    blocks = [(len(prompt) - 1) // PAGE for prompt in case.prompts]
    assert after.fetched_tokens_total == PAGE * sum(blocks)
    assert after.cached_tokens_total - before.cached_tokens_total == PAGE * sum(blocks)
    windows = moe.windows(case.model.cache_layers)
    pages = [min(count, (w + PAGE - 2) // PAGE + 1) if w else count
             for count in blocks for w in windows]  # fmt: skip
    assert after.fetched_pages_total <= sum(pages)
    assert after.host_pages_in_use > 0 and after.host_bandwidth > 0
    served.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_a_fetched_prefix_on_a_gpu_gives_what_transformers_writes(name: str, folder: Path) -> None:
    """In 16 bits, with CUDA graphs and overlapped steps."""
    case = made(name, folder)
    served = hosted(moe.load(case.path, "cuda", torch.bfloat16))
    asked: Any = {"max_tokens": 24, "logprobs": MAX_LOGPROBS}
    check_near(case.theirs, write(served, case.prompts, **asked))
    for _ in range(3):
        evict(served)
        before = served.statistics()
        check_near(case.theirs, write(served, case.prompts, **asked))
        after = served.statistics()
        assert after.fetched_tokens_total - before.fetched_tokens_total == 64 + 32
    served.close()


def test_turns_of_many_conversations_write_what_large_caches_write(gpt_oss: Case) -> None:
    """Twelve conversations of three turns, of which the pages hold one."""
    large, small = engine(gpt_oss.model, 400), hosted(gpt_oss.model, is_overlapped=True)
    texts = {}
    for served in (large, small):
        talks = [[i, 7, *gpt_oss.prompts[0][: 30 + i]] for i in range(12)]
        for turn in range(3):
            said = write(served, talks, max_tokens=9)
            talks = [[*text.tokens, turn] for text in said]
        texts[served] = talks
    assert texts[large] == texts[small]
    found = small.statistics()
    assert found.fetched_tokens_total >= PAGE * 2 * 12
    assert found.offloaded_bytes_total > 0 and found.fetched_bytes_total > 0
    for served in (large, small):
        served.close()


def test_a_salt_hides_blocks_in_host_memory(gpt_oss: Case) -> None:
    served = hosted(gpt_oss.model)
    served.submit(gpt_oss.prompts[0], GREEDY, salt="a")
    run(served)
    evict(served)
    for salt, num_cached in (("b", 0), ("", 0), ("a", 64)):
        request = served.submit(gpt_oss.prompts[0], GREEDY, salt=salt)
        run(served)
        assert request.tokens == gpt_oss.texts[0] and request.num_cached == num_cached
        evict(served)


def test_a_request_that_is_cancelled_while_blocks_arrive_leaves_others_alone(
    gpt_oss: Case,
) -> None:
    served = hosted(gpt_oss.model, is_overlapped=True)
    write(served, gpt_oss.prompts, max_tokens=NUM_DECODED)
    evict(served)
    first = served.submit(gpt_oss.prompts[0], GREEDY)
    others = [served.submit(prompt, GREEDY) for prompt in gpt_oss.prompts[1:]]
    served.step()
    assert first.table is not None and first.table.is_arriving
    assert served.cancel(first.id)
    served.check_integrity()
    run(served)
    assert [other.tokens for other in others] == gpt_oss.texts[1:]
    assert not first.tokens[len(first.prompt) :]
    assert tokens(write(served, gpt_oss.prompts, max_tokens=NUM_DECODED)) == gpt_oss.texts


def test_a_failed_step_empties_host_memory(gpt_oss: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    served = hosted(gpt_oss.model)
    write(served, gpt_oss.prompts, max_tokens=NUM_DECODED)
    evict(served)
    assert served.statistics().host_pages_in_use

    def fail(*args: object) -> None:
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(served._runner, "_forward", fail)
        request = served.submit([1, 2, 3], GREEDY)
        run(served, has_faults=True)
    assert request.finish_reason is FinishReason.ERROR
    assert served.statistics().host_pages_in_use == 0
    assert tokens(write(served, gpt_oss.prompts, max_tokens=NUM_DECODED)) == gpt_oss.texts


@pytest.mark.parametrize("call", ["_memory.fetch", "ended", "wait"])
def test_a_copy_that_fails_means_a_lost_device(
    call: str, gpt_oss: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = hosted(gpt_oss.model)
    write(served, gpt_oss.prompts, max_tokens=NUM_DECODED)
    evict(served)

    def fail(*args: object) -> None:
        raise RuntimeError("no device")

    owner, _, method = call.rpartition(".")
    copies = served._runner.copies
    monkeypatch.setattr(getattr(copies, owner) if owner else copies, method, fail)
    request = served.submit(gpt_oss.prompts[0], GREEDY)
    outputs = []
    while served.has_work:
        outputs += served.step()
    assert [output.request_id for output in outputs] == [request.id]
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert outputs[0].error == "the device is lost: RuntimeError: no device"
    assert not served.is_healthy


def test_closing_ends_requests_whose_blocks_arrive(gpt_oss: Case) -> None:
    served = hosted(gpt_oss.model)
    write(served, gpt_oss.prompts, max_tokens=NUM_DECODED)
    evict(served)
    request = served.submit(gpt_oss.prompts[0], GREEDY)
    served.step()
    [output] = served.close()
    assert output.request_id == request.id and output.finish_reason is FinishReason.CANCELLED
    served.check_integrity()
    assert served.close() == [] and served.statistics().pages_in_use == 0
