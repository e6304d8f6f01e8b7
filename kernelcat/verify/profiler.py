"""Counting bytes with NVIDIA's Nsight Compute, one launch at a time with cold caches.

``ncu`` runs ``python -m kernelcat.verify.profiler`` (the target, a separate process) and profiles
the call between ``cuProfilerStart`` and ``cuProfilerStop``. It empties all caches before each
replay of the call, and does not change the clocks.
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
from kernelcat.runtime import children
from kernelcat.runtime.environment import NONE, Environment
from kernelcat.runtime.gpu import Gpu
from kernelcat.verify.profiles import Counts, Profile

PROFILED_S = 300
"""Seconds after which a profiled run counts as hung."""
SECTOR_BYTES = 32
"""Bytes of a sector, the unit of a transfer between L2 and an SM."""

DURATION = "gpu__time_duration.sum"
METRICS: dict[str, tuple[str, int]] = {
    "dram_read_bytes": ("dram__bytes_read.sum", 1),
    "dram_write_bytes": ("dram__bytes_write.sum", 1),
    "l2_bytes": ("lts__t_bytes.sum", 1),
    "l2_read_bytes": ("lts__t_sectors_srcunit_tex_op_read.sum", SECTOR_BYTES),
    "sm_read_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1),
}
"""Field of :class:`~kernelcat.verify.profiles.Counts` -> metric, and the bytes of one count."""

_SCALES = {"": 1, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT = re.compile(r"([numKMGT]?)(byte|sector|second|s)$")

_ADVICE = {
    "ERR_NVGPUCTRPERM": "Nsight Compute may not read this GPU's counters: run as root, or load the "
    "driver with NVreg_RestrictProfilingToAdminUsers=0",
    "No kernels were profiled": "Nsight Compute found no launch: it does not support this GPU or "
    "driver; use the ncu of the driver's CUDA version",
}
"""Part of what Nsight Compute prints -> the message for the user, if the target had no error."""


def ncu_path() -> str:
    """Path of Nsight Compute's command line tool, from ``$PATH`` or the CUDA toolkit.

    Raises
    ------
    MissingDependency
        There is no ncu.
    """
    on_path = shutil.which("ncu")
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = Path(root) / "bin" / "ncu"
    if on_path is None and not path.is_file():
        raise MissingDependency(
            "profiling needs ncu (Nsight Compute): apt-get install cuda-nsight-compute-13-0, or "
            "install the CUDA toolkit"
        )
    return on_path or str(path)


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
        is_exact = (choice.gpu, choice.problem, choice.kind) == (gpu.sku, problem, "measured")
        is_measured = is_exact and (choice.language, choice.variant) == owner
        is_legal = implementation.why_not(choice.config, problem, gpu) is None
        if is_measured and is_legal and choice.doubt is None:
            return choice.config
    config = implementation.default(problem, gpu)
    reason = implementation.why_not(config, problem, gpu)
    if reason:
        raise Unsupported(f"{implementation.name}: {reason}")
    return config


def configuration(
    implementation: Implementation, problem: Problem, gpu: Gpu, parameters: Mapping[str, object]
) -> Config:
    """The configuration of :func:`best` with ``parameters`` in place of its own values.

    ``parameters`` maps names to values; a value may be a text (``"128"`` for 128).

    Raises
    ------
    Unsupported
        The implementation has no such parameter or value, or does not serve the problem with it.
    """
    values = dict(best(implementation, problem, gpu))
    for name, word in parameters.items():
        choices = implementation.space.get(name, ())
        matches = [value for value in choices if str(value).lower() == str(word).lower()]
        if not matches:
            offers = ", ".join(map(str, choices or implementation.space))
            raise Unsupported(f"{implementation.name} has no {name}={word}; there is: {offers}")
        values[name] = matches[0]
    config = Config(values)
    reason = implementation.why_not(config, problem, gpu)
    if reason:
        raise Unsupported(f"{implementation.name}: {reason}")
    return config


def profile(
    implementation: Implementation,
    problem: Problem,
    gpu: Gpu,
    parameters: Mapping[str, object] | None = None,
) -> Profile:
    """Count the bytes that one call of ``implementation`` moves, in its best configuration.

    ``parameters`` maps parameters of the configuration to the values that replace the best ones.

    Raises
    ------
    MissingDependency
        There is no ncu, or ncu may not read the counters of this machine.
    Unsupported
        The implementation does not serve the problem, or has no such configuration.
    KernelcatError
        Nsight Compute or the kernel failed; the message is one line.
    """
    ncu, config = ncu_path(), configuration(implementation, problem, gpu, parameters or {})
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
        asked=bool(parameters),
    )


def command(ncu: str) -> list[str]:
    """The command line that profiles the target process; the target's arguments follow."""
    metrics = ",".join((DURATION, *(metric for metric, _ in METRICS.values())))
    return [
        *(ncu, "--metrics", metrics, "--csv", "--page", "raw", "--print-units", "base"),
        *("--profile-from-start", "off", "--cache-control", "all", "--clock-control", "none"),
        *children.python("kernelcat.verify.profiler"),
    ]


def parse(output: str) -> Counts:
    """The counts in what ``ncu --csv --page raw`` printed.

    The table has a line of headers, a line of units, and a line for each launch.

    Raises
    ------
    MissingDependency
        Nsight Compute cannot count on this machine.
    KernelcatError
        Nothing was counted; the message gives the first error that the target or ncu printed.
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
    """Sum of a metric over the launches, in bytes, sectors or seconds; None without a count."""
    unit = _UNIT.match(units.get(metric) or "")
    cells = [launch.get(metric) or "n/a" for launch in launches]
    if unit is None or "n/a" in cells:
        return None
    return _SCALES[unit[1]] * sum(float(cell.replace(",", "")) for cell in cells)


def _complaint(output: str) -> KernelcatError:
    """The error for a run that counted nothing.

    In this order: the target's exception, advice from :data:`_ADVICE`, ncu's first error.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    exceptions = [s for s in lines if re.match(r"[\w.]+(Error|Unsupported|Dependency): ", s)]
    for sign, advice in _ADVICE.items():
        if sign in output and not exceptions:
            return MissingDependency(advice)
    errors = [line for line in lines if line.startswith("==ERROR==")]
    first = (exceptions or errors or lines or ["ncu printed nothing"])[0]
    return KernelcatError(f"nothing was profiled: {first}")


def _run(words: Sequence[str]) -> str:
    try:
        done = children.run(words, timeout=PROFILED_S)
    except subprocess.TimeoutExpired as error:
        raise KernelcatError(f"nothing was profiled: no end after {PROFILED_S} s") from error
    return done.stdout + done.stderr


def _version(ncu: str) -> str:
    done = children.run([ncu, "--version"])
    match = re.search(r"Version ([\d.]+)", done.stdout)
    return match[1] if match else NONE


def main() -> None:
    """The target process. Arguments: ``ENTRY LANGUAGE VARIANT PROBLEM CONFIG``, the last two JSON.

    Calls the implementation once to load its code, and once between the profiler's start and stop.
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
