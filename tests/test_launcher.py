"""Launching: what reaches the driver, from whom, on which stream, with whose memory.

``Recorder`` stands in for the driver where there is no GPU: it reads parameters as the driver
does, at the moment of the launch. ``test_launcher_gpu.py`` launches for real.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from driver_recorder import Recorder

from kernelcat import catalog
from kernelcat.catalog.implementation import (
    Float32,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.errors import InvalidArgument, LaunchError
from kernelcat.jit import Artifact, build
from kernelcat.runtime import driver as drivers
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime import launcher
from kernelcat.runtime.launcher import Launcher, prepare
from kernelcat.verify import inspect

A, B, C = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000
MAP = TensorMap("b", "bfloat16", (64, 32), (128,), (64, 8), swizzle=128)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(drivers, "opened", lambda: recorder)
    monkeypatch.setattr(launcher, "_functions", {})
    return recorder


class Source:
    language = "cuda"

    def digest(self) -> str:
        return ""


def made(
    *params: Param,
    tensors: Sequence[str] = "abc",
    workspaces: dict[str, int] | None = None,
    language: str = "cuda",
    metadata: dict[str, Any] | None = None,
    copies: int = 1,
    **step: Any,
) -> Launcher:
    """A launcher of one step (or ``copies`` of it) with these parameters."""
    step = {"grid": (7, 2, 1), "block": 128, **step}
    artifact = Artifact(language, "sm_90a", "kernel", b"cubin", b"cubin", metadata or {})
    program = Program((Step(Source(), params=params, **step),) * copies, workspaces or {})
    return prepare("copy/cuda/bulk", program, [artifact] * copies, tuple(tensors), 0)


# ---- parameters --------------------------------------------------------------------------------


def test_parameters_keep_the_order_and_the_types_of_the_kernel(driver: Recorder) -> None:
    driver.formats = "QiQqfQ"
    launch = made(Pointer("c"), Int32(-5), Pointer("a"), Int64(-(1 << 40)), Float32(0.5),
                  Pointer("b"))  # fmt: skip
    launch((A, B, C), 99)
    (seen,) = driver.launches
    assert launch.tensors == ("a", "b", "c")
    assert seen["params"] == [C, -5, A, -(1 << 40), 0.5, B]
    assert (seen["grid"], seen["block"], seen["stream"]) == ((7, 2, 1), (128, 1, 1), 99)
    assert (seen["shared"], seen["attributes"], seen["extra"]) == (0, {}, None)


def test_new_pointers_are_rewritten_and_old_ones_come_back(driver: Recorder) -> None:
    driver.formats = "QQ"
    launch = made(Pointer("a"), Pointer("c"))
    for pointers in ((A, B, C), (C, B, A), (A, B, C), (A, B, 0)):
        launch(pointers, 0)
    assert [seen["params"] for seen in driver.launches] == [[A, C], [C, A], [A, C], [A, 0]]


def test_a_list_of_pointers_may_be_changed_by_its_owner(driver: Recorder) -> None:
    driver.formats = "Q"
    launch, pointers = made(Pointer("a")), [A, B, C]
    launch(pointers, 0)
    pointers[0] = C
    launch(pointers, 0)
    assert [seen["params"] for seen in driver.launches] == [[A], [C]]


def test_too_few_pointers_are_refused(driver: Recorder) -> None:
    with pytest.raises(ValueError):
        made(Pointer("a"))((A, B), 0)
    assert driver.launches == []


def test_an_unknown_name_is_an_error_at_load(driver: Recorder) -> None:
    with pytest.raises(InvalidArgument, match="copy/cuda/bulk: a parameter names 'd'"):
        made(Pointer("d"))


def test_every_step_is_launched_in_order(driver: Recorder) -> None:
    driver.formats = "Q"
    made(Pointer("b"), copies=3)((A, B, C), 5)
    assert [seen["params"] for seen in driver.launches] == [[B]] * 3
    assert len(driver.loaded) == 1


@pytest.mark.parametrize("grid", [(0, 1, 1), (4, 0, 1)])
def test_an_empty_grid_launches_nothing(driver: Recorder, grid: tuple[int, int, int]) -> None:
    made(Pointer("a"), grid=grid)((A, B, C), 0)
    assert (driver.launches, driver.loaded) == ([], [])


def test_no_steps_launch_nothing(driver: Recorder) -> None:
    made(copies=0)((A, B, C), 0)
    assert driver.launches == []


# ---- launch attributes -------------------------------------------------------------------------


def test_clusters_and_dependent_launches_are_attributes(driver: Recorder) -> None:
    launch = made(cluster=(2, 4, 1), programmatic=True)
    launch((A, B, C), 0)
    assert driver.launches[0]["attributes"] == {4: (2, 4, 1), 6: (1, 0, 0)}
    assert driver.limits == []


def test_clusters_of_more_than_eight_blocks_are_allowed_at_load(driver: Recorder) -> None:
    made(cluster=(16, 1, 1))
    assert driver.limits == [(drivers.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)]


@pytest.mark.parametrize(
    ("dynamic", "static", "limits"),
    [(48 << 10, 0, []), (100 << 10, 0, [(8, 100 << 10)]), (40 << 10, 9 << 10, [(8, 40 << 10)])],
)
def test_more_than_48_kb_of_shared_memory_is_asked_for_at_load(
    driver: Recorder, dynamic: int, static: int, limits: list[tuple[int, int]]
) -> None:
    launch = made(shared_bytes=dynamic, metadata={"static_shared_bytes": static})
    assert driver.limits == limits
    launch((A, B, C), 0)
    assert driver.launches[0]["shared"] == dynamic


# ---- TMA descriptors ---------------------------------------------------------------------------


def test_a_descriptor_is_encoded_once_an_address(driver: Recorder) -> None:
    driver.formats = "Qmi"
    launch = made(Pointer("a"), MAP, Int32(3))
    for pointers in ((A, B, C), (A, C, C), (A, B, C), (B, B, C)):
        launch(pointers, 0)
    assert [seen["params"][1] for seen in driver.launches] == [B, C, B, B]
    assert driver.encoded == [(9, pointer, (64, 32), (128,), (64, 8), 3, 3) for pointer in (B, C)]


def test_an_absent_tensor_has_a_descriptor_of_zeros(driver: Recorder) -> None:
    driver.formats = "m"
    made(MAP)((A, 0, C), 0)
    assert driver.launches[0]["params"] == [0] and driver.encoded == []


def test_descriptors_are_forgotten_before_they_fill_the_memory(
    driver: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelcat.runtime.tensor_map.MAX_DESCRIPTORS", 4)
    driver.formats = "m"
    launch = made(MAP)
    for number in (*range(1, 11), 10, 9, 1):
        launch((A, number * 64, C), 0)
    assert [seen["params"][0] // 64 for seen in driver.launches] == [*range(1, 11), 10, 9, 1]
    assert len(driver.encoded) == 11


def test_a_misaligned_address_is_refused_and_the_next_call_works(driver: Recorder) -> None:
    driver.formats = "m"
    launch = made(MAP)
    launch((A, B, C), 0)
    with pytest.raises(InvalidArgument, match=r"b starts at 0x.* must be a multiple of 16 bytes"):
        launch((A, B + 8, C), 0)
    launch((A, B, C), 0)
    assert [seen["params"] for seen in driver.launches] == [[B], [B]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strides": (120,)}, "multiples of 16"),
        ({"box": (64, 257)}, "1 to 256"),
        ({"box": (32, 8, 1)}, "one stride fewer"),
        ({"strides": (128, 4096)}, "one stride fewer"),
        ({"box": (4, 8), "swizzle": 0}, "a box row of 8 bytes must be a multiple of 16 bytes"),
        ({"swizzle": 64}, "must fit the swizzle span of 64 bytes"),
        ({"swizzle": 96}, "must be 0, 32, 64 or 128"),
        ({"shape": (0, 32)}, "sizes"),
        ({"dtype": "complex64"}, "no element type complex64"),
        ({"l2_promotion": 512}, "l2_promotion"),
    ],
)
def test_what_the_hardware_cannot_take_is_refused_at_load(
    driver: Recorder, change: dict[str, Any], said: str
) -> None:
    fields = {name: getattr(MAP, name) for name in MAP.__dataclass_fields__} | change
    with pytest.raises(InvalidArgument, match=said):
        made(TensorMap(**fields))


# ---- workspaces --------------------------------------------------------------------------------


def test_streams_have_workspaces_of_their_own_and_keep_them(driver: Recorder) -> None:
    driver.formats = "QQ"
    launch = made(Pointer("a"), Pointer("partial"), workspaces={"partial": 4096, "none": 0})
    for stream in (1, 7, 1, 7):
        launch((A, B, C), stream)
    used = [seen["params"][1] for seen in driver.launches]
    assert used[0] == used[2] != used[1] == used[3]
    assert list(driver.alive.values()) == [4096, 4096]


def test_a_clone_shares_code_but_no_workspace(driver: Recorder) -> None:
    driver.formats = "Q"
    launch = made(Pointer("partial"), workspaces={"partial": 64})
    twin = launch.clone()
    launch((A, B, C), 0)
    twin((A, B, C), 0)
    first, second = (seen["params"][0] for seen in driver.launches)
    assert first != second and len(driver.loaded) == 1


def test_workspaces_die_with_their_launcher(driver: Recorder) -> None:
    driver.formats = "Q"
    launch = made(Pointer("partial"), workspaces={"partial": 64})
    launch((A, B, C), 0)
    gc.disable()
    try:
        del launch
        assert list(driver.alive.values()) == [0], "without waiting for the cycle collector"
    finally:
        gc.enable()


def test_the_per_thread_stream_is_another_stream_in_every_thread(driver: Recorder) -> None:
    driver.formats = "Q"
    launch = made(Pointer("partial"), workspaces={"partial": 64})
    for _ in range(2):
        launch((A, B, C), launcher.PER_THREAD_STREAM)
    thread = threading.Thread(target=launch, args=((A, B, C), launcher.PER_THREAD_STREAM))
    thread.start()
    thread.join()
    first, second, third = (seen["params"][0] for seen in driver.launches)
    assert first == second != third


def test_a_call_during_a_call_has_parameters_and_workspaces_of_its_own(driver: Recorder) -> None:
    """As when another thread launches while the driver has released the GIL."""
    driver.formats = "QQ"
    launch = made(Pointer("a"), Pointer("partial"), workspaces={"partial": 64})
    record, depth = driver.launch, []

    def interrupted(*arguments: Any) -> int:
        if not depth:
            depth.append(1)
            launch((B, B, C), 0)
        return record(*arguments)

    driver.launch = interrupted  # type: ignore[method-assign]
    launch((A, B, C), 0)
    inner, outer = (seen["params"] for seen in driver.launches)
    assert (inner[0], outer[0]) == (B, A)
    assert inner[1] != outer[1]


def test_threads_never_mix_parameters(driver: Recorder) -> None:
    driver.formats = "QQ"
    launch, wrong = made(Pointer("a"), Pointer("b")), []

    def work(number: int) -> None:
        for turn in range(1, 300):
            value = number * 1000 + turn
            launch((value, -value & 0xFFFF, 0), 0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [s for s in driver.launches if s["params"][1] != -s["params"][0] & 0xFFFF]
    assert len(driver.launches) == 8 * 299 and wrong == []


# ---- languages ---------------------------------------------------------------------------------


def test_triton_gets_its_own_block_shared_memory_cluster_and_hidden_parameters(
    driver: Recorder,
) -> None:
    driver.formats = "QiQQ"
    metadata = {
        "num_warps": 4,
        "shared_bytes": 65536,
        "cluster": [2, 1, 1],
        "hidden_params": ["scratch", "null"],
        "global_scratch_bytes": 128,
        "global_scratch_align": 128,
    }
    launch = made(Pointer("a"), Int32(1), language="triton", metadata=metadata, block=0)
    launch((A, B, C), 0)
    (seen,) = driver.launches
    scratch = next(iter(driver.alive))
    assert seen["params"] == [A, 1, scratch, 0]
    assert (seen["block"], seen["shared"]) == ((128, 1, 1), 65536)
    assert seen["attributes"] == {4: (2, 1, 1)}
    assert driver.alive == {scratch: 128 * 14}
    assert driver.limits == [(8, 65536)]


def test_triton_without_scratch_gets_null_pointers(driver: Recorder) -> None:
    driver.formats = "QQQ"
    metadata = {"num_warps": 1, "shared_bytes": 0, "hidden_params": ["null", "null"]}
    made(Pointer("a"), language="triton", metadata=metadata)((A, B, C), 0)
    assert driver.launches[0]["params"] == [A, 0, 0] and driver.alive == {}


@pytest.fixture
def cute(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """CuTe's loader, replaced by one that records calls."""
    from kernelcat.jit import cute

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cute, "load", lambda artifact: lambda *values: calls.append(values))
    return calls


def test_cute_is_called_with_values_and_the_stream(
    driver: Recorder, cute: list[tuple[Any, ...]]
) -> None:
    params = (Pointer("b"), Int32(3), Pointer("partial"), Float32(0.5), Pointer("a"))
    launch = made(*params, language="cute", workspaces={"partial": 64})
    launch((A, B, C), 5)
    launch((C, A, B), 5)
    workspace = next(iter(driver.alive))
    assert cute == [(B, 3, workspace, 0.5, A, 5), (A, 3, workspace, 0.5, C, 5)]
    assert driver.launches == []


def test_cute_failures_name_the_implementation(
    driver: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelcat.jit import cute

    def load(artifact: Artifact) -> Any:
        def launch(*values: Any) -> None:
            raise RuntimeError("bad stream")

        return launch

    monkeypatch.setattr(cute, "load", load)
    with pytest.raises(LaunchError, match="copy/cuda/bulk: bad stream"):
        made(Pointer("a"), language="cute")((A, B, C), 0)


# ---- errors ------------------------------------------------------------------------------------


def test_a_refused_launch_names_the_error_and_the_implementation(driver: Recorder) -> None:
    launch = made()
    driver.statuses = [1]
    with pytest.raises(LaunchError, match=r"copy/cuda/bulk: CUDA_ERROR_1 \(as text\)"):
        launch((A, B, C), 0)
    launch((A, B, C), 0)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("status", [drivers.INVALID_CONTEXT, drivers.INVALID_HANDLE])
def test_a_thread_without_the_context_gets_it(driver: Recorder, status: int) -> None:
    launch = made()
    driver.statuses, driver.has_context = [status], False
    driver.contexts.clear()
    launch((A, B, C), 0)
    assert len(driver.launches) == 2
    assert driver.has_context and driver.contexts == ["push", "pop"]


# ---- the catalog's kernels ---------------------------------------------------------------------

SIZES = {"Pointer": 8, "Int32": 4, "Int64": 8, "Float32": 4, "TensorMap": 128}
KERNELS_OF_THE_CATALOG = [
    pytest.param(implementation, gpus.find(sku), id=f"{implementation.name}-{sku}")
    for name in catalog.names()
    for implementation in catalog.implementations(name)
    if implementation.language != "cute"  # host code passes a CuTe kernel's parameters
    for sku in ("h200", "b200")
    if implementation.serves(gpus.find(sku).arch)
]


@pytest.mark.parametrize(("implementation", "target"), KERNELS_OF_THE_CATALOG)
def test_a_program_passes_what_its_machine_code_expects(
    implementation: Implementation, target: gpus.Gpu, driver: Recorder
) -> None:
    entry = catalog.entry(implementation.entry)
    defaults = [(p, implementation.default(p, target)) for p in entry.problems.values()]
    problem, config = next(
        (p, c) for p, c in defaults if implementation.why_not(c, p, target) is None
    )
    program = implementation.program(problem, config, target)
    artifacts = [build(step.source, target.arch) for step in program.steps]
    names = tuple(tensor.name for tensor in entry.tensors)
    assert prepare(implementation.name, program, artifacts, names, 0).tensors == names
    for step, artifact in zip(program.steps, artifacts, strict=True):
        passed = [SIZES[type(param).__name__] for param in step.params]
        passed += [8 for _ in artifact.metadata.get("hidden_params", ())]
        assert passed == inspect.parameters(artifact.cubin, artifact.kernel), artifact.kernel
