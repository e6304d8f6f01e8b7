"""The host's side of several ranks: rendezvous and its faults, windows, commands."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelcat import catalog
from kernelcat.errors import InvalidArgument, RankFailed, Unsupported
from kernelcat.jit.cuda import header_folders
from kernelcat.kernels.cuda import all_reduce as kernels
from kernelcat.kernels.cuda.common import windows
from kernelcat.ranks import processes
from kernelcat.ranks.group import filled
from kernelcat.ranks.rendezvous import Rendezvous
from kernelcat.ranks.window import ERROR_OFFSET, WINDOW_BYTES
from kernelcat.reference.all_reduce import MAX_RANKS, summed
from kernelcat.runtime import gpu, launcher

H200 = gpu.find("h200")


def together(folder: Path, *ranks: Callable[[Rendezvous], Any], join_s: float = 20.0) -> list[Any]:
    """What a function for each rank returns, or the error that it raised."""
    results: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = ranks[rank](Rendezvous(rank, len(ranks), folder / "socket", join_s))
        except RankFailed as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_gather_values_in_their_order(tmp_path: Path) -> None:
    def twice(meeting: Rendezvous) -> list[Any]:
        meeting.gather("first")
        return meeting.gather({"rank": meeting.rank, "long": "x" * 100_000})[0]

    results = together(tmp_path, twice, twice, twice)
    assert results == [[{"rank": rank, "long": "x" * 100_000} for rank in range(3)]] * 3


def test_every_rank_gets_the_files_of_all(tmp_path: Path) -> None:
    def share(meeting: Rendezvous) -> list[bytes]:
        path = tmp_path / str(meeting.rank)
        path.write_bytes(b"rank %d" % meeting.rank)
        _, fds = meeting.gather(None, os.open(path, os.O_RDONLY))
        texts = [os.pread(fd, 100, 0) for fd in fds]
        for fd in fds:
            os.close(fd)
        return texts

    open_before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    assert together(tmp_path, share, share, share) == [[b"rank 0", b"rank 1", b"rank 2"]] * 3
    assert (
        sum(1 for _ in Path("/proc/self/fd").iterdir()) <= open_before + 6
    )  # the sockets of three ranks


def ends(meeting: Rendezvous) -> None:
    meeting.close()


def gathers(meeting: Rendezvous) -> Any:
    return meeting.gather(None, limit_s=1.0)[0]


def hangs(meeting: Rendezvous) -> None:
    threading.Event().wait(5)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_others_hear_which_rank_has_ended(number: int, tmp_path: Path) -> None:
    ranks = [gathers, gathers, gathers]
    ranks[number] = ends
    results = together(tmp_path, *ranks)
    assert [r for r in results if r is not None] == [f"rank {number} has ended"] * 2


@pytest.mark.parametrize("number", [0, 2])
def test_the_others_hear_which_rank_hangs(number: int, tmp_path: Path) -> None:
    ranks = [gathers, gathers, gathers]
    ranks[number] = hangs
    results = together(tmp_path, *ranks)
    assert [r for r in results if r is not None] == [f"rank {number} did not answer in time"] * 2


def test_a_rank_that_fails_gives_its_reason_to_all(tmp_path: Path) -> None:
    results = together(tmp_path, gathers, lambda meeting: meeting.fail("no memory"), gathers)
    assert results == ["rank 1: no memory", None, "rank 1: no memory"]


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"ranks 1, 2 did not come in time"):
        Rendezvous(0, 3, tmp_path / "socket", join_s=0.2)
    with pytest.raises(RankFailed, match="rank 0 did not come in time"):
        Rendezvous(1, 3, tmp_path / "other", join_s=0.2)
    with pytest.raises(InvalidArgument, match="rank 3 is not one of the 3"):
        Rendezvous(3, 3, tmp_path / "third")


def test_processes_that_fail_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU every rank fails in the same way; the text stands once."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RankFailed) as error:
        processes.run({"verb": "check"}, [0, 0], limit_s=60)
    assert len(str(error.value)) < 300


def test_ranks_that_give_no_sign_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(processes, "WORKER", "ranks_silent")
    start = time.monotonic()
    with pytest.raises(processes.RanksSilent, match="no sign for 3 s after next: something"):
        processes.run({}, [0, 0], limit_s=60, silence_s=3)
    assert time.monotonic() - start < 30


def test_the_package_has_the_layout_of_the_header(tmp_path: Path) -> None:
    from cuda.bindings import nvrtc

    text = f"""
    #include <kernelcat/window.cuh>
    using kernelcat::Window;
    static_assert(sizeof(Window) == {WINDOW_BYTES});
    static_assert(__builtin_offsetof(Window, error) == {ERROR_OFFSET});
    static_assert(sizeof(Window::words) / 2 / kernelcat::kMaxRanks / sizeof(uint4) * 4
                  == {kernels.LL_ELEMENTS});
    static_assert(sizeof(Window::tiles) == 2 * {kernels.HALF_BYTES});
    static_assert(sizeof(Window::slots) == 2 * {windows.HALF_BYTES});
    static_assert(__builtin_offsetof(Window, slots) == {windows.SLOTS_OFFSET});
    static_assert(__builtin_offsetof(Window, words) == {windows.WORDS_OFFSET});
    static_assert(sizeof(Window::words) == 2 * kernelcat::kMaxRanks * {windows.SENDER_BYTES});
    static_assert(sizeof(Window::epochs) == 4 * {windows.EPOCHS});
    static_assert({ERROR_OFFSET} == {windows.ERROR_OFFSET});
    static_assert(kernelcat::kMaxRanks == {MAX_RANKS});
    """
    include = Path(kernels.__file__).parents[1] / "include"
    options = [f"-I{folder}".encode() for folder in (include, *header_folders())]
    options += [b"-std=c++20", b"--gpu-architecture=sm_90a"]
    program = nvrtc.nvrtcCreateProgram(text.encode(), b"layout.cu", 0, None, None)[1]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()


def test_windows_are_counted_from_the_launching_rank() -> None:
    implementation = catalog.implementation("all_reduce", "cuda", "ll")
    problem = summed(1, 2880, ranks=3)
    program = implementation.program(problem, implementation.default(problem, H200), H200)
    step = filled(program, 1, [100, 200, 300]).steps[0]
    values = [param.value for param in step.params if hasattr(param, "value")]
    assert values == [2880, 1, 200, 300, 100, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("variant", ["one_shot", "two_shot"])
def test_rings_fit_into_half_of_a_window(variant: str, ranks: int) -> None:
    implementation = catalog.implementation("all_reduce", "cuda", variant)
    problem = summed(8192, 7168, ranks)
    configs = list(implementation.legal(problem, H200))
    assert configs
    for config in configs:
        (step,) = implementation.program(problem, config, H200).steps
        tile_bytes = kernels.THREADS * config["unroll"] * 16
        rings = step.grid[0] * ranks * (2 if variant == "two_shot" else 1)
        assert rings * kernels.RING_TILES * tile_bytes <= kernels.HALF_BYTES


def test_what_does_not_fit_into_slots_takes_several_launches() -> None:
    implementation = catalog.implementation("all_reduce", "triton", "slots")
    problem = summed(8192, 7168, norm=True)
    *sums, norm = implementation.program(problem, implementation.default(problem, H200), H200).steps
    begins, sizes = zip(*((s.params[3].value, s.params[4].value) for s in sums), strict=True)
    assert list(begins) == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == 8192 * 7168 // 2
    assert max(sizes) * 4 * 2 <= windows.HALF_BYTES
    assert norm.grid == (8192, 1, 1)


def test_one_process_cannot_load_an_entry_of_several_ranks() -> None:
    implementation = catalog.implementation("all_reduce", "cuda", "ll")
    problem = summed(1, 2880)
    config = implementation.default(problem, H200)
    with pytest.raises(Unsupported, match="all_reduce is for several ranks"):
        launcher.load(implementation, problem, config, H200, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tune all_reduce --gpu b200", "--gpu is not for an entry of several ranks"),
        ("tune all_reduce --regime eager", "--regime is not for an entry of several ranks"),
        ("tune all_reduce --variant lll", "all_reduce has no implementation with these"),
        ("bench all_reduce --db a.sqlite", "--db is not for an entry of several ranks"),
        (
            "check all_reduce --tool initcheck",
            "--tool initcheck is not for an entry of several ranks",
        ),
        ("bench all_reduce --budget 10m", "--budget is not for an entry of several ranks"),
        ("bench all_reduce --problem 1x288", "did you mean 1x2880"),
        ("bench all_reduce --problem tokens=1,hidden=8,ranks=9", "ranks='9' is not supported"),
    ],
)
def test_what_several_ranks_cannot_do_is_one_line(arguments: str, message: str) -> None:
    command = [sys.executable, "-m", "kernelcat", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["moe_dispatch", "moe_combine"])
def test_an_exchange_of_no_tokens_has_a_default_and_an_estimate(name: str) -> None:
    entry = catalog.entry(name)
    empty = entry.problem(**next(iter(entry.problems.values())).values | {"tokens": 0})
    for implementation in catalog.implementations(name):
        config = implementation.default(empty, H200)
        assert implementation.why_not(config, empty, H200) is None
        assert implementation.estimate(empty, config, H200) > 0
