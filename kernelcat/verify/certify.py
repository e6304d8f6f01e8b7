"""`kernelcat check`: what an implementation has to pass before it is believed.

Every named problem on two seeds, then fuzzing, then NVIDIA's compute-sanitizer over a fuzz run of
its own. Each implementation runs in a process of its own, so that an illegal access (which leaves
a CUDA context useless) costs that implementation alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import SimpleQueue

from kernelcat import catalog
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError
from kernelcat.runtime.device import Device, Interpreter
from kernelcat.runtime.devices import VISIBLE, visible
from kernelcat.runtime.environment import Environment
from kernelcat.verify.fuzz import MAX_JOBS, fuzz
from kernelcat.verify.gate import check
from kernelcat.verify.receipts import Receipt
from kernelcat.verify.sanitizer import SANITIZERS, command_line, sanitize

CHECKED_BYTES = 1 << 29
"""Larger problems are left to the tuner's gate: several processes check side by side."""
CHECKED_S = 900
"""Seconds after which a process that checks one implementation counts as hung."""
SANITIZED_EXAMPLES = 8
"""Random problems under a tool that was asked for by name, without a number."""
INTERPRETED_SIZE = 70
"""Largest size axis in Triton's interpreter."""
INTERPRETED_EXAMPLES = 10
"""Random problems there when none are asked for, since no named one is small enough."""


@dataclass
class Outcome:
    """What one implementation passed and where it failed.

    ``skipped`` are problems it rejects; ``sanitizer`` counts each tool's errors, ``findings`` says
    what they are.
    """

    implementation: str
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    fuzz_examples: int = 0
    sanitizer: dict[str, int] = field(default_factory=dict)
    ordered: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Every result was right, and there was one: worth a receipt, which tells the findings."""
        return not self.failures and bool(self.problems or self.fuzz_examples)

    @property
    def passed(self) -> bool:
        """The same, and the sanitizer found nothing."""
        return self.right and not any(self.sanitizer.values())


def certify(
    implementation: Implementation,
    device: Device,
    problems: Sequence[Problem] | None = None,
    fuzz_examples: int = 0,
    jobs: int | None = None,
) -> Outcome:
    """Check one implementation in this process; ``jobs`` others compile ahead what it fuzzes.

    ``problems`` None means every named problem that moves at most ``CHECKED_BYTES``, or none of
    them in the interpreter, which is too slow for real sizes and only fuzzes.
    """
    entry = catalog.entry(implementation.entry)
    outcome = Outcome(implementation.name)
    interpreted = isinstance(device, Interpreter)
    if interpreted:
        device = Interpreter.serving(implementation)
        fuzz_examples = fuzz_examples or INTERPRETED_EXAMPLES
    chosen = problems
    if chosen is None:
        named = () if interpreted else entry.problems.values()
        chosen = [p for p in named if entry.bytes_moved(p) <= CHECKED_BYTES]
    for problem in chosen:
        _check_one(implementation, problem, device, outcome)
    if fuzz_examples:
        limit = INTERPRETED_SIZE if interpreted else None
        result = fuzz(implementation, device, fuzz_examples, limit=limit, jobs=jobs)
        outcome.fuzz_examples = result.examples
        if result.failure:
            outcome.failures.append(str(result.failure))
        elif not result.examples:
            outcome.failures.append("no random problem was one that it serves")
    return outcome


def _check_one(
    implementation: Implementation, problem: Problem, device: Device, outcome: Outcome
) -> None:
    name = catalog.entry(problem.entry).problem_name(problem) or str(problem)
    config = implementation.default(problem, device.gpu)
    reason = implementation.why_not(config, problem, device.gpu)
    if reason:
        outcome.skipped.append(f"{name}: {reason}")
        return
    try:
        verdict = check(implementation, problem, config, device)
    except KernelcatError as error:
        outcome.failures.append(f"{name} {config}: {type(error).__name__}: {error}")
        return
    if verdict.passed:
        outcome.problems.append(name)
    else:
        outcome.failures.append(f"{name} {config}: {verdict.detail}")


def run(
    found: Sequence[Implementation],
    device: Device,
    problems: Sequence[str],
    fuzz_examples: int,
    sanitize_examples: int,
    jobs: int,
    devices: Sequence[int] = (0,),
    tools: Sequence[str] = SANITIZERS,
) -> Iterator[tuple[Implementation, Outcome]]:
    """Certify each of ``found``, as they are done, in a process each that sees one GPU alone.

    Each of ``devices`` (GPUs by number) has ``jobs`` of them at a time; a single implementation
    on GPU 0 is certified here, and ``jobs`` processes compile for it. ``problems`` are names;
    none means all.
    """
    if len(found) == 1 and tuple(devices) == (0,):
        entry = catalog.entry(found[0].entry)
        chosen = [entry.named(name) for name in problems] or None
        outcome = certify(found[0], device, chosen, fuzz_examples, jobs)
        if sanitize_examples and outcome.passed:
            _sanitize(found[0], sanitize_examples, tools, outcome)
        yield found[0], outcome
        return
    arguments = ["--fuzz", str(fuzz_examples), "--sanitize", str(sanitize_examples)]
    for name in problems:
        arguments += ["--problem", name]
    if sanitize_examples:
        for tool in tools:
            arguments += ["--tool", tool]
    compilers = (os.cpu_count() or 1) // (jobs * len(devices))
    arguments += ["--jobs", str(min(max(compilers, 1), MAX_JOBS))]
    free: SimpleQueue[int] = SimpleQueue()
    for number in list(devices) * jobs:
        free.put(number)

    def on_a_gpu(implementation: Implementation) -> Outcome:
        number = free.get()
        try:
            return _in_process(implementation, arguments, number)
        finally:
            free.put(number)

    with ThreadPoolExecutor(jobs * len(devices)) as pool:
        started = {pool.submit(on_a_gpu, i): i for i in found}
        for done in as_completed(started):
            yield started[done], done.result()


def _sanitize(
    implementation: Implementation, examples: int, tools: Sequence[str], outcome: Outcome
) -> None:
    try:
        reports = sanitize(implementation, examples, tools)
    except KernelcatError as error:
        outcome.failures.append(str(error))
        return
    outcome.sanitizer = {tool: report.errors for tool, report in reports.items()}
    outcome.ordered = sum(report.ordered for report in reports.values())
    outcome.findings = [f"{tool}: {f}" for tool, report in reports.items() for f in report.findings]


def _in_process(implementation: Implementation, arguments: Sequence[str], number: int) -> Outcome:
    command = [*command_line("check", implementation), "--json", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=CHECKED_S,
            env={**os.environ, VISIBLE: visible(number)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(implementation.name, failures=[f"no answer in {CHECKED_S} s: it hangs"])
    try:
        return Outcome(**json.loads(done.stdout)[0])
    except (ValueError, IndexError, TypeError):
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        return Outcome(implementation.name, failures=[f"exit {done.returncode}: {lines[-1]}"])


def receipt(implementation: Implementation, outcome: Outcome, device: Device) -> Receipt:
    """The receipt for an outcome whose results were right."""
    return Receipt(
        implementation=implementation.name,
        source=digest(implementation),
        gpu=device.gpu.sku,
        environment=Environment.capture(device.gpu, 0).to_json(),
        problems=tuple(outcome.problems),
        fuzz_examples=outcome.fuzz_examples,
        sanitizer=outcome.sanitizer,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
