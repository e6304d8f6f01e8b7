"""What each step from eager torch to the engine brings: the same model, one setting more a rung.

A rung changes one field of `Setup`. Each rung is measured as `bench` measures an engine, in this
process: decoding at fixed batches, the time to the first token, the device's memory, and how far
its next tokens are from those of the last rung without float8 (`divergence`).

A rung builds on the last one that ran. One that cannot run here, or fails, has a reason in place of
numbers, and the next rung goes on without it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import kernelcat
from kernelcat.errors import UnknownName, nearest
from kernelcat.moe import eager, fp8_products
from kernelcat.moe.bench import Decoding, time_decoding, time_first_token
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
from kernelcat.moe.grouped_experts import GroupedExperts
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import Ops, bind, on
from kernelcat.moe.source import ModelSource
from kernelcat.reference._mla_row import ROW
from kernelcat.runtime.launcher import without_dependent_launches

EAGER, GROUPED, FUSED = "eager", "grouped", "fused"
"""Ways to run experts: in torch, by `moe_route` and `moe_gemm`, by `moe_mlp`."""


@dataclass(frozen=True)
class Setup:
    """How a model runs; the first rung has these defaults.

    Attributes
    ----------
    has_attention : attention and cache writes are the catalog's, not torch's
    has_products : so are all other operations but experts
    experts : EAGER, GROUPED or FUSED; EAGER experts have 16 bits
    has_graphs, has_prefix_cache : as in `EngineSettings`
    has_dependent_launches : kernels may start before the kernel before them has ended
    has_fp8_cache : keys and values, or latent rows, are float8
    has_fp8_projections, has_fp8_head : these weights are multiplied in float8 (`fp8_products`)
    num_drafts : draft tokens of speculation; 0 for none
    """

    has_attention: bool = False
    has_products: bool = False
    experts: str = EAGER
    has_graphs: bool = False
    has_dependent_launches: bool = False
    has_fp8_cache: bool = False
    has_fp8_projections: bool = False
    has_fp8_head: bool = False
    has_prefix_cache: bool = False
    num_drafts: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether nothing but experts is rounded to fewer than 16 bits."""
        return not (self.has_fp8_cache or self.has_fp8_projections or self.has_fp8_head)

    def ops(self, model: Decoder) -> Ops:
        """The operations that ``model`` runs; its weights may get copies in float8."""
        device = model.device
        ops, in_torch = on(device), list[str]()
        if not self.has_attention:
            in_torch += eager.ATTENTION
        if not self.has_products:
            in_torch += eager.PRODUCTS
        if self.experts == EAGER:
            in_torch += eager.EXPERTS
        ops = eager.replace(ops, in_torch)
        if self.experts == GROUPED:
            grouped = GroupedExperts(bind("moe_route", device), bind("moe_gemm", device))
            ops = replace(ops, moe_mlp=grouped)
        product = bind("fp8_gemm", device)
        if self.has_fp8_projections:
            ops = fp8_products.with_projections(ops, model, product)
        return fp8_products.with_head(ops, model, product) if self.has_fp8_head else ops

    def cache_dtype(self, model: Decoder) -> str:
        """The name of the caches' element type; "" for the model's."""
        if not self.has_fp8_cache:
            return ""
        return "uint8" if model.cache_layers[0].rows == ((ROW,),) else "float8_e4m3fn"


@dataclass(frozen=True)
class Rung:
    """One step: what it is called, what it does, and the fields of `Setup` that it changes."""

    name: str
    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: bool = False

    def why_not(self, config: Config, device: str) -> str:
        """Why this rung cannot change anything here; "" if it can."""
        if self.needs_gpu and device != "cuda":
            return f"needs a GPU, and the model is on the {device}"
        if "experts" in self.changes and not getattr(config, "num_experts_per_tok", 0):
            return "the model has no experts"
        return ""


RUNGS = (
    Rung("eager torch", "each operation in torch, experts in 16 bits"),
    Rung(
        "paged attention", "paged_attn and kv_write; for latent attention flashmla, mla_kv_write",
        {"has_attention": True},
    ),
    Rung(
        "fused products", "qkv_rope_write and out_router for few tokens, gemm, rms_norm, lm_head",
        {"has_products": True},
    ),
    Rung(
        "MXFP4 experts", "moe_route and two moe_gemm on weights as published, in gpt-oss 4 bits",
        {"experts": GROUPED},
    ),
    Rung("CUDA graphs", "a decode step is one launch", {"has_graphs": True}, needs_gpu=True),
    Rung("fused MoE", "moe_mlp: routing and both products in one call", {"experts": FUSED}),
    Rung(
        "dependent launches", "kernels in CUDA C++ and Triton start before the one before ends",
        {"has_dependent_launches": True}, needs_gpu=True,
    ),
    Rung("FP8 cache", "keys and values in float8", {"has_fp8_cache": True}),
    Rung(
        "FP8 attention", "attention's projections by fp8_gemm, one launch a step again",
        {"has_fp8_projections": True},
    ),
    Rung("FP8 lm_head", "the head by fp8_gemm, and torch's topk", {"has_fp8_head": True}),
    Rung("prefix cache", "prompts share pages of equal blocks", {"has_prefix_cache": True}),
    Rung("speculation", "n-gram drafts, verified exactly", {"num_drafts": 4}),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is measured on each rung; the fields are those of `bench`."""

    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 1024
    num_tokens: int = 128
    num_rounds: int = 3
    step_tokens: int = 2048
    prompts: Prompts = field(default_factory=Prompts)

    def limits(self) -> Limits:
        """Those of an engine that takes all requests at once."""
        running = max(self.batches)
        steps = max(self.step_tokens, running)
        return Limits(steps, running, max_waiting=running, context=self.context + self.num_tokens)


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
    """
    names, config = names_of(chosen), source.config()
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


class _Climber:
    """Measures one rung after another; weights stay on the device while rungs share them.

    ``lost`` says why no further rung can run, "" as long as one can.
    """

    def __init__(self, source: ModelSource, plan: Plan) -> None:
        self.lost = ""
        self.device = source.device
        self._source, self._plan = source, plan
        self._is_cuda = self.device == "cuda"
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
        self._free()
        try:
            if reason and self._is_cuda:
                torch.cuda.synchronize()
        except Exception as error:
            self.lost = f"{rung.name} has lost the device: {describe(error)}"
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
            self._free()
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
            self._free()
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
            batch_sizes=tuple(sorted(set(self._plan.batches))) if self._is_cuda else None,
            has_graphs=setup.has_graphs,
        )

    def _memory(self) -> int | None:
        if not self._is_cuda:
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _free(self) -> None:
        """Returns memory that nothing uses to the device."""
        gc.collect()
        if self._is_cuda and not self.lost:
            torch.cuda.empty_cache()

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
