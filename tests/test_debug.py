"""``kernelcat.debug``: what lies in arrays is checked before a launch, by preconditions of entries.

`host_machine.py` replaces the GPU; there an address is one of host memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from campaign import share
from host_machine import Host, half, installed, kernel
from hypothesis import HealthCheck, given, settings

import kernelcat
from kernelcat import catalog
from kernelcat.call import debugging
from kernelcat.catalog.implementation import Implementation
from kernelcat.errors import InvalidArgument
from kernelcat.runtime import driver, launcher
from kernelcat.verify import fuzz, gate

CHECKED = [name for name in catalog.names() if catalog.entry(name).preconditions]


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    kernelcat.debug(False)


def attention() -> dict[str, Any]:
    """Two sequences of 5 and 3 tokens with 2 and 1 queries, in pages of 16 tokens, 4 pages."""
    return {
        "q": torch.randn(3, 2, 64).half(),
        "k_cache": torch.randn(4, 16, 1, 64).half(),
        "v_cache": torch.randn(4, 16, 1, 64).half(),
        "block_table": torch.tensor([[3, -7], [0, 999]], dtype=torch.int32),
        "kv_lens": torch.tensor([5, 3], dtype=torch.int32),
        "cu_q": torch.tensor([0, 2, 3], dtype=torch.int32),
    }


def attend(arrays: dict[str, Any], max_q: int = 2) -> Any:
    return kernelcat.reference("paged_attn")(**arrays, max_q=max_q)


def write() -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Inputs and outputs of `kv_write`: two sequences of 17 and 3 tokens, 2 and 1 of them new."""
    inputs = {
        "q": torch.randn(3, 2, 64).half(),
        "k": torch.randn(3, 1, 64).half(),
        "v": torch.randn(3, 1, 64).half(),
        "block_table": torch.tensor([[3, 1], [0, 999]], dtype=torch.int32),
        "kv_lens": torch.tensor([17, 3], dtype=torch.int32),
        "cu_q": torch.tensor([0, 2, 3], dtype=torch.int32),
        "cos_sin": torch.randn(17, 64),
    }
    outs = (torch.empty(3, 2, 64).half(), *(torch.zeros(4, 16, 1, 64).half() for _ in range(2)))
    return inputs, outs


def product() -> dict[str, Any]:
    """`moe_gemm` of three tokens with two experts each, of which one is dropped."""
    return {
        "a": torch.randn(6, 16).half(),
        "w": torch.randn(4, 8, 16).half(),
        "offsets": torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32),
        "order": torch.tensor([0, 3, 1, 4, 5, -1], dtype=torch.int32),
        "position": torch.tensor([[0, 2], [-1, 1], [3, 4]], dtype=torch.int32),
        "gates": torch.rand(3, 2),
    }


def sampling() -> dict[str, Any]:
    rows = 3
    return {
        "logits": torch.randn(rows, 40),
        "temperature": torch.ones(rows),
        "seed": torch.arange(rows),
        "offset": torch.arange(rows),
        "min_p": torch.zeros(rows),
        "top_k": torch.full((rows,), 5, dtype=torch.int32),
        "top_p": torch.ones(rows),
    }


def refusal(call: Callable[[], Any]) -> str:
    """The message of a call that is refused: one line."""
    with kernelcat.debug(), pytest.raises(InvalidArgument) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("block_table", (1, 0), 999, "block_table[1, 0] = 999: the cache has 4 pages"),
        ("block_table", (0, 0), -1, "block_table[0, 0] = -1: the cache has 4 pages"),
        ("kv_lens", 1, 33, "kv_lens[1] = 33: the table has room for 2 pages of 16 tokens"),
        ("kv_lens", 0, -2, "kv_lens[0] = -2: must not be negative"),
        ("cu_q", 0, 1, "cu_q[0] = 1: the first element must be 0"),
        ("cu_q", 1, 4, "cu_q[2] = 3: less than the element before"),
        ("cu_q", 2, 2, "cu_q[2] = 2: the last element must be the number of tokens, 3"),
        (
            "cu_q", 1, 0,
            "cu_q[2] = 3: a sequence has at most max_q=2 query tokens, and this one ends there",
        ),
    ],
)  # fmt: skip
def test_attention(name: str, index: Any, value: int, message: str) -> None:
    arrays = attention()
    arrays[name][index] = value
    assert refusal(lambda: attend(arrays)) == f"paged_attn: {message}"


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("block_table", (0, 1), 4, "block_table[0, 1] = 4: the cache has 4 pages"),
        ("kv_lens", 0, 1, "kv_lens[0] = 1: less than the sequence's new tokens, "
         "cu_q[s + 1] - cu_q[s]"),
        ("kv_lens", 0, 18, "kv_lens[0] = 18: cos_sin has 17 rows, one a position"),
        ("kv_lens", 1, 16, ""),  # the last slot of the first page
    ],
)  # fmt: skip
def test_writes(name: str, index: Any, value: int, message: str) -> None:
    inputs, outs = write()
    inputs[name][index] = value

    def call() -> Any:
        return kernelcat.reference("kv_write")(**inputs, out=outs)

    if message:
        assert refusal(call) == f"kv_write: {message}"
    else:
        with kernelcat.debug():
            call()


def test_tokens_that_pad_a_step_may_share_a_slot() -> None:
    inputs, outs = write()
    inputs["block_table"][1, 0] = 3
    inputs["kv_lens"][1] = 16  # slot 15 of page 3, where token 15 of sequence 0 goes
    with kernelcat.debug():
        kernelcat.reference("kv_write")(**inputs, out=outs)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("offsets", 2, 1, "offsets[2] = 1: less than the element before"),
        ("offsets", 4, 7, "offsets[4] = 7: there are 3 tokens with 2 assignments each"),
        ("order", 1, 6, "order[1] = 6: there are 3 tokens with 2 assignments each"),
        ("order", 1, -1, "order[1] = -1: there are 3 tokens with 2 assignments each"),
        ("order", 5, 2, "order[5] = 2: must be -1 from row offsets[experts] on"),
        ("order", 1, 0, "order[1] = 0: an earlier row has this assignment"),
        (
            "position", (2, 0), 9,
            "position[2, 0] = 9: order has another row, or none (-1), for this assignment",
        ),
    ],
)  # fmt: skip
def test_index_maps(name: str, index: Any, value: int, message: str) -> None:
    arrays = product()
    arrays[name][index] = value

    def call() -> Any:
        return kernelcat.reference("moe_gemm")(**arrays, dtype="float16", combine=True)

    assert refusal(call) == f"moe_gemm: {message}"


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("logits", (2, 7), float("nan"), "logits[2, 7] = nan: must be finite or -inf"),
        ("temperature", 1, -0.5, "temperature[1] = -0.5: must be at least 0"),
        ("top_k", 0, -1, "top_k[0] = -1: must be at least 0"),
        ("top_p", 2, 0.0, "top_p[2] = 0.0: must be more than 0"),
    ],
)
def test_sampling(name: str, index: Any, value: float, message: str) -> None:
    arrays = sampling()
    arrays[name][index] = value
    assert refusal(lambda: kernelcat.reference("sample")(**arrays)) == f"sample: {message}"


def test_values_of_16_bits_are_decoded() -> None:
    x = torch.ones(2, 128).bfloat16()
    x[1, 3] = float("inf")
    message = refusal(lambda: kernelcat.reference("fp8_quantize")(x, block="1x128"))
    assert message == "fp8_quantize: x[1, 3] = inf: must be finite"


def test_what_no_kernel_reads_may_hold_anything() -> None:
    inputs, outs = write()
    with kernelcat.debug():
        attend(attention())
        kernelcat.reference("kv_write")(**inputs, out=outs)
        kernelcat.reference("moe_gemm")(**product(), dtype="float16", combine=True)
        kernelcat.reference("sample")(**sampling())


@pytest.mark.parametrize("name", CHECKED)
def test_drawn_inputs_satisfy_the_preconditions(name: str) -> None:
    """Every random problem: what is drawn to judge kernels is what a caller may pass."""
    entry = catalog.entry(name)

    @settings(
        max_examples=share(400),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(fuzz.problems(entry, limit=40))
    def run(problem) -> None:
        drawn = gate.drawn(entry, problem, np, seed=1)
        debugging.check(entry, problem, lambda tensor: drawn[tensor.name])

    run()


# ---- when it is checked --------------------------------------------------------------------------


def test_the_switch_and_blocks() -> None:
    assert not debugging.is_on()
    with kernelcat.debug():
        with kernelcat.debug(False):
            assert not debugging.is_on()
        assert debugging.is_on()
    assert not debugging.is_on()
    kernelcat.debug()
    assert debugging.is_on()
    kernelcat.debug(False)
    assert not debugging.is_on()


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_variable(monkeypatch, value: str, is_on: bool) -> None:
    monkeypatch.setenv("KERNELCAT_DEBUG", value)
    code = (
        "import kernelcat; kernelcat.get('gemm'); from kernelcat.call import debugging; "
        "print(debugging.is_on())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(is_on)


class HostOfAttention(Host):
    """A machine whose kernel of `paged_attn` only counts its launches."""

    reads = 0

    def read(self, pointer: int, size: int, device: int, stream: int) -> bytearray:
        """As the driver's."""
        self.reads += 1
        return bytearray(ctypes.string_at(pointer, size))


class Counter:
    """A launcher that computes nothing."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def __call__(self, pointers: tuple[int, ...], stream: int) -> None:
        self.host.launches.append(("paged_attn", stream))

    def clone(self) -> Counter:
        return self


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostOfAttention]:
    with installed(monkeypatch):
        host = HostOfAttention()
        kernels = {"triton": (implementation_of_attention(),)}
        for module in (catalog, catalog.discovery):
            monkeypatch.setattr(
                module, "in_language", lambda name, language: kernels.get(language, ())
            )
            monkeypatch.setattr(module, "languages", lambda name: tuple(kernels))
        monkeypatch.setattr(launcher, "load", lambda *facts, device, zeros: Counter(host))
        monkeypatch.setattr(driver, "opened", lambda: host)
        yield host


def implementation_of_attention() -> Implementation:
    return dataclasses.replace(kernel("triton", "tiled", 1), entry="paged_attn")


@pytest.mark.filterwarnings("ignore")
def test_a_call_a_bound_call_and_a_plan_are_checked_before_the_launch(
    host: HostOfAttention,
) -> None:
    arrays, attend = attention(), kernelcat.get("paged_attn")
    bound = attend.bind(**arrays, max_q=2)
    bound()
    attend(**arrays, max_q=2)
    assert (len(host.launches), host.reads) == (2, 0)
    arrays["block_table"][1, 0] = 999
    message = "paged_attn: block_table[1, 0] = 999: the cache has 4 pages"
    assert refusal(lambda: attend(**arrays, max_q=2)) == message
    assert refusal(bound) == message
    plan = attend.plan(**arrays, max_q=2)
    assert refusal(lambda: plan(**arrays, max_q=2)) == message
    assert len(host.launches) == 2 and host.reads
    reads = host.reads
    attend(**arrays, max_q=2)
    bound()
    assert (len(host.launches), host.reads) == (4, reads)
    with kernelcat.debug():
        arrays["block_table"][1, 0] = 0
        attend(**arrays, max_q=2)
        bound()
    assert len(host.launches) == 6


@pytest.mark.filterwarnings("ignore")
def test_a_capture_is_refused_and_the_message_says_why(host: HostOfAttention) -> None:
    host.capturing = True
    message = refusal(lambda: kernelcat.get("paged_attn")(**attention(), max_q=2))
    assert message == (
        "paged_attn: kernelcat.debug() reads arrays before the launch, which the capture of a "
        "CUDA graph does not allow: turn it off to capture"
    )
    assert not host.launches


@pytest.mark.filterwarnings("ignore")
def test_an_entry_without_preconditions_is_launched_as_ever(monkeypatch) -> None:
    with installed(monkeypatch) as host, kernelcat.debug():
        host.capturing = True
        kernelcat.get("gemm")(half(4, 8), half(6, 8))
        assert len(host.launches) == 1
