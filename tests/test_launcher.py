"""The launcher: parameters, attributes, streams, descriptors and workspaces of each launch.

``Recorder`` is a fake driver for machines without a GPU. Like the driver, it reads the parameters
during the launch. ``test_launcher_gpu.py`` launches on a GPU.
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
from kernelcat.runtime import code, launcher
from kernelcat.runtime import driver as drivers
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.launcher import Launcher, prepare, without_dependent_launches
from kernelcat.verify import inspect

A, B, C = 0x7F0000001000, 0x7F0000002000, 0x7F0000003000
MAP = TensorMap("b", "bfloat16", (64, 32), (128,), (64, 8), swizzle=128)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(drivers, "opened", lambda: recorder)
    monkeypatch.setattr(code, "_functions", {})
    monkeypatch.setattr(code, "_of_sources", {})
    monkeypatch.setattr(code, "_host_functions", {})
    return recorder


class Source:
    language = "cuda"

    def digest(self) -> str:
        return ""


def make_launcher(
    *params: Param,
    tensors: Sequence[str] = "abc",
    workspaces: dict[str, int] | None = None,
    language: str = "cuda",
    metadata: dict[str, Any] | None = None,
    copies: int = 1,
    **step: Any,
) -> Launcher:
    """A launcher of ``copies`` equal steps with these parameters."""
    step = {"grid": (7, 2, 1), "block": 128, **step}
    kinds = {"params": [type(param).__name__ for param in params]}
    artifact = Artifact(language, "sm_90a", "kernel", b"cubin", b"cubin", metadata or kinds)
    program = Program((Step(Source(), params=params, **step),) * copies, workspaces or {})
    return prepare(
        "copy/cuda/bulk", program, lambda step: code.Code(artifact, 0), tuple(tensors), 0
    )


# ---- parameters --------------------------------------------------------------------------------


def test_parameters_keep_the_order_and_the_types_of_the_kernel(driver: Recorder) -> None:
    driver.formats = "QiQqfQ"
    launch = make_launcher(Pointer("c"), Int32(-5), Pointer("a"), Int64(-(1 << 40)), Float32(0.5),
                  Pointer("b"))  # fmt: skip
    launch((A, B, C), 99)
    (recorded,) = driver.launches
    assert launch.tensors == ("a", "b", "c")
    assert recorded["params"] == [C, -5, A, -(1 << 40), 0.5, B]
    assert (recorded["grid"], recorded["block"], recorded["stream"]) == ((7, 2, 1), (128, 1, 1), 99)
    assert (recorded["shared"], recorded["attributes"], recorded["extra"]) == (0, {}, None)


def test_each_launch_passes_the_pointers_of_its_call(driver: Recorder) -> None:
    driver.formats = "QQ"
    launch = make_launcher(Pointer("a"), Pointer("c"))
    for pointers in ((A, B, C), (C, B, A), (A, B, C), (A, B, 0)):
        launch(pointers, 0)
    assert [recorded["params"] for recorded in driver.launches] == [[A, C], [C, A], [A, C], [A, 0]]


def test_the_caller_may_change_a_list_of_pointers_between_calls(driver: Recorder) -> None:
    driver.formats = "Q"
    launch, pointers = make_launcher(Pointer("a")), [A, B, C]
    launch(pointers, 0)
    pointers[0] = C
    launch(pointers, 0)
    assert [recorded["params"] for recorded in driver.launches] == [[A], [C]]


def test_too_few_pointers_are_refused(driver: Recorder) -> None:
    with pytest.raises(ValueError):
        make_launcher(Pointer("a"))((A, B), 0)
    assert driver.launches == []


def test_an_unknown_tensor_name_is_an_error_at_load(driver: Recorder) -> None:
    with pytest.raises(InvalidArgument, match="copy/cuda/bulk: a parameter names 'd'"):
        make_launcher(Pointer("d"))


def test_every_step_is_launched_in_order(driver: Recorder) -> None:
    driver.formats = "Q"
    make_launcher(Pointer("b"), copies=3)((A, B, C), 5)
    assert [recorded["params"] for recorded in driver.launches] == [[B]] * 3
    assert len(driver.loaded) == 1


@pytest.mark.parametrize("grid", [(0, 1, 1), (4, 0, 1)])
def test_an_empty_grid_launches_nothing(driver: Recorder, grid: tuple[int, int, int]) -> None:
    make_launcher(Pointer("a"), grid=grid)((A, B, C), 0)
    assert (driver.launches, driver.loaded) == ([], [])


def test_no_steps_launch_nothing(driver: Recorder) -> None:
    make_launcher(copies=0)((A, B, C), 0)
    assert driver.launches == []


# ---- launch attributes -------------------------------------------------------------------------


def test_clusters_and_dependent_launches_are_attributes(driver: Recorder) -> None:
    launch = make_launcher(cluster=(2, 4, 1), programmatic=True)
    launch((A, B, C), 0)
    assert driver.launches[0]["attributes"] == {4: (2, 4, 1), 6: (1, 0, 0)}
    assert driver.limits == []


def test_dependent_launches_can_be_switched_off_for_new_launchers(driver: Recorder) -> None:
    old = make_launcher(programmatic=True)
    old((A, B, C), 0)
    with without_dependent_launches():
        new = make_launcher(cluster=(2, 4, 1), programmatic=True)
        new((A, B, C), 0)
        old((A, B, C), 0)
    new((A, B, C), 0)  # a launcher keeps the way in which it was made
    make_launcher(programmatic=True)((A, B, C), 0)
    dependent, clusters = {6: (1, 0, 0)}, {4: (2, 4, 1)}
    attributes = [launch["attributes"] for launch in driver.launches]
    assert attributes == [dependent, clusters, dependent, clusters, dependent]


def test_clusters_of_more_than_eight_blocks_are_allowed_at_load(driver: Recorder) -> None:
    make_launcher(cluster=(16, 1, 1))
    assert driver.limits == [(drivers.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)]


def test_a_step_can_ask_for_the_largest_carveout(driver: Recorder) -> None:
    make_launcher(max_carveout=True)
    assert driver.limits == [(drivers.PREFERRED_SHARED_MEMORY_CARVEOUT, 100)]


@pytest.mark.parametrize(
    ("dynamic", "static", "limits"),
    [(48 << 10, 0, []), (100 << 10, 0, [(8, 100 << 10)]), (40 << 10, 9 << 10, [(8, 40 << 10)])],
)
def test_more_than_48_kb_of_shared_memory_is_allowed_at_load(
    driver: Recorder, dynamic: int, static: int, limits: list[tuple[int, int]]
) -> None:
    launch = make_launcher(shared_bytes=dynamic, metadata={"static_shared_bytes": static})
    assert driver.limits == limits
    launch((A, B, C), 0)
    assert driver.launches[0]["shared"] == dynamic


# ---- TMA descriptors ---------------------------------------------------------------------------


def test_a_descriptor_is_encoded_once_for_each_address(driver: Recorder) -> None:
    driver.formats = "Qmi"
    launch = make_launcher(Pointer("a"), MAP, Int32(3))
    for pointers in ((A, B, C), (A, C, C), (A, B, C), (B, B, C)):
        launch(pointers, 0)
    assert [recorded["params"][1] for recorded in driver.launches] == [B, C, B, B]
    assert driver.encoded == [(9, pointer, (64, 32), (128,), (64, 8), 3, 3) for pointer in (B, C)]


def test_an_absent_tensor_has_a_descriptor_of_zeros(driver: Recorder) -> None:
    driver.formats = "m"
    make_launcher(MAP)((A, 0, C), 0)
    assert driver.launches[0]["params"] == [0] and driver.encoded == []


def test_the_number_of_cached_descriptors_is_bounded(
    driver: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelcat.runtime.tensor_map.MAX_DESCRIPTORS", 4)
    driver.formats = "m"
    launch = make_launcher(MAP)
    for number in (*range(1, 11), 10, 9, 1):
        launch((A, number * 64, C), 0)
    assert [recorded["params"][0] // 64 for recorded in driver.launches] == [
        *range(1, 11),
        10,
        9,
        1,
    ]
    assert len(driver.encoded) == 11


def test_a_misaligned_address_is_refused_and_the_next_call_works(driver: Recorder) -> None:
    driver.formats = "m"
    launch = make_launcher(MAP)
    launch((A, B, C), 0)
    with pytest.raises(InvalidArgument, match=r"b starts at 0x.* must be a multiple of 16 bytes"):
        launch((A, B + 8, C), 0)
    launch((A, B, C), 0)
    assert [recorded["params"] for recorded in driver.launches] == [[B], [B]]


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_an_invalid_descriptor_is_refused_at_load(
    driver: Recorder, change: dict[str, Any], message: str
) -> None:
    fields = {name: getattr(MAP, name) for name in MAP.__dataclass_fields__} | change
    with pytest.raises(InvalidArgument, match=message):
        make_launcher(TensorMap(**fields))


# ---- workspaces --------------------------------------------------------------------------------


def test_each_stream_keeps_one_separate_workspace(driver: Recorder) -> None:
    driver.formats = "QQ"
    launch = make_launcher(
        Pointer("a"), Pointer("partial"), workspaces={"partial": 4096, "none": 0}
    )
    for stream in (1, 7, 1, 7):
        launch((A, B, C), stream)
    used = [recorded["params"][1] for recorded in driver.launches]
    assert used[0] == used[2] != used[1] == used[3]
    assert list(driver.alive.values()) == [4096, 4096]


def test_a_clone_shares_code_but_no_workspace(driver: Recorder) -> None:
    driver.formats = "Q"
    launch = make_launcher(Pointer("partial"), workspaces={"partial": 64})
    twin = launch.clone()
    launch((A, B, C), 0)
    twin((A, B, C), 0)
    first, second = (recorded["params"][0] for recorded in driver.launches)
    assert first != second and len(driver.loaded) == 1


def test_workspaces_are_freed_with_their_launcher(driver: Recorder) -> None:
    driver.formats = "Q"
    launch = make_launcher(Pointer("partial"), workspaces={"partial": 64})
    launch((A, B, C), 0)
    gc.disable()
    try:
        del launch
        assert list(driver.alive.values()) == [0], (
            "the workspace must be freed without the cycle collector"
        )
    finally:
        gc.enable()


def test_the_per_thread_stream_has_one_workspace_for_each_thread(driver: Recorder) -> None:
    driver.formats = "Q"
    launch = make_launcher(Pointer("partial"), workspaces={"partial": 64})
    for _ in range(2):
        launch((A, B, C), launcher.PER_THREAD_STREAM)
    thread = threading.Thread(target=launch, args=((A, B, C), launcher.PER_THREAD_STREAM))
    thread.start()
    thread.join()
    first, second, third = (recorded["params"][0] for recorded in driver.launches)
    assert first == second != third


def test_a_nested_call_has_separate_parameters_and_workspaces(driver: Recorder) -> None:
    """A second thread can call in this way while the driver has released the GIL."""
    driver.formats = "QQ"
    launch = make_launcher(Pointer("a"), Pointer("partial"), workspaces={"partial": 64})
    record, depth = driver.launch, []

    def launch_twice(*arguments: Any) -> int:
        if not depth:
            depth.append(1)
            launch((B, B, C), 0)
        return record(*arguments)

    driver.launch = launch_twice  # type: ignore[method-assign]
    launch((A, B, C), 0)
    inner, outer = (recorded["params"] for recorded in driver.launches)
    assert (inner[0], outer[0]) == (B, A)
    assert inner[1] != outer[1]


def test_threads_never_mix_parameters(driver: Recorder) -> None:
    driver.formats = "QQ"
    launch = make_launcher(Pointer("a"), Pointer("b"))

    def work(number: int) -> None:
        for turn in range(1, 300):
            value = number * 1000 + turn
            launch((value, -value & 0xFFFF, 0), 0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mixed = [s for s in driver.launches if s["params"][1] != -s["params"][0] & 0xFFFF]
    assert len(driver.launches) == 8 * 299 and mixed == []


# ---- languages ---------------------------------------------------------------------------------


def test_triton_launches_take_their_values_from_the_metadata_of_the_artifact(
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
    launch = make_launcher(Pointer("a"), Int32(1), language="triton", metadata=metadata, block=0)
    launch((A, B, C), 0)
    (recorded,) = driver.launches
    scratch = next(iter(driver.alive))
    assert recorded["params"] == [A, 1, scratch, 0]
    assert (recorded["block"], recorded["shared"]) == ((128, 1, 1), 65536)
    assert recorded["attributes"] == {4: (2, 1, 1)}
    assert driver.alive == {scratch: 128 * 14}
    assert driver.limits == [(8, 65536)]


def test_triton_without_scratch_gets_null_pointers(driver: Recorder) -> None:
    driver.formats = "QQQ"
    metadata = {"num_warps": 1, "shared_bytes": 0, "hidden_params": ["null", "null"]}
    make_launcher(Pointer("a"), language="triton", metadata=metadata)((A, B, C), 0)
    assert driver.launches[0]["params"] == [A, 0, 0] and driver.alive == {}


@pytest.fixture
def cute(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of CuTe kernels: ``cute.load`` is replaced by a function that records."""
    from kernelcat.jit import cute

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cute, "load", lambda artifact: lambda *values: calls.append(values))
    return calls


def test_cute_is_called_with_values_and_the_stream(
    driver: Recorder, cute: list[tuple[Any, ...]]
) -> None:
    params = (Pointer("b"), Int32(3), Pointer("partial"), Float32(0.5), Pointer("a"))
    launch = make_launcher(*params, language="cute", workspaces={"partial": 64})
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
        make_launcher(Pointer("a"), language="cute")((A, B, C), 0)


# ---- errors ------------------------------------------------------------------------------------


def test_a_refused_launch_names_the_error_and_the_implementation(driver: Recorder) -> None:
    launch = make_launcher()
    driver.statuses = [1]
    with pytest.raises(LaunchError, match=r"copy/cuda/bulk: CUDA_ERROR_1 \(as text\)"):
        launch((A, B, C), 0)
    launch((A, B, C), 0)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("status", [drivers.INVALID_CONTEXT, drivers.INVALID_HANDLE])
def test_a_thread_without_the_context_gets_it(driver: Recorder, status: int) -> None:
    launch = make_launcher()
    driver.statuses, driver.has_context = [status], False
    driver.contexts.clear()
    launch((A, B, C), 0)
    assert len(driver.launches) == 2
    assert driver.has_context and driver.contexts == ["push", "pop"]


# ---- the catalog's kernels ---------------------------------------------------------------------

SIZES = {
    "Pointer": 8, "Int32": 4, "Int64": 8, "Float32": 4, "TensorMap": 128, "Rank": 4, "Window": 8,
    "MappedPointer": 8,
}  # fmt: skip
KERNELS_OF_THE_CATALOG = [
    pytest.param(implementation, gpus.find(sku), id=f"{implementation.name}-{sku}")
    for name in catalog.names()
    for implementation in catalog.implementations(name)
    if implementation.language != "cute"  # the host code that CuTe compiles passes its parameters
    for sku in ("h200", "b200")
    if implementation.serves(gpus.find(sku).arch)
]


@pytest.mark.parametrize(("implementation", "target"), KERNELS_OF_THE_CATALOG)
def test_a_program_passes_the_parameters_that_its_machine_code_declares(
    implementation: Implementation, target: gpus.Gpu, driver: Recorder
) -> None:
    entry = catalog.entry(implementation.entry)
    defaults = ((p, implementation.default(p, target)) for p in entry.problems.values())
    problem, config = next(
        (p, c) for p, c in defaults if implementation.why_not(c, p, target) is None
    )
    program = implementation.program(problem, config, target)
    artifacts = [build(step.source, target.arch) for step in program.steps]
    loaded = {id(step): code.Code(a, 0) for step, a in zip(program.steps, artifacts, strict=True)}
    names = tuple(tensor.name for tensor in entry.tensors)
    assert prepare(implementation.name, program, lambda s: loaded[id(s)], names, 0).tensors == names
    for step, artifact in zip(program.steps, artifacts, strict=True):
        passed = [SIZES[type(param).__name__] for param in step.params]
        passed += [8 for _ in artifact.metadata.get("hidden_params", ())]
        assert passed == inspect.parameters(artifact.cubin, artifact.kernel), artifact.kernel
