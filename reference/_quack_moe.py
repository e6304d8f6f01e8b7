"""QuACK's grouped products as a peer of `moe_mlp` and of `moe_gemm`, in CuTe DSL.

QuACK brings products of rows in groups without gaps, which gather rows and activate. The router of
`moe_mlp` is the top-k of `triton_kernels`; the sort and the weighted sum are those of
`_padded_segments`. QuACK's tuner copies its operands many times; here a few tiles race when the
peer is bound (`_tile_race`).
"""

from __future__ import annotations

from importlib import import_module

from kernelcat.errors import Unsupported
from kernelcat.reference._experts import DTYPES, FP8
from kernelcat.reference._moe_peers import check, check_hopper
from kernelcat.reference._peers import import_torch, required_by
from kernelcat.reference._tile_race import deadline, fastest
from kernelcat.reference._triton_kernels import load

FEW_ROWS = 64
"""Mean rows of an expert below which tiles of 64 rows race."""
FEW = ((64, 128, True, 1), (64, 256, True, 1), (128, 128, True, 1))
MANY = ((128, 192, True, 2), (128, 256, False, 2), (256, 128, False, 2))
"""Candidates: rows and columns of a tile, whether two warpgroups alternate, and the cluster's rows.

All are legal with gathered rows. Those with many rows are from QuACK's own list for Hopper."""


def _load():
    """The epilogues, which import QuACK; raises ``MissingDependency``."""
    with required_by("quack", "pip install quack-kernels"):
        return import_module("kernelcat.reference._quack_epilogues").EPILOGUES


def _configs(rows_per_expert: float) -> list:
    from quack.gemm_config import GemmConfig

    return [
        GemmConfig(
            tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=cluster, cluster_n=1,
            is_dynamic_persistent=False, device_capacity=9,
        )
        for m, n, pingpong, cluster in (FEW if rows_per_expert < FEW_ROWS else MANY)
    ]  # fmt: skip


def _product(epilogue, a, w, out, groups, bias=None):
    """``build(config)`` compiles out = activation(rows @ w[e].T + bias[e]), e the row's expert.

    ``epilogue`` is one of `_quack_epilogues`. What ``build`` returns takes ``offsets`` and
    ``tokens`` like ``groups``, examples of the two: a row of the product is ``a[tokens[row]]``, or
    ``a[row]`` where ``tokens`` is None.
    """
    epilogue, name = epilogue
    fixed = {"out": {name: out}} | ({} if bias is None else {"bias": bias})

    def build(config):
        offsets, tokens = groups
        plan = epilogue.plan(a, w.mT, config=config, cu_seqlens_m=offsets, A_idx=tokens, **fixed)
        return lambda offsets, tokens: plan.run(
            a, w.mT, cu_seqlens_m=offsets, A_idx=tokens, **fixed
        )

    return build


class _Choice:
    """Products of the configurations that won the race of a problem.

    All copies of the problem's arrays share the race.
    """

    def __init__(self) -> None:
        self.won: dict = {}

    def product(self, problem, name: str, build, configs: list, groups, end: float):
        """The product ``name`` of ``problem`` in its fastest configuration, compiled."""
        if (problem, name) not in self.won:
            self.won[problem, name] = fastest(configs, build, groups, end).candidate
        return build(self.won[problem, name])


def moe_mlp():
    """Top-k, sort, gathering product with SwiGLU, product, weighted sum."""
    load()
    epilogues = _load()
    from triton_kernels.topk import topk_forward

    from kernelcat.reference._padded_segments import group, weighted_sum

    choice = _Choice()

    def make(problem, arrays):
        check(problem, "quack", DTYPES)
        check_hopper("quack")
        tokens, k, experts = (problem[axis] for axis in ("tokens", "top_k", "experts"))
        x = arrays["x"]
        h = x.new_empty(tokens * k, problem["inter"])
        y = x.new_empty(tokens * k, problem["hidden"])

        def route():
            gates, ids, _ = topk_forward(arrays["logits"], k)
            return gates, group(ids, experts)

        groups, end, configs = route()[1], deadline(), _configs(tokens * k / experts)
        gathered, grouped = (groups.offsets, groups.tokens), (groups.offsets, None)
        build = _product(epilogues[problem["activation"], False], x, arrays["w1"], h, gathered)
        up = choice.product(problem, "up", build, configs, gathered, end)
        build = _product(epilogues["none", False], h, arrays["w2"], y, grouped)
        down = choice.product(problem, "down", build, configs, grouped, end)

        def run():
            gates, groups = route()
            up(groups.offsets, groups.tokens)
            down(groups.offsets, None)
            weighted_sum(y, gates, arrays["out"], groups.position)

        return run

    return make


def _check_product(problem) -> None:
    """Raise ``Unsupported`` unless QuACK can compute ``problem`` of `moe_gemm`."""
    if problem["format"] not in DTYPES or problem["act_dtype"] == FP8:
        raise Unsupported("quack is raced with weights and activations in 16 bits")
    if problem["residual"] or not problem["tokens"]:
        raise Unsupported("quack is raced without residual and with at least one token")
    cols = problem["N"] if problem["activation"] == "none" else problem["N"] // 2
    if problem["K"] % 8 or cols % 8 or not problem["K"] or not cols:
        raise Unsupported("quack is raced with rows of a multiple of 16 bytes")
    check_hopper("quack")


def moe_gemm():
    """Product of groups, and the weighted sum where rows are combined.

    The token of each row, and how many rows no expert has, are derived when the peer is bound.
    """
    torch = import_torch("quack")
    epilogues = _load()
    from kernelcat.reference._padded_segments import weighted_sum

    choice = _Choice()

    def make(problem, arrays):
        _check_product(problem)
        offsets, order, d = (arrays[name] for name in ("offsets", "order", "d"))
        tokens = None
        if problem["gather"]:
            tokens = torch.div(order.clamp(min=0), problem["top_k"], rounding_mode="floor").int()
        y = d.new_empty(order.numel(), d.shape[1]) if problem["combine"] else d
        groups, bias = (offsets, tokens), arrays.get("bias")
        epilogue = epilogues[problem["activation"], bias is not None]
        build = _product(epilogue, arrays["a"], arrays["w"], y, groups, bias)
        configs = _configs(order.numel() / problem["experts"])
        multiply = choice.product(problem, "product", build, configs, groups, deadline())
        unassigned = None if problem["combine"] else d[int(offsets[-1]) :]

        def run():
            multiply(*groups)
            if unassigned is None:
                weighted_sum(y, arrays["gates"], d, arrays["position"])
            elif len(unassigned):
                unassigned.zero_()

        return run

    return make
