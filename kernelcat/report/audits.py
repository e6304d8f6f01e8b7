"""Audits of tunes as text: a line for each problem, and a table with a summary of each strategy."""

from __future__ import annotations

from statistics import mean, median

from kernelcat.report.sheet import Sheet
from kernelcat.store.audits import Audit, AuditedProblem, AuditedTune


def line(problem: AuditedProblem) -> str:
    """One problem in one line: the best of the whole space, and the regret of each tune."""
    if problem.skipped:
        return f"{problem.name}: skipped, {problem.skipped}"
    tunes = ", ".join(f"{tune.strategy} {_regret(tune)}" for tune in problem.tunes)
    return (f"{problem.name}: best of {problem.num_legal} is {problem.best} "
            f"{problem.best_us:.2f} us; regret: {tunes}")  # fmt: skip


def summary(audit: Audit, strategy: str) -> str:
    """Regret, flips and times of a strategy over all problems, in one sentence."""
    regrets = audit.regrets(strategy)
    tunes = [t for p in audit.problems for t in p.tunes if t.strategy == strategy]
    if not tunes:
        return f"{strategy}: no tunes"
    flips = sum(strategy in problem.flips for problem in audit.problems)
    parts = [f"{flips} flips"]
    if regrets:
        parts.insert(0, f"regret {median(regrets):.1%} at the median, {regrets[-1]:.1%} at worst")
    failed = len(tunes) - len(regrets)
    parts += [f"{failed} tunes without a result"] if failed else []
    cold, warm = ([t.seconds for t in tunes if t.compiled == c] for c in (False, True))
    parts.append(f"{mean(cold):.1f} s in the mean, {mean(warm):.1f} s with compiled kernels")
    return f"{strategy}: {', '.join(parts)}."


def sheet(audit: Audit) -> Sheet:
    """The table: a line for each problem and strategy, with both tunes."""
    lines, notes = [], []
    for problem in audit.problems:
        if problem.skipped:
            notes.append(line(problem))
        for strategy in audit.strategies if problem.tunes else ():
            cold, warm = (t for t in problem.tunes if t.strategy == strategy)
            lines.append((
                problem.name, strategy, (warm.winner or "nothing").removeprefix(f"{audit.entry}/"),
                str(warm.screened), f"{cold.seconds:.1f}", f"{warm.seconds:.1f}",
                "" if warm.us is None else f"{warm.us:.2f}", _regret(cold), _regret(warm),
                "flip" if strategy in problem.flips else "",
            ))  # fmt: skip
            notes += [f"{problem.name}, {t.strategy}: {t.failed}" for t in (cold, warm) if t.failed]
    spaces = "; ".join(
        f"{p.name} {p.num_legal} legal, {p.num_promising} worth a try, {p.seconds:.0f} s"
        for p in audit.problems
    )
    return Sheet(
        f"{audit.entry} on {audit.gpu}, audit of tunes with {audit.trials} candidates at most, "
        f"{audit.regime} regime, {audit.state}",
        ("problem", "strategy", "choice", "tried", "s", "s compiled", "µs", "regret", "again", ""),
        lines,
        [
            *(summary(audit, strategy) for strategy in audit.strategies),
            "Regret: time of the tune's choice over that of the fastest configuration of the whole "
            "legal space, in one race, less 1. Each strategy tunes twice; a flip is two choices of "
            "different speed.",
            f"Whole spaces, and the time to screen them: {spaces}.",
            *notes,
        ],
        slice(3, 9),
    )


def _regret(tune: AuditedTune) -> str:
    return "failed" if tune.regret is None else f"{tune.regret:.1%}"
