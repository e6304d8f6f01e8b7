"""`out_router`: output projection of attention, residual, RMSNorm and the router's logits.

It is what a decoder layer computes between attention and its experts, for batches so small that the
weights are most of what has to be read. For each token, with attn the results of all its heads:

    h = residual + wo attn + bo, rounded to dtype; residual becomes h
    x = h / sqrt(mean(h^2) + eps) * norm_weight, rounded to dtype
    logits = router x + router_bias, in float32

Sums are in float32. The bias bo is added where ``bias``, router_bias where ``router_bias``. A dense
layer has no router (``has_router`` False, experts 0): then x goes on to its MLP.

``residual`` is an output that is updated: pass the residual stream as the last array of ``out``.

Sources: the fusion is that of decoders written as few launches, among them Hazy Research's
low-latency Llama megakernel (2025).
"""

from __future__ import annotations

from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance, exact
from kernelcat.reference._arrays import library_of
from kernelcat.reference._models import SHARDS
from kernelcat.reference._out_router_peers import torch_compiled, torch_eager
from kernelcat.reference._random_sizes import log_uniform, model_with
from kernelcat.reference.nvfp4_quantize import rms_norm as normalize

DTYPES = ("bfloat16", "float16")


def _make_inputs(problem, normal):
    """Rows have magnitudes of 1 and less, so eps matters; wo attn has half the residual's size."""
    tokens, width, hidden, experts = (
        problem[axis] for axis in ("tokens", "width", "hidden", "experts")
    )
    magnitude = 2.0 ** (-4 * abs(normal((tokens, 1))))
    float32 = library_of(magnitude).float32
    inputs = {
        "attn": normal((tokens, width)) * magnitude,
        "wo": normal((hidden, width)) * float32(0.5 * max(width, 1) ** -0.5),
        "norm_weight": 1 + 0.2 * normal((hidden,)),
        "residual": normal((tokens, hidden)) * magnitude,
    }
    if problem["has_router"]:
        inputs["router"] = normal((experts, hidden)) * float32(max(hidden, 1) ** -0.5)
    if problem["bias"]:
        inputs["bo"] = 0.25 * normal((hidden,))
    if problem["router_bias"]:
        inputs["router_bias"] = 0.5 * normal((experts,))
    return inputs


def _oracle(problem, arrays):
    """The residual is returned before it is rounded, so an element seldom keeps its old value."""
    dtype = problem["dtype"]
    h = arrays["residual"] + arrays["attn"] @ arrays["wo"].T
    if problem["bias"]:
        h = h + arrays["bo"]
    x = normalize(_rounded(h, dtype), arrays["norm_weight"], problem["eps"])
    outputs = {"residual": h, "x": x}
    if problem["has_router"]:
        logits = _rounded(x, dtype) @ arrays["router"].T
        outputs["logits"] = logits + arrays["router_bias"] if problem["router_bias"] else logits
    return outputs


def _rounded(array, dtype: str):
    """Values of ``array`` rounded to ``dtype``, in the type that they have."""
    return dtypes.decode(dtypes.encode(array, dtype), dtype).astype(array.dtype)


def _flops(problem: Problem) -> int:
    """The two products, and four operations of the norm for each element of x."""
    elements = problem["tokens"] * problem["hidden"]
    return int(elements * (2 * problem["width"] + 2 * problem["experts"] + 4))


def _bytes_moved(problem: Problem) -> int:
    """Every input once and every output; the residual is read and written."""
    tokens, width, hidden, experts = (
        problem[axis] for axis in ("tokens", "width", "hidden", "experts")
    )
    if not tokens:
        return 0
    weights = hidden * (width + experts + 1 + problem["bias"]) + problem["router_bias"] * experts
    size = dtypes.itemsize(problem["dtype"])
    return int(size * (weights + tokens * (width + 3 * hidden)) + 4 * tokens * experts)


def _constraint(problem: Problem) -> str | None:
    if problem["has_router"]:
        return None
    if problem["experts"]:
        return f"experts={problem['experts']} must be 0 without a router"
    return "router_bias needs a router" if problem["router_bias"] else None


def routed(
    tokens: int, width: int, hidden: int, experts: int = 0, **more: float | str | bool
) -> Problem:
    """The problem of these sizes; without experts there is no router. ``more`` are other axes."""
    axes = {axis.name: axis.default for axis in AXES if axis.default is not None}
    sizes = {"tokens": tokens, "width": width, "hidden": hidden, "experts": experts}
    return Problem.of(
        "out_router", **{**axes, "dtype": "bfloat16", "has_router": experts > 0, **sizes, **more}
    )


MODELS = {
    "gptoss": ((64 * 64, 2880, 32), {"bias": True, "router_bias": True}),
    "qwen3-30b": ((32 * 128, 2048, 128), {"eps": 1e-6}),
    "deepseek-v3": ((128 * 128, 7168, 256), {"eps": 1e-6}),
    "llama-8b": ((32 * 128, 4096), {}),
}
"""Width of attention's result, hidden size and experts; and other axes."""


def _random_problem(dice: Random) -> Problem:
    """A model's projection, whole or a GPU's share of it; models without experts have no router."""
    model, tokens, bias = model_with(dice), log_uniform(dice, 1, 128), dice.random() < 0.3
    width = model.heads * model.head_dim // dice.choice(SHARDS)
    has_bias = bias and model.experts > 0
    return routed(
        tokens, width // 8 * 8, model.hidden, model.experts, bias=bias, router_bias=has_bias
    )


AXES = (
    Axis.size("tokens", "rows of attn", 0, 70, varies=True),
    Axis.size("width", "columns of attn: heads times elements of a head", 0, 600, exact),
    Axis.size("hidden", "columns of the residual stream", 0, 600, exact),
    Axis.size("experts", "rows of the router; 0 without a router", 0, 300, exact, default=0),
    Axis.choice("dtype", "element type of all arrays but logits", *DTYPES, minor=True),
    Axis.flag("has_router", "whether logits are computed"),
    Axis.flag("bias", "whether bo is given", minor=True),
    Axis.flag("router_bias", "whether router_bias is given", minor=True),
    Axis.number("eps", "added to the mean square", 1e-5, 1e-6, default=1e-5),
)

ENTRY = Entry(
    name="out_router",
    summary="Attention's output projection, residual, RMSNorm and the router's logits, fused.",
    axes=AXES,
    inputs=(
        Tensor("attn", ("tokens", "width"), "dtype", "results of attention, all heads of a token"),
        Tensor("wo", ("hidden", "width"), "dtype", "weights of the output projection"),
        Tensor("norm_weight", ("hidden",), "dtype", "factor of each column after RMSNorm"),
        Tensor(
            "router", ("experts", "hidden"), "dtype", "the router's weights", flag="has_router"
        ),
        Tensor("bo", ("hidden",), "dtype", "added to the output projection", flag="bias"),
        Tensor("router_bias", ("experts",), "dtype", "added to the logits", flag="router_bias"),
    ),
    outputs=(
        Tensor("x", ("tokens", "hidden"), "dtype", "the normalized rows: the experts' input"),
        Tensor(
            "logits", ("tokens", "experts"), "float32", "the router's output", flag="has_router"
        ),
        Tensor(
            "residual", ("tokens", "hidden"), "dtype",
            "h = residual + wo attn + bo takes its place", updated=True, accumulated=True,
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    # In bfloat16: x may follow either neighbour of h, 2^-7 of it apart, and is rounded by 2^-8.
    # Peers also round wo attn + bo, which is less than 4, so by 2^-7. In logits, sums of many
    # elements of x, these roundings go either way and add up to less than 2^-6.
    tolerance={"bfloat16": Tolerance(2**-6, 2**-6), "float16": Tolerance(2**-9, 2**-9)},
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems={
        f"{model}-{tokens}": routed(tokens, *sizes, **axes)
        for model, (sizes, axes) in MODELS.items()
        for tokens in (1, 8, 64)
    },
    random_problem=_random_problem,
    peers=(Peer("torch", torch_eager), Peer("torch.compile", torch_compiled)),
    constraint=_constraint,
)  # fmt: skip
