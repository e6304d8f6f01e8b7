"""`moe_mlp`: the experts of a mixture-of-experts layer, from router logits to the layer's output.

    ids, gates = the routing of `_layer_routing` of logits[t]
    h[t, s] = activation(x[t] @ W1[e]^T + bias1[e]),  e = ids[t, s]
    out[t] = residual[t] + sum over slots s of gates[t, s] * (h[t, s] @ W2[e]^T + bias2[e])

W1 (2 * inter, hidden) has gates in its even rows and the values that they gate in the odd ones, as
gpt-oss stores them. h is rounded to ``dtype``. With ``act_dtype`` float8_e4m3fn, x and h are
quantized with a scale for each row and 128 columns before they are multiplied (`_fp8`). Sums are
float32 and out is rounded once. Formats of weights are those of `_experts`.
"""

from __future__ import annotations

from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Entry, Problem, Signal, Tensor, Tolerance
from kernelcat.reference import _experts, _layer_routing
from kernelcat.reference._arrays import library_of
from kernelcat.reference._assignments import SKEW, SKEWS, TOKENS, TOP_K, active, preferences
from kernelcat.reference._experts import ACT_DTYPE, DTYPE, EXPERTS, FORMAT, FP8, PACKING
from kernelcat.reference._peers import peer_in
from kernelcat.reference._random_sizes import log_uniform

LOGIT_DTYPES = ("float32", "bfloat16", "float16")


def _rounded(x, dtype: str):
    """Values of float32 ``x`` rounded to ``dtype``; other types of x stay unrounded."""
    return dtypes.decode(dtypes.encode(x, dtype), dtype) if x.dtype == "float32" else x


def _quantized(problem, x):
    return _experts.quantized(x) if problem["act_dtype"] == FP8 and x.dtype == "float32" else x


def _oracle(problem, arrays):
    hidden, inter = problem["hidden"], problem["inter"]
    x, xp = arrays["x"], library_of(arrays["x"])
    ids, gates = _layer_routing.select(problem, arrays["logits"], arrays.get("correction"))
    out = arrays["residual"].copy() if problem["residual"] else xp.zeros_like(x)
    x = _quantized(problem, x)
    for expert in range(problem["experts"]):
        tokens, slots = xp.nonzero(ids == expert)
        if not tokens.size:
            continue
        w1 = _experts.weights(problem, arrays, "1", expert, 2 * inter, hidden).astype(x.dtype)
        w2 = _experts.weights(problem, arrays, "2", expert, hidden, inter).astype(x.dtype)
        bias1, bias2 = (arrays[n][expert] if problem["bias"] else 0 for n in ("bias1", "bias2"))
        h = _experts.activate(problem["activation"], x[tokens] @ w1.T + bias1)
        y = _quantized(problem, _rounded(h, problem["dtype"])) @ w2.T + bias2
        out[tokens] += gates[tokens, slots].astype(x.dtype)[:, None] * y
    return {"out": out}


def _exact(problem, drawn):
    """out of activations that are not quantized; nothing where none are."""
    if problem["act_dtype"] != FP8:
        return {}
    axes = {**problem.values, "act_dtype": problem["dtype"]}
    return _oracle(Problem.of("moe_mlp", **axes), drawn)


LEAST_SQNR = 24.0
"""Signal to quantization noise of float8 activations that out must have at least, in dB."""
MIN_OUTPUTS, MIN_INTER = 4096, 64
"""Elements of out, and columns of h, that make a ratio of sums meaningful."""


def _least_sqnr(problem: Problem) -> float | None:
    """The least signal to quantization noise in dB, or None where no activation is quantized.

    In small problems a single element of h decides the ratio.
    """
    is_small = problem["tokens"] * problem["hidden"] < MIN_OUTPUTS or problem["inter"] < MIN_INTER
    return None if problem["act_dtype"] != FP8 or is_small else LEAST_SQNR


def _make_inputs(problem, normal):
    """Logits follow the skew, and no selection depends on rounding."""
    inputs = {"x": normal((problem["tokens"], problem["hidden"]))}
    if problem["correction"]:
        inputs["correction"] = _layer_routing.draw_correction(problem, normal)
    logits = preferences(problem, normal)
    dtype = problem["logit_dtype"]
    logits = dtypes.decode(dtypes.encode(logits, dtype), dtype)
    inputs["logits"] = _layer_routing.clear_logits(problem, logits, inputs.get("correction"))
    if problem["residual"]:
        inputs["residual"] = normal((problem["tokens"], problem["hidden"]))
    hidden, inter = problem["hidden"], problem["inter"]
    inputs |= _experts.draw(problem, "1", 2 * inter, hidden, normal)
    return inputs | _experts.draw(problem, "2", hidden, inter, normal)


def expert_bytes(problem) -> int:
    """Bytes of the weights and biases of one expert."""
    hidden, inter, axes = problem["hidden"], problem["inter"], problem.values
    size = _experts.weight_bytes(axes, 2 * inter, hidden)
    size += _experts.weight_bytes(axes, hidden, inter)
    return int(size + dtypes.itemsize(problem["dtype"]) * (2 * inter + hidden) * problem["bias"])


def _bytes_moved(problem: Problem) -> int:
    """Weights of each active expert, x and out once; what lies between could stay on the chip."""
    tokens, size = problem["tokens"], dtypes.itemsize(problem["dtype"])
    rows = (3 if problem["residual"] else 2) * tokens * problem["hidden"] * size
    logits = tokens * problem["experts"] * dtypes.itemsize(problem["logit_dtype"])
    return active(problem) * expert_bytes(problem) + int(rows + logits)


def _constraint(problem: Problem) -> str | None:
    hidden, inter = problem["hidden"], problem["inter"]
    return (
        _layer_routing.routing_error(problem)
        or _experts.error(problem, 2 * inter, hidden)
        or _experts.error(problem, hidden, inter)
    )


def layer(tokens: int, top_k: int, experts: int, hidden: int, inter: int, **axes) -> Problem:
    """A layer of bfloat16 weights with renormalized softmax; ``axes`` replaces other choices."""
    others = {
        "dtype": "bfloat16", "format": "bfloat16", "act_dtype": "bfloat16", "packing": "rows",
        "bias": False, "residual": False, "activation": "swiglu", "skew": "uniform",
        "logit_dtype": "float32", "score": "softmax", "renormalize": True, "groups": 1,
        "top_groups": 1, "scaling": 1.0, "correction": False, **axes,
    }  # fmt: skip
    return Problem.of(
        "moe_mlp", tokens=tokens, top_k=top_k, experts=experts, hidden=hidden, inter=inter, **others
    )


_FP8 = {"format": "fp8"}
MODELS = {
    "gptoss": (4, 32, 2880, 2880, {"activation": "swiglu_oai"}),
    "dsv3": (8, 256, 7168, 2048, {}),
    "qwen3": (8, 128, 2048, 768, {}),
}
"""top_k, experts, hidden, inter and activation of gpt-oss-20b, DeepSeek-V3 and Qwen3-30B-A3B."""
FORMATS = {
    "gptoss": {"bf16": {}, "mxfp4": {"format": "mxfp4", "packing": "tiles"}},
    "dsv3": {"fp8": _FP8, "fp8-a8": {**_FP8, "act_dtype": FP8}},
    "qwen3": {"bf16": {}, "fp8": _FP8, "fp8-a8": {**_FP8, "act_dtype": FP8}},
}
TOKEN_COUNTS = (1, 8, 64, 256, 1024, 4096, 16384)


def _problems() -> dict[str, Problem]:
    problems = {}
    for model, (*sizes, more) in MODELS.items():
        for format, axes in FORMATS[model].items():
            for tokens in TOKEN_COUNTS:
                name = f"{model}-{tokens}-{format}"
                problems[name] = layer(tokens, *sizes, **more, **axes)
    mxfp4 = FORMATS["gptoss"]["mxfp4"]
    for skew in ("zipf", "hot"):
        for tokens in (64, 1024):
            problems[f"gptoss-{tokens}-mxfp4-{skew}"] = layer(
                tokens, 4, 32, 2880, 2880, activation="swiglu_oai", skew=skew, **mxfp4
            )
    return problems


MAX_WEIGHT_BYTES = 12 * 10**9
"""Bytes of all experts of a random problem, in as many copies as keep the L2 cache cold: those of
DeepSeek-V3 in float8 fit. A race also holds two further draws, and what each peer makes of them."""
COLD_BYTES = 3 * 60 * 2**20
"""Bytes that runs on all copies move together: three times the L2 cache of an H200."""


def _random_layer(dice: Random) -> Problem:
    """A layer with a model's sizes, or with sizes between the models' and around them."""
    top_k, experts, hidden, inter, more = dice.choice(tuple(MODELS.values()))
    format = dice.choice(({}, FORMATS["gptoss"]["mxfp4"], _FP8, FORMATS["dsv3"]["fp8-a8"]))
    if dice.random() < 0.75:
        top_k, experts = dice.randint(1, 8), 2 ** dice.randint(3, 8)
        hidden, inter = log_uniform(dice, 1024, 7168, 128), log_uniform(dice, 512, 3072, 128)
    return layer(
        round(2 ** dice.uniform(0, 14)), top_k, experts, hidden, inter,
        **more, **format, skew=dice.choice(SKEWS),
    )  # fmt: skip


def _random_problem(dice: Random) -> Problem:
    while True:
        problem = _random_layer(dice)
        copies = max(1, -(-COLD_BYTES // _bytes_moved(problem)))
        if copies * problem["experts"] * expert_bytes(problem) <= MAX_WEIGHT_BYTES:
            return problem


def _unusual_problem(dice: Random) -> Problem:
    """Any number of experts, and sizes far from those of models."""
    tiles = {"packing": "tiles"}
    while True:
        format = dice.choice(({}, {"format": "mxfp4", **tiles}, {"format": "nvfp4", **tiles},
                              _FP8, FORMATS["dsv3"]["fp8-a8"]))  # fmt: skip
        top_k = dice.randint(1, 8)
        problem = layer(
            round(2 ** dice.uniform(0, 14)), top_k, log_uniform(dice, top_k, 256),
            log_uniform(dice, 64, 8192, 64), log_uniform(dice, 64, 8192, 64),
            activation=dice.choice(_experts.ACTIVATIONS[1:]), **format, skew=dice.choice(SKEWS),
        )  # fmt: skip
        if problem["experts"] * expert_bytes(problem) <= MAX_WEIGHT_BYTES:
            return problem


W1, W1_OPTIONAL = _experts.tensors(
    "1",
    lambda axes: 2 * axes["inter"],
    lambda axes: axes["hidden"],
    ("inter", lambda size, axes: size // 2),
)
W2, W2_OPTIONAL = _experts.tensors(
    "2",
    lambda axes: axes["hidden"],
    lambda axes: axes["inter"],
    ("hidden", lambda size, axes: size),
)

ENTRY = Entry(
    name="moe_mlp",
    summary="The experts of a mixture-of-experts layer: routing, both products and weighted sum.",
    axes=(
        TOKENS,
        TOP_K,
        EXPERTS,
        Axis.size("hidden", "columns of x and out", 0, 288, step=16),
        Axis.size("inter", "columns between the products", 0, 224, step=16),
        DTYPE,
        FORMAT,
        ACT_DTYPE,
        PACKING,
        Axis.flag("bias", "whether both products have a bias", minor=True),
        Axis.flag("residual", "whether a residual is added to the output", minor=True),
        Axis.choice("activation", "function of the first product", *_experts.ACTIVATIONS[1:]),
        Axis.choice("logit_dtype", "element type of logits", *LOGIT_DTYPES, minor=True),
        _layer_routing.SCORE,
        _layer_routing.RENORMALIZE,
        _layer_routing.GROUPS,
        _layer_routing.TOP_GROUPS,
        _layer_routing.SCALING,
        _layer_routing.CORRECTION,
        SKEW,
    ),
    inputs=(
        Tensor("x", ("tokens", "hidden"), "dtype", "activations"),
        Tensor("logits", ("tokens", "experts"), "logit_dtype", "the router's logits"),
        W1,
        W2,
        Tensor(
            "correction", ("experts",), "float32", "added to scores to select, not to weigh",
            flag="correction",
        ),
        *W1_OPTIONAL,
        *W2_OPTIONAL,
        Tensor("residual", ("tokens", "hidden"), "dtype", "added to the output", flag="residual"),
    ),
    outputs=(Tensor("out", ("tokens", "hidden"), "dtype", "the layer's output"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    # h is rounded before the second product: its half steps add up like noise, and out is rounded
    # once more. In float8 an h near the border of two codes may become either, which changes h by
    # up to an eighth; the signal limits how often.
    tolerance={
        "bfloat16": Tolerance(2**-5, 2**-6),
        "float16": Tolerance(2**-7, 2**-8),
        FP8: Tolerance(2**-2, 2**-4),
    },
    tolerance_axis="act_dtype",
    signal=Signal(_exact, _least_sqnr),
    flops=lambda problem: int(
        6 * problem["tokens"] * problem["top_k"] * problem["hidden"] * problem["inter"]
    ),
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    unusual_problem=_unusual_problem,
    peers=(
        peer_in("_moe_peers", "triton_kernels"),
        peer_in("_humming", "humming"),
        peer_in("_flashinfer_moe", "flashinfer"),
        peer_in("_quack_moe", "quack", "moe_mlp"),
        peer_in("_moe_peers", "torch", "torch_experts"),
    ),
    constraint=_constraint,
)  # fmt: skip
