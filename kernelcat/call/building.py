"""Building of what serves a problem: the best decision whose kernels can be compiled and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernelcat.call import adapters, locking
from kernelcat.call.choice import FIXED_WHY, Attempt, Decision
from kernelcat.call.locking import NO_RULING, Ruling
from kernelcat.call.sharing import Choices
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError, MissingDependency, Unsupported
from kernelcat.runtime.gpu import Gpu
from kernelcat.verify import receipts

Load = Callable[[Implementation, Problem, Config, Gpu], Any]
"""Compiles a configuration for a problem on a GPU, and returns what the caller needs of it."""


@dataclass
class Failures:
    """What could not be used so far.

    Attributes
    ----------
    missing : language -> reason why the language cannot be used
    failed : configurations that could not be built -> reason
    errors : the exceptions behind ``failed``, in order
    """

    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[Attempt, str] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)

    def add(self, decision: Decision, error: Exception) -> None:
        """Record that ``decision`` could not be built."""
        attempt = decision.implementation.name, decision.config.key
        self.failed[attempt] = f"{type(error).__name__}: {error}"
        self.errors.append(error)


def build(
    choices: Choices, problem: Problem, gpu: Gpu, load: Load, ruling: Ruling = NO_RULING
) -> tuple[Decision, Any]:
    """The best decision whose program can be built, and what ``load`` made of the decision.

    ``ruling`` is what the lock in use says. A decision that cannot be built is passed over with a
    warning, unless the caller or a lock fixes it. A row of the database may hold anything, so no
    exception at all leaves this function because of a row.

    Raises
    ------
    Unsupported
        No implementation serves the problem.
    LockError
        What would run differs from the lock.
    KernelcatError
        Nothing that serves can be built: the error of the first attempt.
    """
    failures = Failures()
    while True:
        try:
            decision = choices.choose(problem, gpu, failures.missing, failures.failed, ruling)
        except Unsupported:
            if failures.errors:
                raise failures.errors[0] from None
            raise
        chosen = decision.implementation
        try:
            if ruling.locked is not None:
                locking.verify(ruling.locked, chosen, gpu)
            built = load(chosen, problem, decision.config, gpu)
        except MissingDependency as error:  # no compiler for this language: choose another
            if chosen.language in failures.missing or choices.pin.language or ruling.locked:
                raise
            failures.missing[chosen.language] = str(error)
        except Exception as error:
            if not _can_pass_over(decision, error):
                raise
            failures.add(decision, error)
        else:
            _warn(choices, decision)
            return decision, built


def _can_pass_over(decision: Decision, error: Exception) -> bool:
    """Whether the next offer may serve in place of ``decision``, which raised ``error``."""
    if decision.evidence is not None:
        return True
    return decision.why not in FIXED_WHY and isinstance(error, KernelcatError)


def warn_of_doubt(implementation: Implementation) -> None:
    """Warn of an unverified kernel, once."""
    doubt = receipts.doubt(implementation)
    if doubt is not None:
        adapters.warn_once(f"{implementation.name} is unverified ({doubt})")


def _warn(choices: Choices, decision: Decision) -> None:
    """Warn of an unverified or refuted kernel, and of the offers that a fault left out."""
    name, chosen, faults = choices.entry.name, decision.implementation, decision.faults
    if chosen.name not in choices.served:
        choices.served.add(chosen.name)
        warn_of_doubt(chosen)
    if decision.refuted is not None:
        adapters.warn_once(f"{chosen.name} {dict(decision.config)} was {decision.refuted}")
    if faults:
        reason = " ".join(str(faults[0].rejected).split())
        others = f" (and {len(faults) - 1} more)" if faults[1:] else ""
        adapters.warn_once(
            f"{name}: {faults[0].name} {dict(faults[0].config or {})} is passed over{others}: "
            f"{reason}; kernelcat db verify lists doubtful results"
        )
