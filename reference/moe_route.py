"""`moe_route`: router logits to expert ids, weights, counts and index maps sorted by expert.

Logits are given, or are the router's product in float32: logits = x @ router^T + router_bias.
*Selection scores* of a token's experts, with s = sigmoid(logit):

    softmax    logit
    sigmoid    s + correction; then -inf outside of the top_groups groups with the largest sums of
               their two best selection scores (of one where groups have one expert). Groups are
               experts / groups consecutive experts.

A token selects the top_k experts with the largest selection scores, in descending order. Ties of
experts and of groups go to the lower index. Logits may be -inf, but at least top_k logits of a
token must be finite; NaN is not allowed. *Weights* of the selected experts are

    softmax    exp(logit) / the sum of exp(logit), over all experts, or with renormalize over the
               token's selected experts
    sigmoid    s, without the correction; with renormalize divided by (the sum of s over the
               token's selected experts + 1e-20)

times scaling. *Assignment* token * top_k + slot is a token's selected expert number ``slot``. With
capacity_factor > 0 an expert serves at most

    capacity = ceil(capacity_factor * (tokens * top_k) / experts)    in float64, from left to right

assignments, its first ones by index. All others are *dropped* (overflow "drop": other weights stay
as they are) or *rerouted*, in rounds. In a round each unplaced assignment proposes to one expert.
The unplaced assignments of a token, by slot, propose to the token's best experts by selection
score, each to another expert, among those with a selection score above -inf that the token does not
use and that had room when the round began. An expert accepts proposals by assignment index until
it is full. An assignment that finds no expert to propose to is dropped. Rounds go on until every
assignment is placed or dropped. A rerouted assignment keeps its slot, and has the weight of its new
expert by the formulas above, where renormalize sums over the experts that the token uses finally.

`counts`, `offsets`, `order` and `position` describe the assignments that are served; `load` gets
the assignments before the capacity limit added to what it holds.

Sources: Jacobs et al., "Adaptive mixtures of local experts", 1991; Lepikhin et al., "GShard", 2020,
and Fedus et al., "Switch Transformers", 2021 (capacity); Hwang et al., "Tutel", 2022; DeepSeek-AI,
"DeepSeek-V3 technical report", 2024 (sigmoid, correction, groups).
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from random import Random

from kernelcat import dtypes
from kernelcat.catalog.precondition import below_infinity
from kernelcat.catalog.spec import (
    EXACT,
    Axis,
    Derived,
    Entry,
    Peer,
    Problem,
    Tensor,
    Tolerance,
    exact,
)
from kernelcat.reference._arrays import library_of
from kernelcat.reference._moe_route_peers import tokenspeed_route, torch_route
from kernelcat.reference._random_sizes import log_uniform, model_with
from kernelcat.reference._routed_logits import SKEWS, draw_routing
from kernelcat.reference._routing import (
    descending,
    index_maps,
    limit_to_groups,
    logits_of,
    place,
    selection_scores,
    weights_of,
)

DTYPES = ("float32", "bfloat16", "float16")
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 16, 32
ASSIGNMENTS = Derived("tokens * top_k", lambda axes: axes["tokens"] * axes["top_k"])
STARTS = Derived("experts + 1", lambda axes: axes["experts"] + 1)


def _oracle(problem, arrays):
    logits = logits_of(problem, arrays)
    scores = selection_scores(problem, logits, arrays.get("correction"))
    scores = limit_to_groups(problem, scores)
    selected = descending(scores)[:, : problem["top_k"]]
    placed = place(problem, scores, selected)
    maps = {"expert_ids": placed, **index_maps(problem, placed)}
    if problem["load"]:
        xp, experts = library_of(selected), problem["experts"]
        maps["load"] = arrays["load"] + xp.bincount(selected.ravel(), minlength=experts)
    weights = weights_of(problem, logits, selected, placed)
    outputs = {name: array.astype("int32") for name, array in maps.items()}
    return outputs | {"weights": weights.astype("float32")}


def _make_inputs(problem, normal):
    inputs = draw_routing(problem, normal)
    if problem["load"]:
        inputs["load"] = abs(1000 * normal((problem["experts"],))).astype("int32")
    return inputs


def _flops(problem: Problem) -> int:
    """The product, and one comparison for each logit."""
    num_logits = problem["tokens"] * problem["experts"]
    return int(num_logits * (2 * problem["hidden"] * problem["product"] + 1))


def _bytes_moved(problem: Problem) -> int:
    """Every input once, and the outputs; `load` is read and written."""
    tokens, experts, hidden = (problem[axis] for axis in ("tokens", "experts", "hidden"))
    size = dtypes.itemsize(problem["dtype"])
    read = tokens * experts * size
    if problem["product"]:
        read = (tokens + experts) * hidden * size + problem["router_bias"] * experts * size
    vectors = problem["correction"] + 2 * problem["load"] + 2
    return int(read + 4 * (vectors * experts + 1) + 16 * tokens * problem["top_k"])


def _constraint(problem):
    experts, top_k, groups, top_groups = (
        problem[axis] for axis in ("experts", "top_k", "groups", "top_groups")
    )
    if not 1 <= experts <= MAX_EXPERTS:
        return f"experts={experts} must be 1 to {MAX_EXPERTS}"
    if not 1 <= top_k <= min(experts, MAX_TOP_K):
        return f"top_k={top_k} must be 1 to {MAX_TOP_K}, and at most experts={experts}"
    if not 1 <= groups <= MAX_GROUPS or experts % groups:
        return f"groups={groups} must be 1 to {MAX_GROUPS} and divide experts={experts}"
    if not top_groups >= 1 or min(top_groups, groups) * (experts // groups) < top_k:
        return f"top_groups={top_groups} of {groups} groups must have top_k={top_k} experts"
    return _constraint_of_flags(problem)


def _constraint_of_flags(problem):
    if problem["score"] != "sigmoid" and (problem["groups"] > 1 or problem["correction"]):
        return "groups and a correction are supported with score='sigmoid' only"
    if problem["router_bias"] and not problem["product"]:
        return "router_bias needs x and router: given logits include a bias"
    if problem["product"] and problem["hidden"] == 0:
        return "hidden=0: x and router must have columns"
    if problem["capacity_factor"] < 0:
        return f"capacity_factor={problem['capacity_factor']} must not be negative"
    if not isfinite(problem["capacity_factor"] * problem["tokens"] * problem["top_k"]):
        return f"capacity_factor={problem['capacity_factor']} is too large"
    return None


def routed(tokens: int, experts: int, top_k: int, **more: float | int | str | bool) -> Problem:
    """The problem of these sizes; ``more`` are further axes, and the logits are float32."""
    axes = {axis.name: axis.default for axis in AXES if axis.default is not None}
    axes |= {"dtype": "float32", "tokens": tokens, "experts": experts, "top_k": top_k, **more}
    return Problem.of("moe_route", **axes)


def _problems() -> dict[str, Problem]:
    """Routers of gpt-oss, DeepSeek-V3 and Qwen3."""
    qwen = {"renormalize": True, "dtype": "bfloat16"}
    deepseek = {
        "score": "sigmoid", "renormalize": True, "correction": True, "groups": 8, "top_groups": 4,
        "scaling": 2.5,
    }  # fmt: skip
    named = {"8192-256-top8": routed(8192, 256, 8, renormalize=True)}
    for tokens in (1, 8, 64, 512, 4096, 16384):
        named[f"qwen3-30b-{tokens}"] = routed(tokens, 128, 8, **qwen)
        named[f"deepseek-v3-{tokens}"] = routed(tokens, 256, 8, **deepseek)
    for tokens in (1, 64, 4096):
        named[f"gpt-oss-20b-{tokens}"] = routed(tokens, 32, 4, renormalize=True)
        named[f"gpt-oss-120b-{tokens}"] = routed(tokens, 128, 4, renormalize=True)
    product = {**qwen, "product": True, "hidden": 2048}
    limited = {**qwen, "capacity_factor": 1.0, "skew": "zipf"}
    return named | {
        "qwen3-30b-64-product": routed(64, 128, 8, **product),
        "qwen3-30b-4096-drop": routed(4096, 128, 8, **limited),
        "qwen3-30b-512-reroute": routed(512, 128, 8, **limited, overflow="reroute"),
        "deepseek-v3-4096-load": routed(4096, 256, 8, **deepseek, load=True),
    }


def _random_problem(dice: Random) -> Problem:
    """A model's router, or softmax over other numbers of experts; without a capacity limit."""
    model, tokens, skew = (
        model_with(dice, "experts"),
        log_uniform(dice, 1, 16384),
        dice.choice(SKEWS),
    )
    experts, top_k = model.experts, model.top_k
    if dice.random() < 0.5:
        experts, top_k = 8 * dice.randint(1, 48), dice.randint(1, 8)
    if experts == 256:
        return routed(
            tokens, experts, top_k, score="sigmoid", renormalize=True, correction=True, groups=8,
            top_groups=4, scaling=2.5, skew=skew,
        )  # fmt: skip
    dtype = dice.choice(("float32", "bfloat16"))
    return routed(tokens, experts, top_k, renormalize=True, dtype=dtype, skew=skew)


AXES = (
    Axis.size("tokens", "tokens", 0, 600),
    Axis.size("experts", "experts that a token selects from, 1 to 512", 1, MAX_EXPERTS, exact),
    Axis.size("top_k", "experts that a token selects, 1 to 16", 1, MAX_TOP_K, exact),
    Axis.choice("dtype", "element type of logits, or of x and the router", *DTYPES, minor=True),
    Axis.flag("product", "whether logits are computed from x and the router"),
    Axis.size("hidden", "elements of a row of x; unused where logits are given", 0, 200, default=0),
    Axis.choice(
        "score", "what weights are made of", "softmax", "sigmoid", default="softmax"
    ),
    Axis.flag("renormalize", "whether a token's weights sum to scaling", minor=True),
    Axis.size("groups", "groups of experts, 1 to 32", 1, 8, exact, default=1),
    Axis.size(
        "top_groups", "groups that a token selects from; all where there are no more", 1, 8, exact,
        default=1,
    ),
    Axis.flag("correction", "whether a correction is added before the selection", minor=True),
    Axis.flag("router_bias", "whether the product has a bias", minor=True),
    Axis.number("scaling", "factor of all weights", 1.0, 2.5, default=1.0),
    Axis.number(
        "capacity_factor", "capacity relative to equal loads; 0: no limit", 0.0, 0.5, 1.0, 1.25
    ),
    Axis.choice(
        "overflow", "what happens to assignments beyond the capacity", "drop", "reroute",
        default="drop",
    ),
    Axis.flag("load", "whether assignments are also added to load", minor=True),
    Axis.choice(
        "skew", "how drawn logits prefer experts; without effect on a call", *SKEWS,
        default="uniform", minor=True, drawn=True,
    ),
)  # fmt: skip

_WEIGHT = Tolerance(2**-30, 2**-18)
"""Rounding of differences of logits, and of an exponential, in float32."""

ENTRY = Entry(
    name="moe_route",
    summary="Router logits to expert ids, weights, and index maps sorted by expert, in one launch.",
    axes=(replace(AXES[0], varies=True), *AXES[1:]),
    inputs=(
        Tensor(
            "logits", ("tokens", "experts"), "dtype", "the router's output", flag="product",
            when=False,
        ),
        Tensor("x", ("tokens", "hidden"), "dtype", "rows of the router's product", flag="product"),
        Tensor("router", ("experts", "hidden"), "dtype", "the router's weights", flag="product"),
        Tensor("router_bias", ("experts",), "dtype", "added to the product", flag="router_bias"),
        Tensor("correction", ("experts",), "float32", "added before selecting", flag="correction"),
    ),
    outputs=(
        Tensor(
            "expert_ids", ("tokens", "top_k"), "int32",
            "selected experts by descending selection score; -1 where dropped", tolerance=EXACT,
            optional_for_peers=True,
        ),
        Tensor("weights", ("tokens", "top_k"), "float32", "their weights; 0 where dropped"),
        Tensor(
            "counts", ("experts",), "int32", "assignments that an expert serves", tolerance=EXACT,
            optional_for_peers=True,
        ),
        Tensor(
            "offsets", (STARTS,), "int32", "exclusive prefix sums of counts", tolerance=EXACT,
            optional_for_peers=True,
        ),
        Tensor(
            "order", (ASSIGNMENTS,), "int32",
            "assignments sorted by expert, then by index; -1 from offsets[experts] on",
            tolerance=EXACT, optional_for_peers=True,
        ),
        Tensor(
            "position", ("tokens", "top_k"), "int32",
            "where in order the assignment stands; -1 where dropped", tolerance=EXACT,
            optional_for_peers=True,
        ),
        Tensor(
            "load", ("experts",), "int32", "gets assignments before the capacity limit added",
            flag="load", tolerance=EXACT, optional_for_peers=True, updated=True, accumulated=True,
        ),
    ),
    preconditions=(below_infinity("logits", minus_infinity=True),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, _WEIGHT),
    flops=_flops,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    peers=(Peer("torch", torch_route), Peer("tokenspeed", tokenspeed_route)),
    without_peer=dict.fromkeys(
        ("*-drop", "*-reroute", "*-load"),
        "peers are raced without a capacity limit and without load",
    ),
    constraint=_constraint,
)  # fmt: skip
