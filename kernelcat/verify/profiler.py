"""Counting bytes with NVIDIA's Nsight Compute, one launch at a time with cold caches.

``ncu`` runs ``python -m kernelcat.verify.profiler`` (the target: a process of its own), profiles
the one call between the driver's profiler marks, empties all caches before each of its replays, and
leaves the clocks alone.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError, MissingDependency, Unsupported
from kernelcat.runtime.environment import NONE, Environment
from kernelcat.runtime.gpu import Gpu
from kernelcat.verify.profiles import Counts, Profile

PROFILED_S = 300
"""Seconds after which a profiled run counts as hung."""
SECTOR_BYTES = 32

DURATION = "gpu__time_duration.sum"
METRICS: dict[str, tuple[str, int]] = {
    "dram_read_bytes": ("dram__bytes_read.sum", 1),
    "dram_write_bytes": ("dram__bytes_write.sum", 1),
    "l2_bytes": ("lts__t_bytes.sum", 1),
    "l2_read_bytes": ("lts__t_sectors_srcunit_tex_op_read.sum", SECTOR_BYTES),
    "sm_read_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1),
}
"""Field of :class:`~kernelcat.verify.profiles.Counts` -> the metric, and the bytes it counts in."""

_SCALES = {"": 1, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT = re.compile(r"([numKMGT]?)(byte|sector|second|s)$")

_ADVICE = {
    "ERR_NVGPUCTRPERM": "Nsight Compute may not read this GPU's counters: run as root, or load the "
    "driver with NVreg_RestrictProfilingToAdminUsers=0",
    "No kernels were profiled": "Nsight Compute saw no launch: it does not support this machine's "
    "GPU or driver; use the ncu of the driver's CUDA version",
}
"""What Nsight Compute says, where the target itself does not complain -> the line to print."""


def ncu_path() -> str:
    """Nsight Compute's command line, on the path or in the CUDA toolkit.

    Raises
    ------
    MissingDependency
        It is not there.
    """
    found = shutil.which("ncu")
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = Path(root) / "bin" / "ncu"
    if found is None and not path.is_file():
        raise MissingDependency(
            "profiling needs ncu (Nsight Compute): apt-get install cuda-nsight-compute-13-0, or "
            "install the CUDA toolkit"
        )
    return found or str(path)


def best(implementation: Implementation, problem: Problem, gpu: Gpu) -> Config:
    """The best configuration measured for exactly this problem and GPU, else the default.

    Raises
    ------
    Unsupported
        The implementation does not serve the problem.
    """
    from kernelcat.store import snapshot

    owner = (implementation.language, implementation.variant)
    for choice in snapshot().choices(implementation.entry):
        here = (choice.gpu, choice.problem, choice.kind) == (gpu.sku, problem, "measured")
        known = here and (choice.language, choice.variant) == owner
        if known and implementation.why_not(choice.config, problem, gpu) is None:
            return choice.config
    config = implementation.default(problem, gpu)
    reason = implementation.why_not(config, problem, gpu)
    if reason:
        raise Unsupported(f"{implementation.name}: {reason}")
    return config


def configuration(
    implementation: Implementation, problem: Problem, gpu: Gpu, asked: Mapping[str, object]
) -> Config:
    """:func:`best` with the parameters of ``asked`` in place; ``"128"`` means 128, too.

    Raises
    ------
    Unsupported
        The implementation has no such parameter or value, or does not serve the problem with it.
    """
    values = dict(best(implementation, problem, gpu))
    for name, word in asked.items():
        has = implementation.space.get(name, ())
        like = [value for value in has if str(value).lower() == str(word).lower()]
        if not like:
            offers = ", ".join(map(str, has or implementation.space))
            raise Unsupported(f"{implementation.name} has no {name}={word}; there is: {offers}")
        values[name] = like[0]
    config = Config(values)
    reason = implementation.why_not(config, problem, gpu)
    if reason:
        raise Unsupported(f"{implementation.name}: {reason}")
    return config


def profile(
    implementation: Implementation,
    problem: Problem,
    gpu: Gpu,
    asked: Mapping[str, object] | None = None,
) -> Profile:
    """Count what one call of ``implementation`` moves, in its best configuration.

    ``asked`` holds parameters that shall have other values.

    Raises
    ------
    MissingDependency
        There is no ncu, or it may not count on this machine.
    Unsupported
        The implementation does not serve the problem, or has no such configuration.
    KernelcatError
        Nsight Compute or the kernel failed; one line that says how.
    """
    ncu, config = ncu_path(), configuration(implementation, problem, gpu, asked or {})
    entry, language, variant = implementation.name.split("/")
    counts = parse(_run([*command(ncu), entry, language, variant, problem.key, config.key]))
    return Profile(
        entry=entry,
        language=language,
        variant=variant,
        source=digest(implementation),
        gpu=gpu.sku,
        problem=problem.values,
        problem_name=catalog.entry(entry).problem_name(problem),
        config=dict(config),
        counts=counts,
        environment=Environment.capture(gpu, 0).to_json(),
        profiler=_version(ncu),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        asked=bool(asked),
    )


def command(ncu: str) -> list[str]:
    """How the target process is profiled; its arguments follow."""
    metrics = ",".join((DURATION, *(metric for metric, _ in METRICS.values())))
    return [
        *(ncu, "--metrics", metrics, "--csv", "--page", "raw", "--print-units", "base"),
        *("--profile-from-start", "off", "--cache-control", "all", "--clock-control", "none"),
        *(sys.executable, "-m", "kernelcat.verify.profiler"),
    ]


def parse(output: str) -> Counts:
    """The counts in what ``ncu --csv --page raw`` printed: a line of units, then one a launch.

    Raises
    ------
    MissingDependency
        Nsight Compute cannot count on this machine.
    KernelcatError
        Nothing was counted; says why, as far as anybody tells.
    """
    table = [line for line in output.splitlines() if line.startswith('"')]
    if len(table) < 3:
        raise _complaint(output)
    units, *launches = csv.DictReader(table)
    totals = {field: _total(launches, units, metric) for field, (metric, _) in METRICS.items()}
    counts = {
        field: None if total is None else round(total * METRICS[field][1])
        for field, total in totals.items()
    }
    seconds = _total(launches, units, DURATION)
    missing = [METRICS[f][0] for f in ("dram_read_bytes", "dram_write_bytes") if counts[f] is None]
    if missing or seconds is None:
        raise KernelcatError(f"Nsight Compute does not count {missing or DURATION} on this GPU")
    fields: dict[str, Any] = counts
    return Counts(launches=len(launches), duration_us=round(seconds * 1e6, 3), **fields)


def _total(
    launches: Sequence[Mapping[str, str]], units: Mapping[str, str], metric: str
) -> float | None:
    """Sum over the launches, in bytes, sectors or seconds; None where it is not counted."""
    unit = _UNIT.match(units.get(metric) or "")
    cells = [launch.get(metric) or "n/a" for launch in launches]
    if unit is None or "n/a" in cells:
        return None
    return _SCALES[unit[1]] * sum(float(cell.replace(",", "")) for cell in cells)


def _complaint(output: str) -> KernelcatError:
    """Why a run counted nothing: the target's own error, known advice, or the first complaint."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Unsupported|Dependency): ", line)]
    for sign, advice in _ADVICE.items():
        if sign in output and not raised:
            return MissingDependency(advice)
    said = [line for line in lines if line.startswith("==ERROR==")]
    first = (raised or said or lines or ["ncu said nothing"])[0]
    return KernelcatError(f"nothing was profiled: {first}")


def _run(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=PROFILED_S
        )
    except subprocess.TimeoutExpired as error:
        raise KernelcatError(f"nothing was profiled: no end in {PROFILED_S} s") from error
    return done.stdout + done.stderr


def _version(ncu: str) -> str:
    done = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"Version ([\d.]+)", done.stdout)
    return found[1] if found else NONE


def main() -> None:
    """The target: ``ENTRY LANGUAGE VARIANT PROBLEM CONFIG``, the last two as JSON.

    Runs once to load the code, and once between the marks.
    """
    from cuda.bindings import driver

    from kernelcat.runtime.device import CudaDevice
    from kernelcat.verify import gate

    entry, language, variant, axes, config = sys.argv[1:]
    problem, device = Problem.of(entry, **json.loads(axes)), CudaDevice(0)
    implementation = catalog.implementation(entry, language, variant)
    [arrays] = gate.allocate(catalog.entry(entry), problem, device)
    run = device.load(implementation, problem, Config(json.loads(config)))(arrays)
    run()
    device.synchronize()
    driver.cuProfilerStart()
    run()
    device.synchronize()
    driver.cuProfilerStop()


if __name__ == "__main__":
    main()
