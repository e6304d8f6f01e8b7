"""Parts of a layer that several models have: grouped-query attention's projections, and MLPs.

For few tokens a projection is one launch with all that surrounds it (`qkv_rope_write`,
`out_router`); for many tokens each step is an entry of its own (`Ops.projected_tokens`,
`Ops.fused_tokens`).

A model on several ranks has a part of each matrix, and a product is a part of a sum. The sum over
all ranks is what is added to the residual stream (`added`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernelcat.moe.batch import Batch
from kernelcat.moe.ops import leaving, on
from kernelcat.moe.parallel.halves import REDUCE_SMS
from kernelcat.moe.weights import Weights, stack

if TYPE_CHECKING:
    from kernelcat.moe.model import Decoder
    from kernelcat.moe.parallel.exchange import Exchange

Tensors = tuple[torch.Tensor, ...]
Names = tuple[str, str, str]
MLP_NAMES: Names = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Projections:
    """Weights of the projections to queries, keys and values, with the norm before them.

    Attributes
    ----------
    norm : (hidden,)
    weights : (heads, head_dim, hidden), and twice (kv_heads, head_dim, hidden)
    biases : (heads, head_dim), and twice (kv_heads, head_dim); or nothing
    head_norms : (head_dim,) for queries and keys, which are normalized before RoPE; or nothing
    """

    norm: torch.Tensor
    weights: Tensors
    biases: Tensors = ()
    head_norms: Tensors = ()

    @staticmethod
    def read(
        weights: Weights, prefix: str, config: Any, *, bias: bool = False, norms: bool = False
    ) -> Projections:
        """The projections of the layer whose tensors' names begin with ``prefix``."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        dim, hidden = config.head_dim, config.hidden_size
        count = {"q": heads, "k": kv_heads, "v": kv_heads}
        name = f"{prefix}self_attn.{{}}".format
        return Projections(
            norm=weights(f"{prefix}input_layernorm.weight", hidden),
            weights=tuple(
                weights(name(f"{p}_proj.weight"), n * dim, hidden).view(n, dim, hidden)
                for p, n in count.items()
            ),
            biases=tuple(
                weights(name(f"{p}_proj.bias"), n * dim).view(n, dim)
                for p, n in count.items()
                if bias
            ),
            head_norms=tuple(weights(name(f"{p}_norm.weight"), dim) for p in "qk" if norms),
        )


@dataclass(frozen=True)
class Output:
    """Weights of attention's output projection, of the norm after it, and of a router.

    Attributes
    ----------
    weight, bias : (hidden, width), (hidden,) or None
    norm : (hidden,)
    router, router_bias : (experts, hidden), (experts,); None in a dense layer, or without bias
    """

    weight: torch.Tensor
    norm: torch.Tensor
    bias: torch.Tensor | None = None
    router: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None

    @staticmethod
    def read(
        weights: Weights,
        prefix: str,
        config: Any,
        *,
        bias: bool,
        router: torch.Tensor | None = None,
        router_bias: torch.Tensor | None = None,
    ) -> Output:
        """The weights of the layer whose tensors' names begin with ``prefix``."""
        name, hidden = f"{prefix}self_attn.o_proj", config.hidden_size
        width = config.num_attention_heads * config.head_dim
        return Output(
            weight=weights(f"{name}.weight", hidden, width),
            norm=weights(f"{prefix}post_attention_layernorm.weight", hidden),
            bias=weights(f"{name}.bias", hidden) if bias else None,
            router=router,
            router_bias=router_bias,
        )


def queries(
    model: Decoder, p: Projections, x: torch.Tensor, kv: Tensors, table: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """Rotated queries (tokens, heads, head_dim) of x; keys and values go to the cache ``kv``."""
    ops, eps = model.ops, model.config.rms_norm_eps
    heads, head_dim, _ = p.weights[0].shape
    out = (x.new_empty(len(x), heads, head_dim), *kv)
    where = (table, batch.kv_lens, batch.cu_q, model.cos_sin)
    if len(x) <= ops.projected_tokens and not p.head_norms:
        ops.qkv_rope_write(x, p.norm, *p.weights, *where, *p.biases, eps=eps, out=out)
        return out[0]
    a = model.normalized(x, p.norm)
    biases = p.biases or (None,) * 3
    qkv = [
        ops.gemm(a, weight.flatten(0, 1), None if bias is None else bias.flatten()).view(
            len(x), -1, head_dim
        )
        for weight, bias in zip(p.weights, biases, strict=True)
    ]
    for i, norm in enumerate(p.head_norms):
        qkv[i] = model.normalized(qkv[i].view(-1, head_dim), norm).view_as(qkv[i])
    ops.kv_write(*qkv, *where, out=out)
    return out[0]


def output(
    model: Decoder, o: Output, attn: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The residual stream after attention, its norm, and the router's logits (None without router).

    ``attn`` (tokens, width) are the results of all heads; x (tokens, hidden) may be overwritten.
    Logits are float32 for few tokens on one rank, and of the model's type otherwise.
    """
    ops, eps = model.ops, model.config.rms_norm_eps
    if len(x) <= ops.fused_tokens and model.exchange is None:
        a = torch.empty_like(x)
        logits = None
        if o.router is not None:
            logits = x.new_empty(len(x), len(o.router), dtype=torch.float32)
        ops.out_router(
            attn, o.weight, o.norm, o.router, o.bias, o.router_bias, eps=eps, out=(a, logits, x)
        )
        return x, a, logits
    if model.exchange is None:
        x = ops.gemm(attn, o.weight, o.bias, x)
        a = model.normalized(x, o.norm)
    else:
        x, a = _summed(model, model.exchange, o, attn, x)
    return x, a, None if o.router is None else ops.gemm(a, o.router, o.router_bias)


def _summed(
    model: Decoder, exchange: Exchange, o: Output, attn: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + the output projections of all ranks, and its norm.

    The sums of the first of two halves travel beside the product of the second.
    """
    gemm, halves, eps = model.ops.gemm, model.halves, model.config.rms_norm_eps
    first = 0 if halves is None else halves.first(len(x))
    if halves is None or not first:
        return exchange.all_reduce_norm(gemm(attn, o.weight, o.bias), x, o.norm, eps)
    halves = halves.of_width(attn.shape[1])
    out = torch.empty_like(x), torch.empty_like(x)
    beside = leaving(gemm, spare) if (spare := halves.spare(REDUCE_SMS)) else gemm

    def sums(tokens: slice, y: torch.Tensor) -> None:
        part = out[0][tokens], out[1][tokens]
        exchange.all_reduce_norm(y, x[tokens], o.norm, eps, part)

    early, late = slice(first), slice(first, None)
    y = gemm(attn[early], o.weight, o.bias)
    mark = halves.beside.mark()
    later = beside(attn[late], o.weight, o.bias)
    halves.start(partial(sums, early, y), REDUCE_SMS, mark)()  # y lives until both streams meet
    sums(late, later)
    return out


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: gates and values in alternate rows (2 * inter, hidden), and (hidden, inter)."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def read(
        weights: Weights, prefix: str, hidden: int, inter: int, names: Names = MLP_NAMES
    ) -> Mlp:
        """The MLP whose tensors' names begin with ``prefix``."""
        gate, up, down = (f"{prefix}{name}.weight" for name in names)
        return Mlp(weights.swiglu(gate, up, inter, hidden), weights(down, hidden, inter))


def mlp(
    model: Decoder, m: Mlp, a: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + down(silu(gate a) * up a), for normalized rows a."""
    h = model.ops.gemm(a, m.gate_up, activation="swiglu")
    out: torch.Tensor = model.ops.gemm(h, m.down, residual=residual)
    return out


def added(
    model: Decoder, x: torch.Tensor, product: Callable[[torch.Tensor | None], torch.Tensor]
) -> torch.Tensor:
    """x + product, for the residual stream x (tokens, hidden); products of ranks are summed first.

    ``product(residual)`` adds ``residual``, if it is not None.
    """
    if model.exchange is None:
        return product(x)
    return model.exchange.all_reduce(product(None), x)


def mixture(
    model: Decoder,
    batch: Batch,
    a: torch.Tensor,
    logits: torch.Tensor | None,
    experts: dict[str, torch.Tensor],
    x: torch.Tensor,
    shared: Callable[[torch.Tensor | None], torch.Tensor] | None = None,
    **routing: Any,
) -> torch.Tensor:
    """x + the experts of a layer, for normalized rows a and the residual stream x: `moe_mlp`.

    Parameters
    ----------
    experts : weights by argument name
    shared : what a shared expert adds to a residual, which may run beside the other experts
    routing : axes of `moe_mlp`
    """
    if model.divided is not None:
        return model.divided(a, logits, experts, x, shared, batch.is_added, model.halves, **routing)

    def product(residual: torch.Tensor | None) -> torch.Tensor:
        residual = residual if shared is None else shared(residual)
        y: torch.Tensor = model.ops.moe_mlp(a, logits, **experts, residual=residual, **routing)
        return y

    return added(model, x, product)


def experts(
    weights: Weights,
    prefix: str,
    count: int,
    hidden: int,
    inter: int,
    names: Names = MLP_NAMES,
) -> dict[str, torch.Tensor]:
    """Weights of `moe_mlp` by argument name, from ``count`` MLPs that are stored one by one.

    Only those of ``weights.share`` are read.
    """
    held = weights.share.of(count)
    quantize = on(weights.device).fp8_quantize if weights.fp8_experts else None

    def expert(index: int) -> dict[str, torch.Tensor]:
        m = Mlp.read(weights, f"{prefix}{index}.", hidden, inter, names)
        if quantize is None:
            return {"w1": m.gate_up, "w2": m.down}
        w1, w1_scale = quantize(m.gate_up, block="128x128")
        w2, w2_scale = quantize(m.down, block="128x128")
        return {"w1": w1, "w1_scale": w1_scale, "w2": w2, "w2_scale": w2_scale}

    return stack(map(expert, held), len(held))
