"""NVIDIA's compute-sanitizer over a small fuzz run of one implementation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kernelcat.catalog.implementation import Implementation
from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.runtime import children

MISSING = "compute-sanitizer is not on the path: install the CUDA toolkit"
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED_SIZE = 160
"""Largest value of a size axis under the sanitizer, which makes kernels 10 to 100 times slower."""
SANITIZED_S = 300
"""Seconds after which a sanitized run counts as hung."""
EXAMPLE = "kernelcat example: "
"""Prefix of the line that a sanitized fuzz run prints before each example."""
ORDERED = "kernelcat ordered: "
"""Prefix of the line before the example's: pairs of a write and a read that a barrier orders
(``gemm+0x40>gemm+0x90``)."""
MAPPED = "kernelcat mapped: "
"""Prefix of the line before a rank's launches: the memory of all ranks as this rank maps it, each
with the rank and its first and last address (``1:0x7f10-0x7f1f``)."""
FINDINGS = 5
"""Most distinct findings that a report has of each tool."""
FINDING_LINES = 6
"""Most lines of a finding that a report has; a race may list every access that takes part."""
TOOL_OPTIONS = {
    # Reports each byte with the kind of hazard, the address and the threads. The default report,
    # "analysis", has only pairs of instructions.
    "racecheck": ("--racecheck-report", "hazard", "--print-limit", "10000"),
    # A kernel with a ring for each warp has more barriers than synccheck tracks by default, and
    # synccheck counts the overflow as an error.
    "synccheck": ("--num-cuda-barriers", "1024"),
}

_SANITIZER_LINE = re.compile(r"={8,} (?P<indent> *)(?P<text>\S.*)")
_NO_FINDING = re.compile(
    r"COMPUTE-SANITIZER|\w+ SUMMARY: |Target application returned|Warning: Maximum number|"
    r"Current Value"
)
_PLACE = re.compile(r"(Read|Write) Thread \([\d,]+\) at (\S+)")
_ORDERED = re.compile(r"(\S+)>(\S+)")
_MAPPED = re.compile(r"(\d+):(0x[0-9a-f]+)-(0x[0-9a-f]+)")
_OUTSIDE = re.compile(r"(?:Access to|Address) (0x[0-9a-f]+) is out of bounds")
_COUNT = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_UNTRACKED = "Internal Sanitizer Error"
"""What a tool prints about a launch that it did not watch, so that errors are missing."""
_NUMBERS = re.compile(r"(?<!\+)\b(0x[0-9a-f]+|\d[\d,]*)\b")
"""Threads, addresses and counts, but not the offset of an instruction (after a ``+``)."""


@dataclass(frozen=True)
class Report:
    """What one compute-sanitizer tool found.

    Attributes
    ----------
    errors : number of errors or hazards, without the ordered ones
    findings : the first distinct findings, one line each
    ordered : number of hazards between accesses that a barrier orders, as the machine code proves
        (:mod:`kernelcat.verify.warp_roles`)
    """

    errors: int
    findings: tuple[str, ...] = ()
    ordered: int = 0


@dataclass(frozen=True)
class Output:
    """What a tool and the process under it printed, and the tool's exit status."""

    text: str
    code: int

    @property
    def errors(self) -> int | None:
        """The number of errors that the tool printed, or None."""
        match = _COUNT.search(self.text)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class _Mapped:
    """Memory of rank ``rank`` from address ``first`` to ``last``."""

    rank: int
    first: int
    last: int


@dataclass
class _Record:
    """One finding: the tool's lines, the example that ran, and what is known about its memory.

    ``ordered`` are the accesses known to be ordered, ``mapped`` is the memory of all ranks.
    """

    lines: list[str]
    example: str
    ordered: frozenset[tuple[str, str]]
    mapped: tuple[_Mapped, ...] = ()

    def __str__(self) -> str:
        text = ", ".join(self.lines[:FINDING_LINES])
        return f"{text}; {self.example}".rstrip("; ")

    @property
    def is_ordered(self) -> bool:
        """Whether the finding is a read after a write, and a barrier is known to order the two."""
        text = " ".join(self.lines)
        offsets = dict(_PLACE.findall(text))
        pair = offsets.get("Write", ""), offsets.get("Read", "")
        return "Potential RAW hazard" in text and pair in self.ordered

    @property
    def mapped_from(self) -> int | None:
        """The rank in whose memory an access lies that the tool takes for one out of bounds."""
        match = _OUTSIDE.search(" ".join(self.lines))
        address = int(match[1], 16) if match else -1
        return next((m.rank for m in self.mapped if m.first <= address <= m.last), None)


def command_line(verb: str, implementation: Implementation) -> list[str]:
    """The command that runs ``kernelcat VERB`` on one implementation in a separate process."""
    return [
        *children.python("kernelcat", verb, implementation.entry),
        *("--language", implementation.language, "--variant", implementation.variant),
    ]


def sanitizer_path() -> str | None:
    """Path of compute-sanitizer, from ``$PATH`` or the CUDA toolkit; None where there is none."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        return on_path
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = Path(root) / "bin" / "compute-sanitizer"
    return str(path) if path.is_file() else None


def sanitize(
    implementation: Implementation, examples: int, tools: Sequence[str] = SANITIZERS
) -> dict[str, Report]:
    """Run each compute-sanitizer tool over a fuzz run of ``examples`` random problems.

    The same run without a tool comes first, so that no kernel is compiled under a tool. The CuTe
    DSL, which compiles, loads NVIDIA's Python bindings of the driver. These ask for the functions
    of newer drivers too, and memcheck reports each of the driver's refusals as an error.

    Returns tool -> report.

    Raises
    ------
    MissingDependency
        There is no compute-sanitizer (part of the CUDA toolkit).
    KernelcatError
        The run without a tool failed; or a tool failed, printed no number of errors, or took more
        than :data:`SANITIZED_S` seconds.
    """
    if sanitizer_path() is None:
        raise MissingDependency(MISSING)
    fuzzing = [*command_line("fuzz", implementation), "--examples", str(examples)]
    fuzzing += ["--limit", str(SANITIZED_SIZE), "--kernels", "6"]
    _rehearse(fuzzing)
    return {tool: run(tool, [*fuzzing, "--mirrored"]) for tool in tools}


def _rehearse(words: Sequence[str]) -> None:
    """Run a command without a tool: it compiles kernels, and must not fail."""
    try:
        done = children.run(words, timeout=SANITIZED_S)
    except subprocess.TimeoutExpired as error:
        raise KernelcatError(f"fuzz before the sanitizer: no end after {SANITIZED_S} s") from error
    if done.returncode:
        tail = " | ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
        raise KernelcatError(
            f"fuzz before the sanitizer: {children.ending(done.returncode)}: {tail}"
        )


def tool_command(tool: str) -> list[str]:
    """The words before a command that run it under a tool.

    Raises ``MissingDependency`` where there is no compute-sanitizer.
    """
    sanitizer = sanitizer_path()
    if sanitizer is None:
        raise MissingDependency(MISSING)
    options = ["--show-backtrace", "no", "--demangle", "simple"]
    return [sanitizer, "--tool", tool, *options, *TOOL_OPTIONS.get(tool, ())]


def run(tool: str, words: Sequence[str]) -> Report:
    """Run the command ``words`` under a tool; raises as :func:`sanitize` does."""
    try:
        done = children.run(
            [*tool_command(tool), *words],
            stderr=subprocess.STDOUT,  # keeps the order of both outputs
            timeout=SANITIZED_S,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelcatError(
            f"compute-sanitizer --tool {tool}: no end after {SANITIZED_S} s"
        ) from error
    return parse(tool, done.stdout, done.returncode)


def parse(tool: str, output: str, code: int) -> Report:
    """The report in the ``output`` of a tool that ended with exit status ``code``.

    Raises
    ------
    KernelcatError
        The tool printed no number of errors, counted none although the run failed, or did not
        watch a launch.
    """
    return parse_all(tool, {"": Output(output, code)})


def parse_all(tool: str, outputs: Mapping[str, Output]) -> Report:
    """The report of several processes that ran under a tool at the same time.

    ``outputs`` are theirs by the name of the process (``rank 1``). A process that printed no number
    of errors counts for nothing where another one has errors: it may have ended for them.

    Raises
    ------
    KernelcatError
        As :func:`parse`, for any of the processes; or memcheck does not know memory that another
        process has allocated.
    """
    total = sum(output.errors or 0 for output in outputs.values())
    for name, output in outputs.items():
        where = f"{name}: " if name else ""
        untracked = output.text.find(_UNTRACKED)
        if untracked >= 0:
            line = output.text[untracked:].splitlines()[0]
            raise KernelcatError(f"{where}compute-sanitizer --tool {tool}: {line}")
        if not total and (output.code or output.errors is None):
            tail = " | ".join(output.text.strip().splitlines()[-4:])
            raise KernelcatError(
                f"{where}compute-sanitizer --tool {tool}: exit {output.code}: {tail}"
            )
    records = list(chain.from_iterable(
        _records(output.text, f"{name}, " if name else "") for name, output in outputs.items()
    ))  # fmt: skip
    for record in records:
        if record.mapped_from is not None:
            raise KernelcatError(
                f"compute-sanitizer --tool {tool} takes the memory that rank {record.mapped_from} "
                f"shares for out of bounds: {record}"
            )
    ordered = sum(record.is_ordered for record in records)
    findings = _findings(record for record in records if not record.is_ordered)
    return Report(total - ordered, findings, ordered)


def _findings(records: Iterable[_Record]) -> tuple[str, ...]:
    """The first distinct findings.

    Findings that differ only in threads, addresses or counts are equal.
    """
    by_text: dict[str, list[str]] = {}
    for record in records:
        by_text.setdefault(_NUMBERS.sub("#", ", ".join(record.lines)), []).append(str(record))
    firsts = [(lines[0], len(lines)) for lines in by_text.values()]
    return tuple(
        f"{line} (first of {count})" if count > 1 else line for line, count in firsts[:FINDINGS]
    )


def _records(output: str, where: str = "") -> Iterator[_Record]:
    """The findings, in the order of the output; ``where`` stands before their examples.

    A finding is a line of the sanitizer's and the indented lines that follow.
    """
    example, record, mapped = where.rstrip(", "), None, tuple[_Mapped, ...]()
    ordered, announced = frozenset[tuple[str, str]](), frozenset[tuple[str, str]]()
    for line in output.splitlines():
        match = _SANITIZER_LINE.match(line)
        if line.startswith(ORDERED):
            announced = frozenset(_ORDERED.findall(line.removeprefix(ORDERED)))
        elif line.startswith(EXAMPLE):
            example, ordered = where + line.removeprefix(EXAMPLE), announced
            announced = frozenset()
        elif line.startswith(MAPPED):
            mapped = tuple(_Mapped(int(rank), int(first, 16), int(last, 16))
                           for rank, first, last in _MAPPED.findall(line))  # fmt: skip
        elif match and not match["indent"]:
            if record:
                yield record
            text = match["text"].rstrip(" :")
            record = None if _NO_FINDING.match(text) else _Record([text], example, ordered, mapped)
        elif match and record and not _NO_FINDING.match(match["text"]):
            record.lines.append(match["text"].rstrip())
    if record:
        yield record
