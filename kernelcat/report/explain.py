"""Explanations for people: which implementation serves a call, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelcat.call.calibrated import Prediction
from kernelcat.call.choice import Considered, Decision
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.environment import other_compiler
from kernelcat.runtime.gpu import Gpu
from kernelcat.verify import receipts
from kernelcat.verify.code_record import Case, is_todays

if TYPE_CHECKING:
    from kernelcat.store import Choice

_WHY = {
    "exact": "measured for this problem on this GPU",
    "bucket": "measured for a problem of the same bucket on this GPU",
    "calibrated": "the least time that this GPU's calibrated model predicts; not measured",
    "borrowed": "measured on another GPU of this architecture",
    "borrowed model": "the least time by the calibrated model of another GPU of this architecture; "
    "not measured",
    "predicted": "ranked by the cost model; nothing was measured",
    "borrowed prediction": "ranked by the cost model for another GPU of this architecture; "
    "nothing was measured",
    "nearest": "won the nearest problem measured on this GPU; this problem was not measured",
    "borrowed nearest": "won the nearest problem measured on another GPU of this architecture; "
    "this problem was not measured",
    "default": "the implementation's default; nothing is known about this problem",
    "forced": "requested by name",
    "locked": "the lock in use has this kernel for this problem",
}
"""Value of :attr:`Explanation.why` -> its meaning."""


SHOWN_PREDICTIONS = 3
"""Predictions that an explanation shows besides that of what serves."""


@dataclass(frozen=True)
class Explanation:
    """Which implementation serves a problem on a GPU, and why; ``print`` shows it as text.

    Attributes
    ----------
    why
        exact, bucket, calibrated, borrowed, borrowed model, predicted, borrowed prediction,
        nearest, borrowed nearest, default, forced or locked
    evidence : the result that the decision rests on, or None
    considered : the candidates in order, each with the reason for its rejection, or None
    stale : whether the kernel runs other code today than was measured
    compiler : how today's compiler differs from the measurement's compiler, or None
    unverified : why the kernel is unverified, or None
    unlocked : why the lock in use does not decide, or None
    predictions : what the calibrated model predicts, the fastest first, where it was asked
    """

    problem: Problem
    gpu: Gpu
    implementation: Implementation
    config: Config
    why: str
    evidence: Choice | None
    considered: tuple[Considered, ...]
    stale: bool
    compiler: str | None
    unverified: str | None
    unlocked: str | None = None
    predictions: tuple[Prediction, ...] = ()

    @staticmethod
    def of(problem: Problem, gpu: Gpu, decision: Decision) -> Explanation:
        evidence, chosen = decision.evidence, decision.implementation
        return Explanation(
            problem=problem,
            gpu=gpu,
            implementation=chosen,
            config=decision.config,
            why=decision.why,
            evidence=evidence,
            considered=decision.considered,
            stale=evidence is not None and not _is_todays(evidence),
            compiler=None if evidence is None else _other_compiler(evidence),
            unverified=receipts.doubt(chosen),
            unlocked=decision.ruling.unlocked,
            predictions=decision.predictions,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.problem.entry} {self.problem} on {self.gpu.sku} ({self.gpu.arch})",
            f"  {self.implementation.name} {_settings(self.config)}",
            f"  {self.why}: {_WHY[self.why]}",
        ]
        if self.unlocked:
            lines.append(f"  not locked: {self.unlocked}")
        if self.evidence is not None:
            lines.append(f"  evidence: {_result(self.evidence)}")
        if self.why in ("calibrated", "borrowed model"):
            lines.append(f"  predicted: {_predicted(self)}")
        if self.stale:
            lines.append("  stale: the kernel runs other code than was measured; tune it again")
        if self.compiler:
            lines.append(f"  another compiler: {self.compiler}")
        if self.unverified:
            lines.append(f"  unverified: {self.unverified}")
        rejected = [c for c in self.considered if c.rejected is not None]
        if rejected:
            lines.append("  rejected before:")
        lines += dict.fromkeys(f"    {c.name} ({c.why}): {c.rejected}" for c in rejected)
        return "\n".join(lines)


def _is_todays(choice: Choice) -> bool:
    name = f"{choice.entry}/{choice.language}/{choice.variant}"
    case = Case(choice.problem, choice.config)
    return is_todays(name, choice.gpu, choice.source, case)


def _other_compiler(choice: Choice) -> str | None:
    return other_compiler(choice.language, choice.compilers)


def _predicted(explanation: Explanation) -> str:
    """The predicted time, in parentheses the one that is compared; those of the next ones."""
    chosen = explanation.implementation
    served = (chosen.language, chosen.variant, explanation.config)
    every = {(p.language, p.variant, p.config): p for p in reversed(explanation.predictions)}
    text = f"{every.pop(served)}, the least of {len(explanation.predictions)} configurations"
    if every:
        others = sorted(every.values(), key=lambda p: p.high_us)[:SHOWN_PREDICTIONS]
        listed = (f"{p.language}/{p.variant} {p}" for p in others)
        text += f"; then {', '.join(listed)}"
    return text


def _settings(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _result(choice: Choice) -> str:
    return (
        f"{choice.median_us:.2f} us {choice.kind} on {choice.gpu} for {choice.problem} "
        f"(run {choice.run}, {choice.origin})"
    )
