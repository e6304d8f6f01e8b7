"""What `kernelcat show` and `kernelcat inspect` print, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import LANGUAGES, Config, Implementation
from kernelcat.catalog.spec import Derived, Entry, Problem
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.report.board import load
from kernelcat.runtime.gpu import Gpu
from kernelcat.verify import code_record, receipts
from kernelcat.verify import inspect as machine


def card(name: str) -> dict[str, Any]:
    """Everything about an entry that needs no compilation, as JSON data.

    Raises ``UnknownName`` if there is no such entry.
    """
    entry = catalog.entry(name)
    return {
        "entry": entry.name,
        "summary": entry.summary,
        "work_in_progress": entry.work_in_progress,
        "axes": {a.name: {"doc": a.doc, "values": a.values} for a in entry.axes},
        "inputs": {t.name: _tensor(t) for t in entry.inputs},
        "outputs": {t.name: _tensor(t) for t in entry.outputs},
        "problems": {n: p.values for n, p in entry.problems.items()},
        "peers": [peer.name for peer in entry.peers],
        "signal": _signal(entry) if entry.signal else {},
        "implementations": _implementations(entry),
        "missing": _missing(entry),
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    shape = [str(size) if isinstance(size, Derived) else size for size in tensor.shape]
    facts = {"dtype": str(tensor.dtype), "doc": tensor.doc, "flag": tensor.flag}
    return {"shape": shape, **facts, "updated": tensor.updated}


def _implementations(entry: Entry) -> list[dict[str, Any]]:
    rows = []
    for implementation in catalog.implementations(entry.name):
        valid = receipts.valid_for(implementation, receipts.known())
        rows.append(
            {
                "language": implementation.language,
                "variant": implementation.variant,
                "archs": implementation.archs,
                "techniques": dict(implementation.techniques),
                "summary": implementation.summary,
                "verified_on": sorted({r.gpu for r in valid}),
                "unverified": receipts.doubt(implementation),
            }
        )
    return rows


def _signal(entry: Entry) -> dict[str, Any]:
    """Signal to quantization noise in dB, by named problem: the required one and the measured ones.

    Measured values are those of today's code and of peers, each from its newest row.
    """
    assert entry.signal is not None
    measured: dict[str, dict[str, float]] = {name: {} for name in entry.problems}
    for row in sorted(load(entry=entry.name), key=lambda row: row.created_at):
        owner = f"{row.language}/{row.variant}"
        name = entry.problem_name(row.to_problem())
        if name is not None and row.sqnr_db is not None and code_record.is_current(row):
            measured[name][owner] = row.sqnr_db
    required = {name: entry.signal.least(problem) for name, problem in entry.problems.items()}
    return {
        name: {"least_db": required[name], "measured_db": values}
        for name, values in measured.items()
    }


def _missing(entry: Entry) -> dict[str, str]:
    """Language that is not installed -> the message that says how to install it."""
    missing = {}
    for language in LANGUAGES:
        try:
            catalog.in_language(entry.name, language)
        except MissingDependency as error:
            missing[language] = str(error)
    return missing


def text(card: dict[str, Any]) -> str:
    """The card for a terminal."""
    mark = " (work in progress)" if card["work_in_progress"] else ""
    lines = [f"{card['entry']}{mark}: {card['summary']}", "", "axes"]
    lines += [f"  {name:<12} {axis['doc']}{_values(axis)}" for name, axis in card["axes"].items()]
    for kind in ("inputs", "outputs"):
        lines += ["", kind]
        for name, tensor in card[kind].items():
            shape = ", ".join(map(str, tensor["shape"]))
            how = ", optional" if tensor["flag"] else ", updated" if tensor["updated"] else ""
            lines.append(f"  {name:<12} ({shape}) {tensor['dtype']}{how}: {tensor['doc']}")
    lines += ["", "implementations"]
    lines += [_line(row) for row in card["implementations"]]
    lines += [f"  {language}: {why}" for language, why in card["missing"].items()]
    lines += _signal_lines(card["signal"])
    lines += ["", f"problems: {', '.join(card['problems'])}", f"peers: {', '.join(card['peers'])}"]
    return "\n".join(lines)


def _signal_lines(signal: dict[str, Any]) -> list[str]:
    """A line for each problem that was measured, and one line for the limits of the others."""
    if not signal:
        return []
    lines = ["", "signal to quantization noise, dB"]
    for name, row in signal.items():
        if row["measured_db"]:
            values = ", ".join(f"{owner} {db:.1f}" for owner, db in row["measured_db"].items())
            limit = f"at least {row['least_db']}" if row["least_db"] else "no limit"
            lines.append(f"  {name:<22} {limit}: {values}")
    unmeasured = {row["least_db"] for row in signal.values() if not row["measured_db"]}
    limits = sorted(limit for limit in unmeasured if limit is not None)
    if limits:
        lines.append(f"  not measured yet: at least {' or '.join(map(str, limits))}")
    return lines


def _values(axis: dict[str, Any]) -> str:
    return f" ({', '.join(map(str, axis['values']))})" if axis["values"] else ""


def _line(row: dict[str, Any]) -> str:
    state = f"unverified: {row['unverified']}" if row["unverified"] else _verified(row)
    name = f"{row['language']}/{row['variant']}"
    return f"  {name:<22} {','.join(row['archs']):<16} [{state}] {row['summary']}"


def _verified(row: dict[str, Any]) -> str:
    return f"verified on {', '.join(row['verified_on'])}" if row["verified_on"] else "no receipt"


def machine_code(
    implementation: Implementation, gpu: Gpu, problem: Problem | None, sass: bool
) -> dict[str, Any]:
    """Build the default configuration, and report the machine code of each step as JSON data.

    Parameters
    ----------
    problem : default: the first named problem that the implementation serves
    sass : whether the report has the disassembly

    Raises
    ------
    Unsupported
        The implementation does not serve the problem.
    CompileError, MissingDependency
        From the compiler or the disassembler.
    """
    (report,) = machine_codes([implementation], gpu, problem, sass)
    return report


def machine_codes(
    implementations: Sequence[Implementation],
    gpu: Gpu,
    problem: Problem | None = None,
    sass: bool = False,
) -> list[dict[str, Any]]:
    """The reports of :func:`machine_code`, by one run of the disassembler."""
    built = [_built(implementation, gpu, problem) for implementation in implementations]
    reports = iter(machine.inspect_all([a for _, _, artifacts in built for a in artifacts]))
    return [
        _machine_report(implementation, gpu, *parts, list(islice(reports, len(parts[2]))), sass)
        for implementation, parts in zip(implementations, built, strict=True)
    ]


def _built(
    implementation: Implementation, gpu: Gpu, problem: Problem | None
) -> tuple[Problem, Config, list[jit.Artifact]]:
    """A problem that is served, its default configuration, and the artifacts of all steps."""
    named = catalog.entry(implementation.entry).problems.values()
    for candidate in [problem] if problem else named:
        config = implementation.default(candidate, gpu)
        reason = implementation.why_not(config, candidate, gpu)
        if reason is None:
            steps = implementation.program(candidate, config, gpu).steps
            return candidate, config, [jit.build(step.source, gpu.arch) for step in steps]
    raise Unsupported(f"{implementation.name}: {reason}")


def _machine_report(
    implementation: Implementation,
    gpu: Gpu,
    problem: Problem,
    config: Config,
    artifacts: list[jit.Artifact],
    reports: list[machine.Report],
    sass: bool,
) -> dict[str, Any]:
    return {
        "implementation": implementation.name,
        "arch": gpu.arch,
        "problem": problem.values,
        "config": dict(config),
        "techniques": machine.proofs(implementation, reports),
        "instructions": dict(implementation.techniques),
        "steps": [_step(*parts, sass) for parts in zip(artifacts, reports, strict=True)],
    }


def _step(artifact: jit.Artifact, report: machine.Report, sass: bool) -> dict[str, Any]:
    step = {
        "kernel": artifact.kernel,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "shared_bytes": report.shared_bytes,
        "opcodes": dict(report.opcodes.most_common()),
    }
    return step | {"sass": machine.disassemble(artifact.cubin)} if sass else step


def machine_text(report: dict[str, Any]) -> str:
    """The report of :func:`machine_code` for a terminal."""
    lines = [f"{report['implementation']} for {report['arch']}, {report['config']}"]
    for technique, is_proven in report["techniques"].items():
        instruction = report["instructions"][technique]
        lines.append(f"  {'proven' if is_proven else 'MISSING'}  {technique} by {instruction}")
    for step in report["steps"]:
        lines.append(
            f"  {step['kernel'][:70]}: {step['registers']} registers, "
            f"{step['spill_bytes']} bytes spilled, {step['shared_bytes']} bytes of shared memory"
        )
        lines += [step["sass"]] if "sass" in step else []
    return "\n".join(lines)
