"""NVIDIA's compute-sanitizer over a small fuzz run of one implementation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelcat.catalog.implementation import Implementation
from kernelcat.errors import KernelcatError, MissingDependency

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED_SIZE = 160
"""Largest size axis while the sanitizer watches, which slows kernels by 10 to 100 times."""
SANITIZED_S = 300
"""Seconds after which a sanitized run counts as hung."""
EXAMPLE = "kernelcat example: "
"""Begins the line by which a sanitized fuzz run says what it does next."""
ORDERED = "kernelcat ordered: "
"""Begins the line before: writes and reads known to be ordered, ``gemm+0x40>gemm+0x90``."""
FINDINGS = 5
"""Distinct findings kept of each tool."""
FINDING_LINES = 6
"""Lines of a finding kept; a race may go on with every access that takes part."""
TOOL_OPTIONS = {
    # Byte by byte: kind of hazard, address, threads; races are pairs of instructions only.
    "racecheck": ("--racecheck-report", "hazard", "--print-limit", "10000"),
    # A ring for each warp is more barriers than it keeps room for by itself, and that counts as an
    # error.
    "synccheck": ("--num-cuda-barriers", "1024"),
}

_SAID = re.compile(r"={8,} (?P<indent> *)(?P<text>\S.*)")
_NO_FINDING = re.compile(
    r"COMPUTE-SANITIZER|\w+ SUMMARY: |Target application returned|Warning: Maximum number|"
    r"Current Value"
)
_PLACE = re.compile(r"(Read|Write) Thread \([\d,]+\) at (\S+)")
_ORDERED = re.compile(r"(\S+)>(\S+)")
_NUMBERS = re.compile(r"(?<!\+)\b(0x[0-9a-f]+|\d[\d,]*)\b")
"""Threads, addresses and counts, but not the offset of an instruction."""


@dataclass(frozen=True)
class Report:
    """What one tool counted, and its first distinct findings, each on one line.

    ``ordered`` hazards are not among the errors: a barrier lies between their accesses, which the
    machine code shows (:mod:`kernelcat.verify.warp_roles`).
    """

    errors: int
    findings: tuple[str, ...] = ()
    ordered: int = 0


@dataclass
class _Record:
    """What a tool printed of one finding, the example that ran, and what is known to be ordered."""

    lines: list[str]
    example: str
    ordered: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        text = ", ".join(self.lines[:FINDING_LINES])
        return f"{text}; {self.example}".rstrip("; ")

    @property
    def is_ordered(self) -> bool:
        """Whether it is a read after a write that is known to come before."""
        text = " ".join(self.lines)
        places = dict(_PLACE.findall(text))
        pair = places.get("Write", ""), places.get("Read", "")
        return "Potential RAW hazard" in text and pair in self.ordered


def command_line(verb: str, implementation: Implementation) -> list[str]:
    """The command that runs ``kernelcat VERB`` on one implementation in a process of its own."""
    return [
        *(sys.executable, "-m", "kernelcat", verb, implementation.entry),
        *("--language", implementation.language, "--variant", implementation.variant),
    ]


def sanitizer_path() -> str | None:
    """compute-sanitizer on the path, or in the CUDA toolkit."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = Path(root) / "bin" / "compute-sanitizer"
    return str(path) if path.is_file() else None


def sanitize(
    implementation: Implementation, examples: int, tools: Sequence[str] = SANITIZERS
) -> dict[str, Report]:
    """What each compute-sanitizer tool finds in a small fuzz run of the implementation.

    Raises
    ------
    MissingDependency
        When compute-sanitizer (part of the CUDA toolkit) is not on the path.
    KernelcatError
        When a tool ran but said no number.
    """
    fuzzing = [*command_line("fuzz", implementation), "--examples", str(examples)]
    fuzzing += ["--limit", str(SANITIZED_SIZE), "--kernels", "6", "--mirrored"]
    return {tool: run(tool, fuzzing) for tool in tools}


def run(tool: str, words: Sequence[str]) -> Report:
    """Run the command ``words`` under a tool; raises as :func:`sanitize` does."""
    sanitizer = sanitizer_path()
    if sanitizer is None:
        raise MissingDependency("compute-sanitizer is not on the path: install the CUDA toolkit")
    options = ["--show-backtrace", "no", "--demangle", "simple"]
    options += TOOL_OPTIONS.get(tool, ())
    try:
        done = subprocess.run(
            [sanitizer, "--tool", tool, *options, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in the order in which it was said
            text=True,
            errors="replace",
            check=False,
            timeout=SANITIZED_S,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelcatError(f"compute-sanitizer --tool {tool}: over {SANITIZED_S} s") from error
    return parse(tool, done.stdout, done.returncode)


def parse(tool: str, output: str, code: int) -> Report:
    """The report in what a tool printed; an error where it counted nothing and the run failed."""
    match = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    if not match or (code and not int(match[1])):
        tail = " | ".join(output.strip().splitlines()[-4:])
        raise KernelcatError(f"compute-sanitizer --tool {tool}: exit {code}: {tail}")
    records = list(_records(output))
    ordered = sum(record.is_ordered for record in records)
    findings = _findings(record for record in records if not record.is_ordered)
    return Report(int(match[1]) - ordered, findings, ordered)


def _findings(records: Iterable[_Record]) -> tuple[str, ...]:
    """The first distinct ones: those that differ by threads, addresses and counts are alike."""
    alike: dict[str, list[str]] = {}
    for record in records:
        alike.setdefault(_NUMBERS.sub("#", ", ".join(record.lines)), []).append(str(record))
    firsts = [(lines[0], len(lines)) for lines in alike.values()]
    return tuple(
        f"{line} (first of {count})" if count > 1 else line for line, count in firsts[:FINDINGS]
    )


def _records(output: str) -> Iterator[_Record]:
    """What was found, in the order of the output.

    A record is a line of the sanitizer's, and those after it that are indented.
    """
    example, record = "", None
    ordered, announced = frozenset[tuple[str, str]](), frozenset[tuple[str, str]]()
    for line in output.splitlines():
        said = _SAID.match(line)
        if line.startswith(ORDERED):
            announced = frozenset(_ORDERED.findall(line.removeprefix(ORDERED)))
        elif line.startswith(EXAMPLE):
            example, ordered = line.removeprefix(EXAMPLE), announced
            announced = frozenset()
        elif said and not said["indent"]:
            if record:
                yield record
            text = said["text"].rstrip(" :")
            record = None if _NO_FINDING.match(text) else _Record([text], example, ordered)
        elif said and record and not _NO_FINDING.match(said["text"]):
            record.lines.append(said["text"].rstrip())
    if record:
        yield record
