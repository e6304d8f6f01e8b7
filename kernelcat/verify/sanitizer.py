"""NVIDIA's compute-sanitizer over a small fuzz run of one implementation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass
class _Record:
    """One finding: the tool's lines, the example that ran, and the accesses known to be ordered."""

    lines: list[str]
    example: str
    ordered: frozenset[tuple[str, str]]

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


def run(tool: str, words: Sequence[str]) -> Report:
    """Run the command ``words`` under a tool; raises as :func:`sanitize` does."""
    sanitizer = sanitizer_path()
    if sanitizer is None:
        raise MissingDependency(MISSING)
    options = ["--show-backtrace", "no", "--demangle", "simple"]
    options += TOOL_OPTIONS.get(tool, ())
    try:
        done = children.run(
            [sanitizer, "--tool", tool, *options, *words],
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
        The tool printed no number of errors, or counted none although the run failed.
    """
    match = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    if not match or (code and not int(match[1])):
        tail = " | ".join(output.strip().splitlines()[-4:])
        raise KernelcatError(f"compute-sanitizer --tool {tool}: exit {code}: {tail}")
    records = list(_records(output))
    ordered = sum(record.is_ordered for record in records)
    findings = _findings(record for record in records if not record.is_ordered)
    return Report(int(match[1]) - ordered, findings, ordered)


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


def _records(output: str) -> Iterator[_Record]:
    """The findings, in the order of the output.

    A finding is a line of the sanitizer's and the indented lines that follow.
    """
    example, record = "", None
    ordered, announced = frozenset[tuple[str, str]](), frozenset[tuple[str, str]]()
    for line in output.splitlines():
        match = _SANITIZER_LINE.match(line)
        if line.startswith(ORDERED):
            announced = frozenset(_ORDERED.findall(line.removeprefix(ORDERED)))
        elif line.startswith(EXAMPLE):
            example, ordered = line.removeprefix(EXAMPLE), announced
            announced = frozenset()
        elif match and not match["indent"]:
            if record:
                yield record
            text = match["text"].rstrip(" :")
            record = None if _NO_FINDING.match(text) else _Record([text], example, ordered)
        elif match and record and not _NO_FINDING.match(match["text"]):
            record.lines.append(match["text"].rstrip())
    if record:
        yield record
