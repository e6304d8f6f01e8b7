"""Where the time of a decode step goes: kernels, gaps between them, and phases of the host.

An engine decodes a fixed batch while `torch.profiler` records some steps. The trace goes to a file
(Chrome's format: chrome://tracing, Perfetto), and `StepProfile` is its summary: means of one step.
Recording slows the host, so gaps are those of a slower host; times of kernels are the device's own.
Of ranks that divide the experts, rank 0 is recorded; its kernels of an exchange also wait for the
other ranks (`LockstepEngine.profile`).
"""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe import ranges
from kernelcat.moe.engine.building import cache_type
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import Request
from kernelcat.moe.step_bytes import bandwidth_of, step_bytes
from kernelcat.report.sheet import Sheet
from kernelcat.runtime.gpu import detect

WINDOW = "profiled steps"
"""The range that holds the steps that count."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the device's events in a trace."""
MAX_NAME = 80
"""Characters of a kernel's name in the table; templates of C++ have thousands."""
NUM_STEPS, NUM_WARM = 16, 2
"""Steps that count, and steps before them while the profiler starts."""


@dataclass(frozen=True)
class KernelTime:
    """A kernel's part of a step, the mean of all steps; copies and fills of memory are kernels too.

    Attributes
    ----------
    launches : of one step
    us : microseconds in which this kernel ran and no kernel that began before it; with the gaps
        they add up to the time of the step on the device
    duration_us : from its beginning to its end; a dependent launch begins before it works
    gap_us : microseconds before it in which nothing ran
    """

    name: str
    launches: float
    us: float
    duration_us: float
    gap_us: float


@dataclass(frozen=True)
class StepProfile:
    """One decode step, the mean of ``steps`` steps.

    Attributes
    ----------
    batch, context : requests of all ranks, and the tokens of each in the middle of the steps
    step_us : by the host's clock, profiler included
    device_us : from the first kernel's beginning to the last one's end; 0 on a CPU
    busy_us, gap_us : parts of ``device_us`` in which something ran, and nothing
    kernels : the longest first
    phases : microseconds of the host in each of `ranges.PHASES`
    floor_bytes : that the step must read (`step_bytes`), on rank 0
    bandwidth : bytes a second of a copy on this GPU; None on a CPU
    trace : the file
    ranks : that divide the experts; all times are those of rank 0
    """

    batch: int
    context: int
    steps: int
    step_us: float
    device_us: float
    busy_us: float
    gap_us: float
    kernels: tuple[KernelTime, ...]
    phases: Mapping[str, float]
    floor_bytes: int
    bandwidth: float | None
    trace: str
    ranks: int = 1

    @property
    def floor_us(self) -> float | None:
        """Microseconds in which a copy reads as many bytes; None on a CPU."""
        return self.floor_bytes / self.bandwidth * 1e6 if self.bandwidth else None

    @property
    def floor_share(self) -> float | None:
        """The floor's part of the step's time on the device."""
        return self.floor_us / self.device_us if self.floor_us and self.device_us else None

    def sheet(self) -> Sheet:
        """A line for each kernel; on a CPU, where there are none, for each phase of the host."""
        return _kernel_sheet(self) if self.kernels else _phase_sheet(self)

    def published(self) -> dict[str, Any]:
        """All fields and the properties, for JSON."""
        return {**vars(self), "floor_us": self.floor_us, "floor_share": self.floor_share}


# ---- recording ----------------------------------------------------------------------------------


def profile_decoding(
    engine: Engine, prompts: Sequence[Sequence[int]], trace: Path, num_steps: int = NUM_STEPS
) -> StepProfile:
    """Records ``num_steps`` steps in which all ``prompts`` (of equal length) are written on.

    The engine has no other work. ``trace`` may end in .gz.

    Raises
    ------
    InvalidArgument
        The engine's context is too short: a request has ended before the steps were recorded.
    KernelcatError
        The file cannot be written, or a request has failed.
    """
    check_file(trace)
    try:
        with writing(engine, prompts) as requests:
            while not all(request.num_written for request in requests):
                take_step(engine)
            with recorded(engine) as profiler:
                seconds = take_steps(engine, num_steps)
    finally:
        while engine.has_work:
            engine.step()
    profiler.export_chrome_trace(str(trace))
    return profile_of(engine, requests, len(prompts), trace, num_steps, seconds)


def check_file(trace: Path) -> None:
    """Makes the file ``trace``; raises KernelcatError if it cannot be written."""
    try:
        trace.touch()
    except OSError as error:
        raise KernelcatError(f"{trace} cannot be written: {error.strerror}") from error


@contextmanager
def writing(engine: Engine, prompts: Sequence[Sequence[int]]) -> Iterator[list[Request]]:
    """Requests that write greedy tokens up to the engine's context; cancelled in the end.

    A step may be in flight then. Raises what `Engine.submit` raises.
    """
    requests: list[Request] = []
    try:
        for prompt in prompts:
            most = engine.limits.context - len(prompt)
            parameters = SamplingParameters(temperature=0, max_tokens=most)
            requests.append(engine.submit(prompt, parameters, needs_text=False))
        yield requests
    finally:
        for request in requests:
            engine.cancel(request.id)


@contextmanager
def recorded(engine: Engine) -> Iterator[torch.profiler.profile]:
    """Records what this thread does, and the engine's device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if engine.model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with ranges.for_profiler(), torch.profiler.profile(activities=activities) as profiler:
        yield profiler


def take_steps(engine: Engine, num_steps: int) -> float:
    """Seconds of ``num_steps`` steps, in the range `WINDOW`, after `NUM_WARM` others.

    Raises what `take_step` raises.
    """
    for _ in range(NUM_WARM):
        take_step(engine)
    _synchronize(engine)
    start = time.perf_counter()
    with ranges.span(WINDOW):
        for _ in range(num_steps):
            take_step(engine)
        _synchronize(engine)
    return time.perf_counter() - start


def take_step(engine: Engine) -> None:
    """A step in which no request may end.

    Raises
    ------
    InvalidArgument
        A request has ended, because the engine's context is too short.
    KernelcatError
        A request has failed.
    """
    for output in engine.step():
        if output.error:
            raise KernelcatError(f"a request has failed: {output.error}")
        if output.finish_reason:
            raise InvalidArgument(
                f"the context of {engine.limits.context} tokens is too short to profile: a request "
                "has ended before the last step; write more tokens, or give shorter prompts"
            )


def profile_of(
    engine: Engine, requests: Sequence[Request], batch: int, trace: Path, num_steps: int,
    seconds: float,
) -> StepProfile:  # fmt: skip
    """The summary of ``trace``, which has ``num_steps`` steps that took ``seconds`` together.

    ``requests`` are those of the engine, ``batch`` counts those of all ranks.
    """
    model, num_own = engine.model, len(requests)
    written = sum(request.num_written for request in requests) // num_own
    context = len(requests[0].prompt) + written - num_steps // 2
    dtype = cache_type(model, engine.settings.cache_dtype)
    is_cuda = model.device.type == "cuda"
    return StepProfile(
        batch=batch, context=context, steps=num_steps, step_us=1e6 * seconds / num_steps,
        floor_bytes=step_bytes(model, num_own, context, dtype, batch - num_own),
        bandwidth=bandwidth_of(detect(model.device.index or 0)) if is_cuda else None,
        trace=str(trace), ranks=model.divided.exchange.ranks if model.divided else 1,
        **summary(_events(trace), num_steps),
    )  # fmt: skip


def _synchronize(engine: Engine) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)


# ---- the summary --------------------------------------------------------------------------------


def _events(trace: Path) -> list[dict[str, Any]]:
    """The complete events of a trace."""
    data = trace.read_bytes()
    data = gzip.decompress(data) if trace.suffix == ".gz" else data
    return [event for event in json.loads(data)["traceEvents"] if event.get("ph") == "X"]


def summary(events: Iterable[Mapping[str, Any]], num_steps: int) -> dict[str, Any]:
    """Fields of `StepProfile` from events with cat, name, ts and dur (microseconds).

    Those that begin within the range `WINDOW` count; its time is that of ``num_steps`` steps.
    """
    events = list(events)
    window = next(e for e in events if e["name"] == WINDOW and e["cat"] == "user_annotation")
    start, stop = window["ts"], window["ts"] + window["dur"]
    events = sorted((e for e in events if start <= e["ts"] <= stop), key=lambda e: e["ts"])
    phases = dict.fromkeys(ranges.PHASES, 0.0)
    for event in events:
        if event["cat"] == "user_annotation" and event["name"] in phases:
            phases[event["name"]] += event["dur"] / num_steps
    # name -> launches, microseconds alone, microseconds from begin to end, gaps before it
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    first = end = None
    for event in (e for e in events if e["cat"] in ON_DEVICE):
        begin, finish = event["ts"], event["ts"] + event["dur"]
        first, end = (begin, begin) if first is None or end is None else (first, end)
        parts = 1.0, max(0.0, finish - max(begin, end)), event["dur"], max(0.0, begin - end)
        for i, part in enumerate(parts):
            totals[event["name"]][i] += part / num_steps
        end = max(end, finish)
    kernels = sorted((KernelTime(name, *parts) for name, parts in totals.items()), key=_order)
    busy, gap = (sum(getattr(k, name) for k in kernels) for name in ("us", "gap_us"))
    return {
        "kernels": tuple(kernels), "phases": phases, "device_us": busy + gap, "busy_us": busy,
        "gap_us": gap,
    }  # fmt: skip


def _order(kernel: KernelTime) -> float:
    return -kernel.us


def _phase_sheet(profile: StepProfile) -> Sheet:
    lines = [(name, f"{us:,.1f}") for name, us in profile.phases.items()]
    notes = [
        f"{profile.step_us:,.1f} us a step, mean of {profile.steps}; no kernel ran on a device.",
        _floor(profile),
        f"Trace: {profile.trace}",
    ]
    return Sheet(_title(profile), ("phase of the host", "us a step"), lines, notes, slice(1, None))


def _kernel_sheet(profile: StepProfile) -> Sheet:
    headers = ("kernel", "launches", "us a step", "share", "us begin to end", "gap before, us")
    rows = [
        (
            k.name[:MAX_NAME], f"{k.launches:g}", f"{k.us:,.1f}", f"{k.us / profile.device_us:.1%}",
            f"{k.duration_us:,.1f}", f"{k.gap_us:,.1f}",
        )
        for k in profile.kernels
    ]  # fmt: skip
    total = (
        "all", f"{sum(k.launches for k in profile.kernels):g}", f"{profile.busy_us:,.1f}",
        f"{profile.busy_us / profile.device_us:.1%}", "", f"{profile.gap_us:,.1f}",
    )  # fmt: skip
    phases = ", ".join(f"{name} {us:,.0f}" for name, us in profile.phases.items())
    notes = [
        f"A step, mean of {profile.steps}: {profile.device_us:,.1f} us on the device, "
        f"{profile.step_us:,.1f} us by the host's clock while it is recorded; us of the host: "
        f"{phases}.",
        _floor(profile),
        "us a step: while no kernel ran that began before; with the gaps they add up to the step.",
        f"Trace: {profile.trace}",
    ]
    return Sheet(_title(profile), headers, rows, notes, slice(1, None), total)


def _title(profile: StepProfile) -> str:
    title = f"one decode step, batch {profile.batch}, context {profile.context}"
    return title if profile.ranks == 1 else f"{title}; rank 0 of {profile.ranks}"


def _floor(profile: StepProfile) -> str:
    """The byte floor in a sentence."""
    gigabytes = f"{profile.floor_bytes / 1e9:.3g} GB must be read"
    if not (profile.floor_us and profile.floor_share and profile.bandwidth):
        return f"{gigabytes}."
    return (
        f"{gigabytes}: {profile.floor_us:,.1f} us at {profile.bandwidth / 1e12:.2f} TB/s, "
        f"{profile.floor_share:.0%} of the step's time."
    )
