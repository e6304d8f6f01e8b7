"""`kernelcat check`: what an implementation has to pass before it gets a receipt.

The steps are: every named problem with two seeds, then fuzzing, then NVIDIA's compute-sanitizer
over a separate fuzz run. Each implementation runs in a separate process, because an illegal access
leaves the CUDA context of its process useless.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import SimpleQueue

from kernelcat import catalog
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError
from kernelcat.runtime import children
from kernelcat.runtime.device import Device, Interpreter
from kernelcat.runtime.devices import VISIBLE, visible
from kernelcat.runtime.environment import Environment
from kernelcat.verify.fuzz import MAX_JOBS, fuzz
from kernelcat.verify.gate import check
from kernelcat.verify.receipts import Receipt
from kernelcat.verify.sanitizer import SANITIZERS, Report, command_line, sanitize

CHECKED_BYTES = 1 << 29
"""Bytes that a problem may move. Larger problems are left to the tuner's gate, because several
processes check on one GPU at once."""
CHECKED_S = 900
"""Seconds after which a process that checks one implementation counts as hung."""
SANITIZED_EXAMPLES = 8
"""Random problems under a tool that ``--tool`` names, where ``--sanitize`` gives no number."""
INTERPRETED_SIZE = 70
"""Largest value of a size axis in Triton's interpreter."""
INTERPRETED_EXAMPLES = 10
"""Random problems in Triton's interpreter where the user gives no number: no named problem is small
enough for the interpreter."""


@dataclass
class Outcome:
    """What one implementation passed and where it failed.

    Attributes
    ----------
    implementation : ``gemm/cuda/wgmma``
    problems : names of the problems that passed
    skipped : problems that the implementation does not serve, each with the reason
    failures : problems that failed, each with the reason
    fuzz_examples : number of random problems that passed
    sanitizer : tool -> number of errors that compute-sanitizer counted
    ordered : number of hazards that a barrier in the machine code rules out
    findings : the first distinct errors of each tool, as text
    left_out : sanitizer tools that cannot judge the implementation, each with the reason
    """

    implementation: str
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    fuzz_examples: int = 0
    sanitizer: dict[str, int] = field(default_factory=dict)
    ordered: int = 0
    findings: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether every result was right and there was at least one: enough for a receipt.

        The sanitizer's findings do not count here; the receipt names them.
        """
        return not self.failures and bool(self.problems or self.fuzz_examples)

    @property
    def passed(self) -> bool:
        """Whether the implementation is :attr:`right` and the sanitizer found no error."""
        return self.right and not any(self.sanitizer.values())

    def add(self, reports: Mapping[str, Report]) -> None:
        """Note what each sanitizer tool found."""
        self.sanitizer = {tool: report.errors for tool, report in reports.items()}
        self.ordered = sum(report.ordered for report in reports.values())
        self.findings = [f"{tool}: {f}" for tool, report in reports.items()
                         for f in report.findings]  # fmt: skip


def certify(
    implementation: Implementation,
    device: Device,
    problems: Sequence[Problem] | None = None,
    fuzz_examples: int = 0,
    jobs: int | None = None,
) -> Outcome:
    """Check one implementation in this process.

    Parameters
    ----------
    problems : default: every named problem that moves at most :data:`CHECKED_BYTES`; none in
        Triton's interpreter, which is too slow for real sizes and only fuzzes
    fuzz_examples : number of random problems
    jobs : processes that compile the kernels of random problems ahead
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
            outcome.failures.append("the implementation serves none of the random problems")
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
    implementations: Sequence[Implementation],
    device: Device,
    problems: Sequence[str],
    fuzz_examples: int,
    sanitize_examples: int,
    jobs: int,
    devices: Sequence[int] = (0,),
    tools: Sequence[str] = SANITIZERS,
) -> Iterator[tuple[Implementation, Outcome]]:
    """Certify ``implementations``, each in a process that sees one GPU; yields in order of finish.

    A single implementation on GPU 0 is certified in this process.

    Parameters
    ----------
    problems : names of problems; all where empty
    fuzz_examples : random problems for each implementation
    sanitize_examples : random problems for each compute-sanitizer tool
    jobs : implementations at a time on each GPU; for a single implementation on GPU 0, the
        processes that compile for it
    devices : numbers of the GPUs
    tools : compute-sanitizer tools
    """
    if len(implementations) == 1 and tuple(devices) == (0,):
        entry = catalog.entry(implementations[0].entry)
        chosen = [entry.named(name) for name in problems] or None
        outcome = certify(implementations[0], device, chosen, fuzz_examples, jobs)
        if sanitize_examples and outcome.passed:
            _sanitize(implementations[0], sanitize_examples, tools, outcome)
        yield implementations[0], outcome
        return
    arguments = ["--fuzz", str(fuzz_examples), "--sanitize", str(sanitize_examples)]
    for name in problems:
        arguments += ["--problem", name]
    if sanitize_examples:
        for tool in tools:
            arguments += ["--tool", tool]
    compilers = (os.cpu_count() or 1) // (jobs * len(devices))
    arguments += ["--jobs", str(min(max(compilers, 1), MAX_JOBS))]
    free_gpus: SimpleQueue[int] = SimpleQueue()
    for number in list(devices) * jobs:
        free_gpus.put(number)

    def run_on_free_gpu(implementation: Implementation) -> Outcome:
        number = free_gpus.get()
        try:
            return _run_process(implementation, arguments, number)
        finally:
            free_gpus.put(number)

    with ThreadPoolExecutor(jobs * len(devices)) as pool:
        futures = {pool.submit(run_on_free_gpu, i): i for i in implementations}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _sanitize(
    implementation: Implementation, examples: int, tools: Sequence[str], outcome: Outcome
) -> None:
    try:
        outcome.add(sanitize(implementation, examples, tools))
    except KernelcatError as error:
        outcome.failures.append(str(error))


def _run_process(implementation: Implementation, arguments: Sequence[str], number: int) -> Outcome:
    command = [*command_line("check", implementation), "--json", *arguments]
    try:
        environment = {**os.environ, VISIBLE: visible(number)}
        done = children.run(command, timeout=CHECKED_S, env=environment)
    except subprocess.TimeoutExpired:
        return Outcome(implementation.name, failures=[f"no result after {CHECKED_S} s: it hangs"])
    try:
        return Outcome(**json.loads(done.stdout)[0])
    except (ValueError, IndexError, TypeError):
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        return Outcome(implementation.name, failures=[f"exit {done.returncode}: {lines[-1]}"])


def receipt(implementation: Implementation, outcome: Outcome, device: Device) -> Receipt:
    """The receipt for an outcome that is :attr:`~Outcome.right`, made on ``device``."""
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
