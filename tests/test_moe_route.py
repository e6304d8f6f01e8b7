"""`moe_route`: the definition at its edges, drawn inputs, launches, maps, and calls."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import kernelcat
from kernelcat import catalog
from kernelcat.errors import InvalidArgument
from kernelcat.reference import _routed_logits, _routing
from kernelcat.reference.moe_route import routed
from kernelcat.runtime import gpu
from kernelcat.verify import gate

ENTRY = catalog.entry("moe_route")
HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
DEEPSEEK = {
    "score": "sigmoid", "renormalize": True, "correction": True, "groups": 8, "top_groups": 4,
    "scaling": 2.5,
}  # fmt: skip


def oracle(problem, **arrays):
    return ENTRY.oracle(problem, {name: np.float32(array) for name, array in arrays.items()})


# ---- the definition -------------------------------------------------------------------------


def test_ties_go_to_the_lower_expert_and_zeros_have_no_sign() -> None:
    out = oracle(routed(2, 4, 3), logits=[[0.0, -0.0, 1.0, -0.0], [2, 2, 2, 2]])
    assert out["expert_ids"].tolist() == [[2, 0, 1], [0, 1, 2]]


def test_weights_of_softmax_are_over_all_experts_or_over_the_selected_ones() -> None:
    logits, e = [[0.0, 1.0, 2.0]], np.e
    out = oracle(routed(1, 3, 2, scaling=3.0), logits=logits)
    assert np.allclose(out["weights"], np.array([[e**2, e]]) * 3 / (1 + e + e**2))
    out = oracle(routed(1, 3, 2, renormalize=True), logits=logits)
    assert np.allclose(out["weights"], np.array([[e, 1]]) / (1 + e))


def test_the_correction_selects_but_has_no_weight() -> None:
    problem = routed(1, 3, 1, score="sigmoid", correction=True)
    out = oracle(problem, logits=[[0.0, 1.0, 2.0]], correction=[1.0, 0.0, 0.0])
    assert out["expert_ids"].tolist() == [[0]] and out["weights"].tolist() == [[0.5]]


def test_the_best_groups_have_the_best_two_experts_together() -> None:
    """Group 0 has the best expert, but group 1 has the larger sum."""
    problem = routed(1, 6, 2, score="sigmoid", groups=2, top_groups=1)
    out = oracle(problem, logits=[[3.0, -9.0, -9.0, 1.0, 0.5, -9.0]])
    assert out["expert_ids"].tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("factor", "tokens", "experts", "top_k", "capacity"),
    [(1.0, 4, 4, 1, 1), (1.0, 5, 4, 1, 2), (0.1, 5, 4, 1, 1), (9.0, 5, 4, 1, 5), (0, 5, 4, 1, 5)],
)
def test_the_capacity_is_rounded_up(factor, tokens, experts, top_k, capacity) -> None:
    problem = routed(tokens, experts, top_k, capacity_factor=float(factor))
    assert _routing.capacity_of(problem) == capacity


def test_the_first_assignments_of_a_full_expert_stay() -> None:
    problem = routed(3, 2, 1, capacity_factor=1.0, renormalize=True)
    out = oracle(problem, logits=3 * [[1.0, 0.0]])
    assert out["expert_ids"].tolist() == [[0], [0], [-1]]
    assert out["weights"].tolist() == [[1], [1], [0]]
    assert out["counts"].tolist() == [2, 0] and out["offsets"].tolist() == [0, 2, 2]
    assert out["order"].tolist() == [0, 1, -1] and out["position"].tolist() == [[0], [1], [-1]]


def test_a_rerouted_assignment_keeps_its_slot_and_weighs_as_its_new_expert() -> None:
    problem = routed(3, 3, 1, capacity_factor=1.0, overflow="reroute")
    out = oracle(problem, logits=3 * [[2.0, 1.0, 0.0]])
    assert out["expert_ids"].tolist() == [[0], [1], [2]]
    assert np.allclose(out["weights"].T, np.exp([[2, 1, 0]]) / np.exp([2, 1, 0]).sum())


def test_an_expert_with_a_logit_of_minus_infinity_gets_no_rerouted_assignment() -> None:
    problem = routed(2, 2, 1, capacity_factor=1.0, overflow="reroute")
    out = oracle(problem, logits=2 * [[0.0, -np.inf]])
    assert out["expert_ids"].tolist() == [[0], [-1]] and out["weights"].tolist() == [[1], [0]]


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("skew", _routed_logits.SKEWS)
def test_what_is_dropped_after_rerouting_had_no_expert_left(factor: float, skew: str) -> None:
    problem = routed(40, 12, 4, capacity_factor=factor, overflow="reroute", skew=skew)
    prepared = gate.prepare(ENTRY, problem, HOST)
    out, capacity = prepared.expected, _routing.capacity_of(problem)
    assert out["counts"].max() <= capacity
    logits = prepared.arrays["logits"]
    for token, ids in enumerate(out["expert_ids"]):
        used = set(ids[ids >= 0])
        assert len(used) == (ids >= 0).sum()
        if (ids < 0).any():
            left = [e for e in range(12) if logits[token, e] > -np.inf and e not in used]
            assert all(out["counts"][e] == capacity for e in left)


@pytest.mark.parametrize(
    "problem",
    [
        routed(0, 5, 2, load=True),
        routed(1, 1, 1),
        routed(9, 4, 4),
        routed(50, 16, 1, skew="equal"),
        routed(30, 8, 3, skew="hot", capacity_factor=0.5, load=True),
    ],
    ids=str,
)
def test_position_is_the_inverse_of_order(problem) -> None:
    out = gate.prepare(ENTRY, problem, HOST).expected
    served, position = out["offsets"][-1], out["position"].ravel()
    assert (out["order"][position[position >= 0]] == np.flatnonzero(position >= 0)).all()
    assert (out["order"][served:] == -1).all() and (position >= 0).sum() == served
    ids = out["expert_ids"].ravel()[out["order"][:served]]
    assert (np.diff(ids) >= 0).all() and (np.bincount(ids, minlength=out["counts"].size) ==
                                          out["counts"]).all()  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"top_k": 5}, "top_k=5 must be 1 to 16, and at most experts=4"),
        ({"experts": 513}, "experts=513 must be 1 to 512"),
        ({"groups": 3}, "groups=3 must be 1 to 32 and divide experts=4"),
        ({"groups": 2, "score": "softmax"}, "score='sigmoid' only"),
        ({"groups": 4, "score": "sigmoid"}, "top_groups=1 of 4 groups must have top_k=2 experts"),
        ({"router_bias": True}, "given logits include a bias"),
        ({"product": True}, "hidden=0"),
        ({"capacity_factor": -1.0}, "must not be negative"),
    ],
)
def test_a_problem_that_makes_no_sense_says_why(axes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ENTRY.problem(**{"tokens": 3, "experts": 4, "top_k": 2, "dtype": "float32", **axes})


# ---- drawn inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("skew", _routed_logits.SKEWS)
@pytest.mark.parametrize("reroute", [False, True])
def test_float32_selects_what_the_oracle_selects(dtype: str, skew: str, reroute: bool) -> None:
    """With an error of 2 units in the last place of every sigmoid."""
    limit = {"capacity_factor": 1.0, "overflow": "reroute"} if reroute else {}
    problem = routed(300, 64, 6, dtype=dtype, skew=skew, **{**DEEPSEEK, "top_groups": 3}, **limit)
    random = np.random.default_rng(0)
    inputs = ENTRY.make_inputs(problem, lambda shape: random.standard_normal(shape, np.float32))
    exact = _routing.sigmoid(inputs["logits"].astype("float64"))
    for factor in (1 - 2**-22, 1.0, 1 + 2**-22):
        scores = np.float32(exact * factor) + inputs["correction"]
        two = np.sort(scores.reshape(300, 8, 8), axis=-1)[..., -2:]
        groups = _routing.descending(two[..., 0] + two[..., 1])[:, :3]
        allowed = np.zeros((300, 8), dtype=bool)
        allowed[np.arange(300)[:, None], groups] = True
        scores = np.where(allowed.repeat(8, axis=1), scores, -np.inf)
        found = _routing.descending(scores)[:, : 24 if reroute else 6]
        expected = _routing.selection_scores(problem, inputs["logits"].astype("float64"),
                                             inputs["correction"])  # fmt: skip
        expected = _routing.descending(_routing.limit_to_groups(problem, expected))
        assert (found == expected[:, : found.shape[1]]).all()


def test_sums_of_a_product_are_exact_in_any_order() -> None:
    problem = routed(20, 30, 4, product=True, hidden=300, router_bias=True, skew="zipf",
                     dtype="bfloat16")  # fmt: skip
    arrays = gate.drawn(ENTRY, problem, np)
    terms = arrays["x"][:, None] * arrays["router"]
    forward = np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]
    assert (forward == np.cumsum(terms[..., ::-1], axis=-1, dtype=np.float32)[..., -1]).all()
    assert (forward == terms.astype("float64").sum(axis=-1)).all() and forward.std() > 0.5


def test_many_logits_are_equal_and_some_are_minus_infinity() -> None:
    logits = gate.drawn(ENTRY, routed(50, 40, 4), np)["logits"]
    assert any(len(set(row)) < 30 for row in logits) and (logits == -np.inf).any()
    assert ((logits > -np.inf).sum(axis=1) >= 4).all()


# ---- launches -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 64, 512, 513, 8192])
def test_up_to_512_tokens_need_one_launch_and_more_need_two(tokens: int) -> None:
    target, num_programs = gpu.find("h200"), 0
    for implementation in catalog.implementations("moe_route"):
        for axes in (
            {}, DEEPSEEK, {"product": True, "hidden": 96},
            {"capacity_factor": 1.0, "overflow": "reroute"},
        ):  # fmt: skip
            problem = routed(tokens, 64, 4, **axes)
            for config in implementation.legal(problem, target):
                if implementation.variant == "naive":
                    continue
                steps = implementation.program(problem, config, target).steps
                assert len(steps) == (1 if tokens <= 512 else 2)
                num_programs += 1
    assert num_programs


CASES = {
    "one launch": (17, {}, {"block_t": 4}),
    "two launches": (530, {"experts": 8, "top_k": 2, "capacity_factor": 1.0}, {"block_t": 16}),
    "two launches, rerouted": (
        520, {"experts": 8, "top_k": 2, "capacity_factor": 1.0, "overflow": "reroute"},
        {"block_t": 64},
    ),
    "more tiles than are added up at once": (70, {"experts": 6, "load": True}, {"block_t": 1}),
    "a product in splits": (40, {"product": True, "hidden": 150}, {"block_t": 16, "split_k": 4}),
    "a rerouted product": (
        40,
        {
            "product": True, "hidden": 70, "capacity_factor": 0.5, "overflow": "reroute",
            "skew": "hot", "dtype": "bfloat16",
        },
        {"block_t": 16, "split_k": 2},
    ),
    "groups of three experts": (
        20,
        {"experts": 15, "score": "sigmoid", "groups": 5, "top_groups": 2, "correction": True},
        {"block_t": 8},
    ),
    "no tokens": (0, {"load": True}, {"block_t": 1}),
    "no tokens of a product": (0, {"product": True, "hidden": 5}, {"block_t": 16, "split_k": 2}),
}  # fmt: skip


def test_tiles_are_right_at_their_edges(interpreted) -> None:
    cases = {}
    for name, (tokens, axes, config) in CASES.items():
        sizes = {"tokens": tokens, "experts": 12, "top_k": 3, "dtype": "float32", **axes}
        whole = {"split_k": 1, "warps": 4, **config}
        cases[name] = ("moe_route", "tiled", whole, sizes)
    results = interpreted(cases)
    assert {name: result for name, result in results.items() if result != [None, True, ""]} == {}


REPLAY = """
def replay(entry, variant, config, axes):
    implementation = catalog.implementation(entry, "triton", variant)
    problem = catalog.entry(entry).problem(**axes)
    program = implementation.program(problem, Config(config), device.gpu)
    import torch
    kept = [torch.zeros(size, dtype=torch.uint8) for size in program.workspaces.values()]
    zeros = torch.zeros
    torch.zeros = lambda size, **more: memory.pop(0)
    results = []
    for seed in (0, 1):
        memory = list(kept)
        prepared = gate.prepare(catalog.entry(entry), problem, device, seed)
        results.append(prepared.verify(lambda arrays: lambda: interpret(program, arrays)).passed)
    torch.zeros = zeros
    return results
"""


def test_a_replay_with_other_inputs_is_right_on_the_same_workspaces(interpreted) -> None:
    axes = {"tokens": 30, "experts": 9, "top_k": 3, "dtype": "float32"}
    config = {"block_t": 16, "split_k": 2, "warps": 4}
    product = {"product": True, "hidden": 80, "capacity_factor": 0.5, "overflow": "reroute"}
    cases = {
        "logits": ("moe_route", "tiled", config | {"split_k": 1}, axes, "replay"),
        "product": ("moe_route", "tiled", config, axes | product, "replay"),
    }
    assert interpreted(cases, REPLAY) == {"logits": [True, True], "product": [True, True]}


# ---- calls ----------------------------------------------------------------------------------


def explained(*args, **named):
    return kernelcat.get("moe_route").explain(*args, gpu="h200", **named).problem


def test_arrays_determine_where_logits_come_from() -> None:
    torch = pytest.importorskip("torch")
    logits, correction = torch.zeros(3, 8), torch.zeros(8)
    assert explained(logits, top_k=2) == routed(3, 8, 2)
    x, router = torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(8, 5, dtype=torch.bfloat16)
    expected = routed(3, 8, 2, product=True, hidden=5, dtype="bfloat16")
    assert explained(x=x, router=router, top_k=2) == expected
    expected = routed(3, 8, 2, score="sigmoid", correction=True)
    assert explained(logits, correction=correction, score="sigmoid", top_k=2) == expected
    with pytest.raises(InvalidArgument, match="needs arrays, some of logits, x"):
        explained(None, top_k=2)
    with pytest.raises(InvalidArgument, match="takes no logits where product is True"):
        explained(x @ router.T, x, router, top_k=2)


def test_load_is_updated_where_out_has_it() -> None:
    torch = pytest.importorskip("torch")
    problem = routed(3, 8, 2, load=True)
    out = [
        torch.zeros(t.shape_of(problem), dtype=getattr(torch, t.dtype_of(problem)))
        for t in ENTRY.outputs
    ]
    logits = torch.zeros(3, 8)
    assert explained(logits, top_k=2, out=tuple(out)) == problem
    assert explained(logits, top_k=2, out=(*out[:-1], None)) == routed(3, 8, 2)
    with pytest.raises(InvalidArgument, match="load differs: load= is True, but load is False"):
        explained(logits, top_k=2, load=True)


def test_a_compiled_graph_gets_all_outputs_but_load() -> None:
    torch = pytest.importorskip("torch")
    kernelcat.get("moe_route")
    logits = torch.empty(3, 8, device="meta")
    outputs = torch.ops.kernelcat.moe_route(logits, top_k=2)
    shapes = [tensor.shape_of(routed(3, 8, 2)) for tensor in ENTRY.outputs[:-1]]
    assert [tuple(output.shape) for output in outputs] == shapes


@pytest.mark.gpu
def test_a_graph_is_right_on_other_logits() -> None:
    import torch

    op = kernelcat.get("moe_route")
    for tokens, experts in ((64, 128), (2000, 256)):
        logits = torch.randn(tokens, experts, device="cuda")
        out = op(logits, top_k=8, renormalize=True)
        run = op.bind(logits, top_k=8, renormalize=True, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            logits.normal_()
            graph.replay()
            values, ids = logits.topk(8)
            assert torch.equal(out[0].long(), ids)
            assert torch.allclose(out[1], values.softmax(-1), atol=1e-6)
            assert torch.equal(out[2].long(), ids.flatten().bincount(minlength=experts))
            assert torch.equal(out[4].long(), ids.flatten().argsort(stable=True))
