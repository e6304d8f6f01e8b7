"""What each step from eager torch to the engine brings: the same model, one setting more a rung.

A rung (`rungs`) changes one field of `Setup`. Each rung is measured as `bench` measures an engine,
in this process: decoding at fixed batches, the time to the first token, the device's memory, and
how far its next tokens are from those of the last rung without float8 (`divergence`).

A rung builds on the last one that ran. One that cannot run here, or fails, has a reason in place of
numbers, and the next rung goes on without it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

import kernelcat
from kernelcat.errors import UnknownName, nearest
from kernelcat.moe.bench import Decoding, check_num_tokens, time_decoding, time_first_token
from kernelcat.moe.cache import windows
from kernelcat.moe.config import Config
from kernelcat.moe.divergence import Prompts, mean_divergence, next_tokens
from kernelcat.moe.engine.building import cache_type
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.memory import enough
from kernelcat.moe.engine.request import describe
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.gpt_oss import GptOssConfig
from kernelcat.moe.model import Decoder
from kernelcat.moe.rungs import EAGER, RUNGS, Rung, Setup
from kernelcat.moe.source import ModelSource
from kernelcat.runtime.launcher import without_dependent_launches


@dataclass(frozen=True)
class Plan:
    """What is measured on each rung; the fields are those of `bench`."""

    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 1024
    num_tokens: int = 192
    num_rounds: int = 3
    step_tokens: int = 2048
    prompts: Prompts = field(default_factory=Prompts)

    def limits(self) -> Limits:
        """Those of an engine that takes all requests at once."""
        running = max(self.batches)
        steps = max(self.step_tokens, running)
        return Limits(steps, running, max_waiting=running, context=self.context + self.num_tokens)

    def batch_sizes(self) -> tuple[int, ...]:
        """Batches to pad to: those that are measured, and where there is room one between two.

        Steps that do not only decode are padded to every other size (`StepSizes`), so to a measured
        one.
        """
        sizes = sorted(set(self.batches))
        between = [(a + b) // 2 for a, b in pairwise(sizes) if b - a > 1]
        return tuple(sorted({*sizes, *between}))


@dataclass(frozen=True)
class Result:
    """One rung's numbers, or why there are none.

    Attributes
    ----------
    reason : why the rung was not run; "" if it was
    previous : the rung that was run before
    effects : tokens a second over those of ``previous``, for each batch
    ttft_ms : time to the first token of a prompt of which an earlier request had three quarters
    ttft_effect : that time of ``previous`` over this one; above 1 this rung is faster
    memory_bytes : of the device, by all programs, after the measurement; None on a CPU
    divergence : nats from ``reference``'s next tokens; None without a rung to compare with
    accepted : part of speculation's drafts that were right; None without drafts
    """

    name: str
    what: str
    reason: str = ""
    previous: str = ""
    decoding: tuple[Decoding, ...] = ()
    effects: Mapping[int, float] = field(default_factory=dict)
    ttft_ms: float | None = None
    ttft_effect: float | None = None
    memory_bytes: int | None = None
    divergence: float | None = None
    reference: str = ""
    accepted: float | None = None

    @property
    def short_reason(self) -> str:
        """The first line of ``reason``: torch explains errors at length."""
        return self.reason.partition("\n")[0]

    def after(self, previous: Result) -> Result:
        """This result with its effects beside ``previous``."""
        before = {one.batch: one.tokens_per_second for one in previous.decoding}
        effects = {
            one.batch: one.tokens_per_second / before[one.batch]
            for one in self.decoding
            if one.batch in before
        }
        assert self.ttft_ms and previous.ttft_ms
        ttft = previous.ttft_ms / self.ttft_ms
        return replace(self, previous=previous.name, effects=effects, ttft_effect=ttft)


def names_of(chosen: Collection[str]) -> list[str]:
    """``chosen`` in the order of the ladder, or all names if it is empty.

    Raises ``UnknownName`` for a rung that is not there.
    """
    names = [rung.name for rung in RUNGS]
    for name in chosen:
        if name not in names:
            raise UnknownName(f"there is no rung called {name!r}{nearest(name, names)}")
    return [name for name in names if not chosen or name in chosen]


def climb(
    source: ModelSource,
    plan: Plan,
    chosen: Collection[str] = (),
    tell: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """One result for each rung, in order.

    Parameters
    ----------
    chosen : names of the rungs to measure, empty for all; the others are part of later setups too
    tell : gets each result as soon as it is there, still without its divergence

    Raises
    ------
    UnknownName
        A rung or the model is unknown.
    InvalidArgument
        The tokens are too few for a batch; told before the first rung begins.
    """
    names, config = names_of(chosen), source.config()
    for batch in plan.batches:
        check_num_tokens(plan.num_tokens, batch, plan.context, plan.limits())
    climber = _Climber(source, plan)
    try:
        results = _results(climber, names, config, tell)
    finally:
        kernelcat.reload()  # nobody else gets launchers without dependent launches
    return climber.with_divergences(results)


def _results(
    climber: _Climber, names: Collection[str], config: Config, tell: Callable[[Result], object]
) -> list[Result]:
    """All results, without divergences."""
    setup, results = Setup(), list[Result]()
    previous: Result | None = None
    for rung in RUNGS:
        reason = climber.lost or rung.why_not(config, climber.device)
        tried = replace(setup, **rung.changes)
        if not reason and rung.name not in names:
            reason, setup = "not asked for", tried
        elif not reason:
            result, reason = climber.attempt(rung, tried)
            if result is not None:
                setup = tried
                previous, result = result, result.after(previous) if previous else result
                results.append(result)
        if reason:
            results.append(Result(rung.name, rung.what, reason))
        tell(results[-1])
    return results


def free(device: str) -> None:
    """Waits for ``device`` and returns memory that nothing uses to it; raises if it is lost."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class _Climber:
    """Measures one rung after another; weights stay on the device while rungs share them.

    ``lost`` says why no further rung can run, "" as long as one can.
    """

    def __init__(self, source: ModelSource, plan: Plan) -> None:
        self.lost = ""
        self.device = source.device
        self._source, self._plan = source, plan
        self._model: Decoder | None = None
        self._is_dense = self._is_dependent = False
        self._predicted: dict[str, tuple[bool, torch.Tensor]] = {}

    def attempt(self, rung: Rung, setup: Setup) -> tuple[Result | None, str]:
        """The numbers of a rung, or None and what went wrong."""
        result, reason = None, ""
        try:
            result = self._measure(rung, setup)
        except Exception as error:
            reason = describe(error)
        try:
            free(self.device)
        except Exception as error:
            self.lost = f"rung {rung.name!r} has lost the device: {describe(error)}"
        return result, reason

    def _measure(self, rung: Rung, setup: Setup) -> Result:
        plan = self._plan
        if setup.has_dependent_launches != self._is_dependent:
            kernelcat.reload()  # launchers keep the way in which they were made
            self._is_dependent = setup.has_dependent_launches
        with nullcontext() if self._is_dependent else without_dependent_launches():
            model = copy.copy(self._weights(setup))
            model.ops = setup.ops(model)
            cache = cache_type(model, setup.cache_dtype(model))
            predicted = next_tokens(model, cache, plan.prompts)
            free(self.device)
            engine = Engine(model, self._settings(setup, model))
            try:
                decoding = tuple(
                    time_decoding(engine, batch, plan.context, plan.num_tokens, plan.num_rounds)
                    for batch in plan.batches
                )
                ttft = time_first_token(engine, plan.context, plan.num_rounds)
                memory = self._memory()
                counts = engine.statistics()
            finally:
                engine.close()
        self._predicted[rung.name] = setup.is_exact, predicted
        accepted = None
        if setup.num_drafts:
            accepted = counts.accepted_tokens_total / max(1, counts.draft_tokens_total)
        return Result(
            rung.name, rung.what, decoding=decoding, ttft_ms=ttft, memory_bytes=memory,
            accepted=accepted,
        )  # fmt: skip

    def _weights(self, setup: Setup) -> Decoder:
        """The model with experts as ``setup`` needs them."""
        is_mxfp4 = isinstance(self._source.config(), GptOssConfig)
        is_dense = is_mxfp4 and setup.experts == EAGER
        if self._model is None or self._is_dense != is_dense:
            self._model = None
            free(self.device)
            self._model, self._is_dense = self._source.open(is_dense), is_dense
        return self._model

    def _settings(self, setup: Setup, model: Decoder) -> EngineSettings:
        """An engine's settings, with pages for all requests and no more."""
        limits = self._plan.limits()
        page_size = EngineSettings.page_size
        return EngineSettings(
            limits,
            num_pages=tuple(enough(windows(model.cache_layers), page_size, limits)),
            cache_dtype=setup.cache_dtype(model),
            speculation=Speculation(setup.num_drafts) if setup.num_drafts else None,
            has_prefix_cache=setup.has_prefix_cache,
            batch_sizes=self._plan.batch_sizes() if self.device == "cuda" else None,
            has_graphs=setup.has_graphs,
        )

    def _memory(self) -> int | None:
        if self.device != "cuda":
            return None
        unused, total = torch.cuda.mem_get_info()
        return total - unused

    def with_divergences(self, results: list[Result]) -> list[Result]:
        """``results`` with divergences from the last rung without float8."""
        exact = [name for name, (is_exact, _) in self._predicted.items() if is_exact]
        if not exact:
            return results
        reference = self._predicted[exact[-1]][1]
        return [
            replace(
                result,
                divergence=mean_divergence(reference, self._predicted[result.name][1]),
                reference=exact[-1],
            )
            if result.name in self._predicted
            else result
            for result in results
        ]
