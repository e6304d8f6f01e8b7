"""The strategy ``tpe``: Optuna's model of good and bad values proposes what to screen next.

Tree-structured Parzen estimator: Bergstra et al., Algorithms for Hyper-Parameter Optimization,
NeurIPS 2011. The parameters of all implementations are one tree, whose root is the implementation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from kernelcat.errors import MissingDependency
from kernelcat.tune.candidate import Candidate

NUM_FIRST = 16
"""Candidates that are screened before there is a model: the most promising by the cost model."""
BATCH = 8
"""Candidates that are proposed at a time: compilers work on several of them at once."""
FAILED_FACTOR = 10.0
"""A candidate that failed counts as this factor times the slowest time."""
ROOT = "implementation"
"""Name of the parameter that chooses the implementation."""


def require() -> None:
    """Raise ``MissingDependency`` if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "the strategy tpe needs: pip install 'kernelcat[search]'"
        ) from error


def proposals(
    candidates: Sequence[Candidate], count: int
) -> Generator[list[Candidate], Mapping[Candidate, float], None]:
    """Yields up to ``count`` of ``candidates``, some at a time, and is sent their times.

    Times are in microseconds; candidates that failed are missing. The most promising candidates
    come first in ``candidates``. Proposals depend on the times alone.
    """
    model = Model(candidates)
    batch = list(candidates[: min(NUM_FIRST, count)])
    while batch:
        times = yield batch
        model.learn(batch, times)
        count -= len(batch)
        batch = model.propose(min(BATCH, count))


class Model:
    """Optuna's study of times, over candidates of which each is proposed once."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna
        self.waiting = dict.fromkeys(candidates)
        self.tree = Tree(candidates)
        self.worst_us = 1.0
        with warnings.catch_warnings():  # Optuna calls some of the sampler's options experimental
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                n_startup_trials=1, multivariate=True, group=True, constant_liar=True, seed=0
            )
        self.study = optuna.create_study(sampler=sampler)

    def learn(self, batch: Sequence[Candidate], times: Mapping[Candidate, float]) -> None:
        """Adds what was observed; logarithms, because ratios of times matter."""
        self.worst_us = max((self.worst_us, *times.values()))
        for candidate in batch:
            self.waiting.pop(candidate, None)
            path = self.tree.path(candidate)
            us = times.get(candidate, FAILED_FACTOR * self.worst_us)
            self.study.add_trial(
                self.optuna.trial.create_trial(
                    params=path,
                    distributions={name: self._distribution(name) for name in path},
                    value=math.log(us),
                )
            )

    def propose(self, count: int) -> list[Candidate]:
        """The next candidates: those nearest to what Optuna asks for, which may be illegal."""
        trials, batch = [], []
        for _ in range(min(count, len(self.waiting))):
            trials.append(self.study.ask())
            wanted = self._sample(trials[-1])
            nearest = min(self.waiting, key=lambda each: self.tree.distance(each, wanted))
            del self.waiting[nearest]
            batch.append(nearest)
        for trial in trials:  # what is screened instead is added by learn()
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return batch

    def _sample(self, trial: Any) -> Path:
        path: Path = {}
        for name in (ROOT, *self.tree.values):
            if name == ROOT or name.startswith(f"{path[ROOT]}."):
                values = self.tree.values[name]
                if self.tree.is_ordered(name):
                    path[name] = trial.suggest_int(name, 0, len(values) - 1)
                else:
                    path[name] = trial.suggest_categorical(name, values)
        return path

    def _distribution(self, name: str) -> Any:
        distributions = self.optuna.distributions
        if self.tree.is_ordered(name):
            return distributions.IntDistribution(0, len(self.tree.values[name]) - 1)
        return distributions.CategoricalDistribution(self.tree.values[name])


Path = dict[str, Any]
"""A way from the root to a candidate: parameter -> its value, or the rank of an ordered value."""


class Tree:
    """The parameters of some candidates; ``values`` has the values of each parameter as texts.

    Integers are ordered: near tile sizes take near times.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        found: dict[str, dict[Any, None]] = {}
        for candidate in candidates:
            for name, value in _parameters(candidate).items():
                found.setdefault(name, {})[value] = None
        self._ordered = {name for name, values in found.items() if all(map(_is_integer, values))}
        self.values: dict[str, list[Any]] = {
            name: sorted(values) if name in self._ordered else [*map(repr, values)]
            for name, values in found.items()
        }
        self.values[ROOT] = list(found.get(ROOT, ()))
        self._paths = {candidate: self._path(candidate) for candidate in candidates}

    def is_ordered(self, name: str) -> bool:
        return name in self._ordered

    def path(self, candidate: Candidate) -> Path:
        return self._paths[candidate]

    def distance(self, candidate: Candidate, path: Path) -> float:
        """How far a candidate is from a path: 1 for each parameter with another value, and less if
        the values are ordered and near. Another implementation is farther than all."""
        own = self._paths[candidate]
        if own[ROOT] != path[ROOT]:
            return len(own) + 1.0
        total = 0.0
        for name, value in own.items():
            if name in self._ordered:
                total += abs(value - path[name]) / max(1, len(self.values[name]) - 1)
            else:
                total += value != path[name]
        return total

    def _path(self, candidate: Candidate) -> Path:
        return {
            name: value if name == ROOT else
            self.values[name].index(value) if name in self._ordered else repr(value)
            for name, value in _parameters(candidate).items()
        }  # fmt: skip


def _parameters(candidate: Candidate) -> dict[str, Any]:
    """Parameter -> value. Each implementation has parameters of its own."""
    owner = f"{candidate.language}/{candidate.variant}"
    return {ROOT: owner} | {f"{owner}.{name}": value for name, value in candidate.config.items()}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
