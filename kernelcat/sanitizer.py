"""NVIDIA's compute-sanitizer over a small fuzz run of one implementation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kernelcat.errors import KernelcatError, MissingDependency
from kernelcat.implementation import Implementation

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED_SIZE = 160
"""Largest size axis while the sanitizer watches, which slows kernels by 10 to 100 times."""
SANITIZED_S = 300
"""Seconds after which a sanitized run counts as hung."""
EXAMPLE = "kernelcat example: "
"""Begins the line by which a sanitized fuzz run says what it does next."""
FINDINGS = 5
"""Distinct findings kept of each tool."""
FINDING_LINES = 6
"""Lines of a finding kept; a race may go on with every access that takes part."""
HAZARDS = 10_000
"""Bytes of shared memory after which racecheck prints no further hazards."""

_SAID = re.compile(r"={8,} (?P<indent> *)(?P<text>\S.*)")
_NO_FINDING = re.compile(
    r"COMPUTE-SANITIZER|\w+ SUMMARY: |Target application returned|Warning: Maximum number|"
    r"Current Value"
)
_NUMBERS = re.compile(r"(?<!\+)\b(0x[0-9a-f]+|\d[\d,]*)\b")
"""Threads, addresses and counts, but not the offset of an instruction."""


@dataclass(frozen=True)
class Report:
    """What one tool counted, and its first distinct findings, each on one line."""

    errors: int
    findings: tuple[str, ...] = ()


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
    reports = {}
    for tool in tools:
        reports[tool] = run(tool, fuzzing)
        if tool == "racecheck" and reports[tool].errors:
            reports[tool] = _explained(reports[tool], fuzzing)
    return reports


def run(tool: str, words: Sequence[str], options: Sequence[str] = ()) -> Report:
    """Run the command ``words`` under a tool; raises as :func:`sanitize` does."""
    sanitizer = sanitizer_path()
    if sanitizer is None:
        raise MissingDependency("compute-sanitizer is not on the path: install the CUDA toolkit")
    quietly = ("--show-backtrace", "no", "--demangle", "simple")
    try:
        done = subprocess.run(
            [sanitizer, "--tool", tool, *quietly, *options, *words],
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
    return Report(int(match[1]), _findings(output))


def _explained(races: Report, words: Sequence[str]) -> Report:
    """The same count, by a second run told byte by byte: kind of hazard, address, threads.

    Racecheck counts races, pairs of instructions, only where it does not print their hazards.
    """
    hazards = Report(0)
    with suppress(KernelcatError):  # the races themselves are known
        options = ("--racecheck-report", "hazard", "--print-limit", str(HAZARDS))
        hazards = run("racecheck", words, options)
    return Report(races.errors, (*hazards.findings, *races.findings)[:FINDINGS])


def _findings(output: str) -> tuple[str, ...]:
    """The first distinct ones: those that differ by threads, addresses and counts are alike."""
    alike: dict[str, list[str]] = {}
    for text, example in _records(output):
        alike.setdefault(_NUMBERS.sub("#", text), []).append(f"{text}; {example}".rstrip("; "))
    firsts = [(lines[0], len(lines)) for lines in alike.values()]
    return tuple(
        f"{line} (first of {count})" if count > 1 else line for line, count in firsts[:FINDINGS]
    )


def _records(output: str) -> list[tuple[str, str]]:
    """What was found, in the order of the output, each with the example that ran.

    A record is a line of the sanitizer's, and those after it that are indented.
    """
    example, records = "", list[tuple[list[str], str]]()
    for line in output.splitlines():
        said = _SAID.match(line)
        if line.startswith(EXAMPLE):
            example = line.removeprefix(EXAMPLE)
        elif said and not said["indent"]:
            records.append(([said["text"].rstrip(" :")], example))
        elif said and records and not _NO_FINDING.match(said["text"]):
            records[-1][0].append(said["text"].rstrip())
    return [
        (", ".join(lines[:FINDING_LINES]), ran)
        for lines, ran in records
        if not _NO_FINDING.match(lines[0])
    ]
