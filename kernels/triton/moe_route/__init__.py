"""`moe_route` in Triton: a token a program (naive), or a tile of tokens (tiled)."""

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference._routing import capacity_of, reroutes
from kernelcat.reference.moe_route import ENTRY
from kernelcat.runtime.gpu import Gpu

MODULE = "kernelcat.kernels.triton.moe_route"
SELECTED = ("expert_ids", "weights")
MAPS = ("counts", "offsets", "order", "position", "load")
Arguments = dict[str, triton.Argument]
Constants = dict[str, ConfigValue]


def _pointers(problem: Problem, *names: str) -> Arguments:
    """The tensors of these names."""
    tensors = {tensor.name: tensor for tensor in ENTRY.tensors}
    return {name: triton.pointer(name, tensors[name].dtype_of(problem)) for name in names}


def _logits(problem: Problem) -> Arguments:
    """The logits, given or computed by `multiply`, and the correction."""
    if not problem["product"]:
        return _pointers(problem, "logits", "correction")
    return {
        "logits": triton.pointer("all_logits", "float32"),
        **_pointers(problem, "correction"),
    }


def _integers(**values: int) -> Arguments:
    return {name: triton.integer(value, divisor=1) for name, value in values.items()}


def _rule(problem: Problem) -> Arguments:
    """The sizes of a selection, and the factor of weights."""
    return {
        **_integers(
            num_experts=problem["experts"], top_k=problem["top_k"], num_groups=problem["groups"],
            top_groups=problem["top_groups"],
        ),
        "scaling": triton.real(problem["scaling"]),
    }  # fmt: skip


def _columns(problem: Problem) -> tuple[int, int]:
    """Columns of all groups, and of one group: powers of two."""
    group_cols = next_power_of_two(problem["experts"] // problem["groups"])
    return next_power_of_two(problem["groups"]) * group_cols, group_cols


def _constants(problem: Problem) -> Constants:
    num_cols, group_cols = _columns(problem)
    return {
        "SOFTMAX": problem["score"] == "softmax",
        "RENORMALIZE": problem["renormalize"],
        "CORRECTION": problem["correction"],
        "LIMITED": problem["top_groups"] < problem["groups"],
        "NUM_COLS": num_cols,
        "GROUP_SIZE": problem["experts"] // problem["groups"],
        "GROUP_COLS": group_cols,
        "SLOTS": next_power_of_two(problem["top_k"]),
    }


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_assignments = problem["tokens"] * problem["top_k"]
    if num_assignments >= 1 << 31:
        return f"{num_assignments} assignments are more than 32-bit indices reach"
    return None


# naive --------------------------------------------------------------------------------------------


def _multiply(problem: Problem) -> Step:
    """The router's product, a logit a program."""
    pointers = {
        **_pointers(problem, "x", "router", "router_bias"),
        "all_logits": triton.pointer("all_logits", "float32"),
    }
    sizes = _integers(experts=problem["experts"], hidden=problem["hidden"])
    constants: Constants = {"HAS_BIAS": problem["router_bias"], "BLOCK": 256}
    grid = (problem["tokens"], problem["experts"], 1)
    return triton.step(f"{MODULE}.naive:multiply", grid, pointers | sizes, constants, num_warps=1)


def select_step(problem: Problem) -> Step:
    """The selection of experts and weights, a token a program; without index maps."""
    arguments = _logits(problem) | _pointers(problem, *SELECTED) | _rule(problem)
    constants = _constants(problem) | {"DEPENDENT": False}
    grid = (problem["tokens"], 1, 1)
    return triton.step(f"{MODULE}.naive:select", grid, arguments, constants, num_warps=1)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens = problem["tokens"]
    given = _logits(problem) | _pointers(problem, *SELECTED)
    constants = _constants(problem)
    place = triton.step(
        f"{MODULE}.naive:place",
        (1, 1, 1),
        given
        | _pointers(problem, *MAPS)
        | _integers(tokens=tokens)
        | _rule(problem)
        | _integers(capacity=capacity_of(problem)),
        constants | {"REROUTE": reroutes(problem), "LOAD": problem["load"]},
        num_warps=4,
    )
    workspaces = {"all_logits": 4 * tokens * problem["experts"] * problem["product"]}
    if not tokens:
        return Program((place,), workspaces)
    products = (_multiply(problem),) if problem["product"] else ()
    return Program((*products, select_step(problem), place), workspaces)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Two passes of one program over all tokens, each waiting for memory."""
    return 3 * LAUNCH_US + 2.0 * problem["tokens"]


# tiled --------------------------------------------------------------------------------------------

SPACE = {
    "block_t": (1, 2, 4, 8, 16, 32, 64),
    "split_k": (1, 2, 4, 8, 16),
    "warps": (1, 2, 4, 8, 16),
}
"""Tokens of a tile, splits of the router's product, and warps of a program."""
ONE_LAUNCH_TOKENS = 512
"""Most tokens of one launch."""
MAX_ROWS = 32
"""Tiles whose counts a program adds up at once."""
MIN_DOT = 16
"""Least rows and columns of a product on tensor cores."""
MAX_ELEMENTS = 32
"""Most logits of a thread: more do not fit into its registers, and compile for minutes."""


def _has_one_launch(problem: Problem) -> bool:
    return bool(problem["tokens"] <= ONE_LAUNCH_TOKENS)


def _num_tiles(problem: Problem, config: Config) -> int:
    return max(1, ceil(problem["tokens"] / config["block_t"]))


def _tiled_columns(problem: Problem) -> int:
    """Columns of a tile; a product needs a minimum."""
    num_cols, _ = _columns(problem)
    return max(num_cols, MIN_DOT) if problem["product"] else num_cols


def _tile_constants(problem: Problem, config: Config) -> Constants:
    """What kernels compile in about tiles."""
    num_cols, (_, group_cols) = _tiled_columns(problem), _columns(problem)
    return {
        "NUM_COLS": num_cols,
        "GROUP_SIZE": problem["experts"] // problem["groups"],
        "GROUP_COLS": num_cols if problem["groups"] == 1 else group_cols,
        "BLOCK_T": config["block_t"],
        "LOAD": problem["load"],
    }


def _place_constants(problem: Problem, config: Config) -> Constants:
    rows = min(MAX_ROWS, next_power_of_two(_num_tiles(problem, config)))
    return {"ROWS": rows, "BLOCK": 32 * config["warps"] * 4, "DEPENDENT": False}


def _rule_constants(problem: Problem) -> Constants:
    names = ("SOFTMAX", "RENORMALIZE", "CORRECTION", "LIMITED")
    constants = _constants(problem)
    return {name: constants[name] for name in names}


def _select_constants(problem: Problem, config: Config) -> Constants:
    size = 4 if problem["dtype"] == "float32" else 2
    return {
        **_rule_constants(problem),
        **_tile_constants(problem, config),
        **_place_constants(problem, config),
        "PRODUCT": problem["product"],
        "HAS_BIAS": problem["router_bias"],
        "REROUTE": reroutes(problem),
        "ONE_LAUNCH": _has_one_launch(problem),
        "SPLIT_K": config["split_k"],
        "BLOCK_K": 32 if _tiled_columns(problem) * size > 512 else 64,
    }


def _workspaces(problem: Problem, config: Config) -> dict[str, int]:
    """Bytes. Partial sums and arrivals are those of `sum_splits`."""
    num_tiles, num_cols = _num_tiles(problem, config), _tiled_columns(problem)
    counts = 4 * num_tiles * num_cols
    all_logits = 4 * problem["tokens"] * problem["experts"]
    partials = counts * config["block_t"] * config["split_k"]
    return {
        "block_counts": counts,
        "earlier": counts,
        "starts": counts,
        "all_logits": all_logits * (problem["product"] and reroutes(problem)),
        "partials": partials * (config["split_k"] > 1),
        "arrivals": 4 * num_tiles,
        "num_finished": 4,
    }


def _select(problem: Problem, config: Config) -> Step:
    pointers = _pointers(problem, "logits", "x", "router", "router_bias", "correction")
    pointers |= _pointers(problem, *SELECTED, *MAPS)
    types = {"all_logits": "float32", "partials": "float32"}
    for name in _workspaces(problem, config):
        pointers[name] = triton.pointer(name, types.get(name, "int32"))
    numbers = {
        **_integers(tokens=problem["tokens"]),
        **_rule(problem),
        **_integers(hidden=problem["hidden"], capacity=capacity_of(problem)),
    }
    num_programs = _num_tiles(problem, config) * config["split_k"]
    return triton.step(
        f"{MODULE}.tiled:select", (num_programs, 1, 1), _in_order(pointers) | numbers,
        _select_constants(problem, config), num_warps=config["warps"],
    )  # fmt: skip


def _in_order(pointers: Arguments) -> Arguments:
    """The pointers in the order of the parameters of `select`."""
    workspaces = ("block_counts", "earlier", "starts", "all_logits", "partials", "arrivals",
                  "num_finished")  # fmt: skip
    inputs = ("logits", "x", "router", "router_bias", "correction")
    return {name: pointers[name] for name in (*inputs, *SELECTED, *MAPS, *workspaces)}


def _place(problem: Problem, config: Config) -> Step:
    """The second launch of a problem without rerouting."""
    arguments = {
        **_pointers(problem, *SELECTED, *MAPS),
        **{n: triton.pointer(n, "int32") for n in ("block_counts", "earlier", "starts")},
        **_integers(
            tokens=problem["tokens"], num_experts=problem["experts"], top_k=problem["top_k"],
            num_groups=problem["groups"], capacity=capacity_of(problem),
        ),
    }  # fmt: skip
    constants = _tile_constants(problem, config) | _place_constants(problem, config)
    grid = (_num_tiles(problem, config), 1, 1)
    return triton.step(
        f"{MODULE}.tiled:place", grid, arguments, constants, num_warps=config["warps"]
    )


def _reroute(problem: Problem, config: Config) -> Step:
    """The second launch of a problem with rerouting: one program."""
    arguments = {
        **_logits(problem),
        **_pointers(problem, *SELECTED, *MAPS),
        **_integers(tokens=problem["tokens"]),
        **_rule(problem),
        **_integers(capacity=capacity_of(problem)),
    }
    constants = _rule_constants(problem) | _tile_constants(problem, config)
    return triton.step(
        f"{MODULE}.reroute:reroute_and_place", (1, 1, 1), arguments, constants,
        num_warps=config["warps"],
    )  # fmt: skip


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    workspaces, select = _workspaces(problem, config), _select(problem, config)
    if _has_one_launch(problem):
        return Program((select,), workspaces)
    second = _reroute if reroutes(problem) else _place
    return Program((select, second(problem, config)), workspaces)


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["product"] and config["block_t"] < MIN_DOT:
        return f"block_t={config['block_t']} must be at least {MIN_DOT} rows for tensor cores"
    if not problem["product"] and config["split_k"] > 1:
        return "split_k must be 1 where logits are given: there is no product to split"
    if _num_tiles(problem, config) * _tiled_columns(problem) >= 1 << 31:
        return f"{_num_tiles(problem, config)} tiles are more than 32-bit indices reach"
    if (elements := _elements(config, problem)) > MAX_ELEMENTS:
        return f"{elements:g} logits a thread are more than {MAX_ELEMENTS}"
    return _illegal(config, problem, gpu)


def _elements(config: Config, problem: Problem) -> float:
    """Logits of a thread."""
    return float(config["block_t"] * _tiled_columns(problem) / (32 * config["warps"]))


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_t, elements, tokens = config["block_t"], _elements(config, problem), problem["tokens"]
    if elements > 16 or (elements < 2 and config["warps"] > 1):
        return f"{elements:g} logits a thread: 2 to 16 fill threads and fit in registers"
    least = MIN_DOT if problem["product"] else 1
    if block_t > least and block_t >= 2 * tokens:
        return f"tiles of {block_t} tokens are at least half empty for {tokens} tokens"
    if _num_tiles(problem, config) > 512:
        return f"block_t={block_t} makes more than 512 tiles, whose counts are added up"
    if config["split_k"] > 1 and _num_tiles(problem, config) * config["split_k"] > 2 * gpu.sms:
        return f"{_num_tiles(problem, config)} tiles need no split_k={config['split_k']}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory, rounds of the selection, and the maps, which one program makes in one launch."""
    num_tiles, elements = _num_tiles(problem, config), _elements(config, problem)
    waves = max(1.0, num_tiles * config["warps"] / (32 * gpu.sms))
    select_us = waves * problem["top_k"] * (0.15 + 0.012 * elements + 0.02 * config["warps"])
    map_bytes = 4 * num_tiles * _tiled_columns(problem)
    if _has_one_launch(problem):
        assignments = problem["tokens"] * problem["top_k"]
        maps_us = 3.0 + map_bytes / 2e4 + assignments / (32 * config["warps"]) * 0.05
    else:
        maps_us = LAUNCH_US + 3.0 + num_tiles * map_bytes / 4e6
    work = 2 * problem["tokens"] * problem["experts"] * problem["hidden"] * problem["product"]
    programs = min(num_tiles * config["split_k"], gpu.sms)
    product_us = work / (programs * 5e5) + 0.2 * config["split_k"]
    return copy_us(ENTRY.bytes_moved(problem), gpu) + select_us + maps_us + product_us


NAIVE = Implementation(
    entry="moe_route",
    language="triton",
    variant="naive",
    summary="a token a program, then one program for all places; any problem",
    archs=("sm_80+",),
    space={},
    illegal=_illegal,
    program=_naive,
    estimate=_naive_estimate,
    rank=0,
)

TILED = Implementation(
    entry="moe_route",
    language="triton",
    variant="tiled",
    summary="tiles of tokens, ranks by prefix sums; the last program of one launch makes maps",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"16-byte loads": "LDG*128"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
