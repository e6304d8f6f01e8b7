"""`sample`: a token for each row of logits, with penalty, temperature and filters, in one launch.

For each row, with ``x = logits`` as float32, in the order of vLLM:

    1. repetition penalty r: where bit v % 32 of seen[v / 32] is set, x_v becomes x_v / r if
       x_v > 0, else x_v r, rounded to float32
    2. order: tokens by falling x_v, tokens of equal x_v by rising id
    3. weights: w_v = exp((x_v - max x) / temperature)
    4. min_p: tokens with w_v >= min_p stay                                        (0: off)
    5. top_k: the first top_k of the remaining tokens stay                         (0: off)
    6. top_p: a remaining token stays if the weights of the remaining tokens before sum up to
       less than top_p times the sum of all remaining weights; the first stays     (1: off)
    7. draw: id is the remaining token with the largest w_v / e_v, where e_v has the exponential
       distribution: a token is chosen with a probability proportional to w_v

    logprob = ln(w_id / sum of all w_v), before the filters

Without temperatures, and in rows of temperature 0, id is the first token in the order, and logprob
is computed with temperature 1. e_v = -ln(1 - (word + 1/2) / 2^32) is a function of seed, offset and
v (`_sampling`): a row's token does not depend on the other rows or on the row's place in the batch.
The race of exponentials is the "Gumbel-max trick", with which vLLM draws too.

Tokens with logits of -inf are never chosen; each row must have a finite logit. NaN and +inf are not
allowed. temperature, min_p and top_k must not be negative; top_p and the penalty must be positive.

Ids are judged exactly. Drawn inputs therefore leave no decision to rounding: where a border of
min_p or top_p lies too near a token, the filter is off for the row, and a row whose two largest
scores are too near each other gets a temperature of 0.
"""

from __future__ import annotations

from random import Random

from kernelcat import dtypes
from kernelcat.catalog.precondition import below_infinity, least
from kernelcat.catalog.spec import EXACT, Axis, Derived, Entry, Problem, Tensor, Tolerance
from kernelcat.reference._arrays import library_of
from kernelcat.reference._peers import peer_in
from kernelcat.reference._random_sizes import log_uniform, model_with
from kernelcat.reference._sampling import choose, exponentials, penalized

DTYPES = ("float32", "bfloat16", "float16")
WORD = 32
"""Tokens whose bits share a word of ``seen``."""
SEEN_WORDS = Derived("ceil(vocab/32)", lambda axes: -(-axes["vocab"] // WORD))

MIN_Z_MARGIN = 2.0**-12
"""Distance of scores, or of a score from a border, that float32 arithmetic cannot bridge."""
MIN_SUM_MARGIN = 2.0**-16
"""Distance of a sum of weights from top_p, as a part of the sum of all weights."""
NUM_LARGE = 64
"""Tokens whose drawn logits are large: in language models few tokens have most of the weight."""
LARGE = 12.0
TOP_KS = (50, 0, 1, 7, 0, 1000000, 20)
TOP_PS = (0.9, 1.0, 0.5, 0.99, 1e-6)
MIN_PS = (0.02, 0.0, 0.0, 0.3)


def _cycle(xp, values, rows: int, dtype: str):
    """``values`` again and again, (rows,)."""
    return xp.asarray([values[row % len(values)] for row in range(rows)], dtype=dtype)


def _draw_logits(problem, normal):
    """Rows with few large logits, flat rows, coarse ones with ties, and rows with one token.

    One token in eight is masked by -inf.
    """
    rows, vocab = problem["rows"], problem["vocab"]
    logits = 1.5 * normal((rows, vocab))
    xp = library_of(logits)
    row, token = xp.arange(rows)[:, None], xp.arange(vocab)[None, :]
    large = (token + row) % max(1, vocab // NUM_LARGE) == 0
    logits += xp.where(large & (row % 5 != 2), xp.float32(LARGE), xp.float32(0))
    logits = xp.where(row % 3 == 2, xp.rint(2 * logits) / 2, logits).astype("float32")
    is_last = token == row * 31 % vocab  # the token of a row with one token
    is_masked = (token * 7919 + row) % 8 == 3
    is_masked |= row % 11 == 9
    logits = xp.where(is_masked & ~is_last, xp.float32("-inf"), logits)
    return dtypes.decode(dtypes.encode(logits, problem["dtype"]), problem["dtype"])


def _integers(normal, rows: int):
    """Random int64 (rows,) of 64 bits each."""
    halves = normal((2, rows)).view("int32").astype("int64")
    return (halves[0] << 34) ^ halves[1]


def _draw_parameters(problem, normal, xp):
    """The parameters of rows; row 0 has common values."""
    rows = problem["rows"]
    drawn = {}
    if problem["has_penalty"]:
        words = normal((rows, -(-problem["vocab"] // WORD))).view("int32")
        drawn |= {"seen": words ^ words << 9, "penalty": 1 + abs(normal((rows,)))}
    if problem["has_temperature"]:
        warm = xp.exp(0.4 * normal((rows,))).clip(0.3, 2.0)
        is_greedy = xp.arange(rows) % 6 == 5
        drawn["temperature"] = xp.where(is_greedy, 0.0, warm).astype("float32")
        drawn |= {"seed": _integers(normal, rows), "offset": abs(_integers(normal, rows))}
    if problem["has_filters"]:
        drawn |= {
            "min_p": _cycle(xp, MIN_PS, rows, "float32"),
            "top_k": _cycle(xp, TOP_KS, rows, "int32"),
            "top_p": _cycle(xp, TOP_PS, rows, "float32"),
        }
    return drawn


def _make_inputs(problem, normal):
    logits = _draw_logits(problem, normal)
    xp = library_of(logits)
    drawn = {"logits": logits, **_draw_parameters(problem, normal, xp)}
    if not problem["has_temperature"] or not problem["rows"]:
        return drawn
    if problem["has_filters"]:
        choice = _choice(problem, drawn)
        drawn["min_p"] = drawn["min_p"] * (choice.min_p_margin > MIN_Z_MARGIN)
        choice = _choice(problem, drawn)
        is_clear = choice.top_p_margin > MIN_SUM_MARGIN
        drawn["top_p"] = xp.where(is_clear, drawn["top_p"], xp.float32(1))
    is_clear = _choice(problem, drawn).draw_margin > MIN_Z_MARGIN
    drawn["temperature"] = drawn["temperature"] * is_clear
    return drawn


def _logits(problem, arrays):
    """Logits after the penalty."""
    if problem["has_penalty"]:
        return penalized(arrays["logits"], arrays["seen"], arrays["penalty"])
    return arrays["logits"]


def _filters(problem, arrays, temperature):
    """min_p, top_k and top_p, (rows,) each; in greedy rows only the first token stays.

    ``temperature`` is (rows,).
    """
    xp = library_of(temperature)
    off = {"min_p": 0.0, "top_k": 0, "top_p": 1.0}
    if problem["has_filters"]:
        off = {name: arrays[name] for name in off}
    top_k = xp.where(temperature > 0, off["top_k"], 1)
    return off["min_p"] + 0 * temperature, top_k, off["top_p"] + 0 * temperature


def _choice(problem, arrays):
    x = _logits(problem, arrays)
    xp = library_of(x)
    if problem["has_temperature"]:
        temperature = arrays["temperature"]
        draws = exponentials(arrays["seed"], arrays["offset"], problem["vocab"])
    else:
        temperature, draws = xp.zeros(len(x)), xp.ones(x.shape)
    filters = _filters(problem, arrays, temperature)
    return choose(x, xp.where(temperature > 0, temperature, 1.0), filters, draws)


def _oracle(problem, arrays):
    if not problem["rows"]:
        xp = library_of(arrays["logits"])
        return {"ids": xp.zeros(0, "int32"), "logprobs": xp.zeros(0, "float32")}
    choice = _choice(problem, arrays)
    return {"ids": choice.ids, "logprobs": choice.logprobs}


def _bytes_moved(problem: Problem) -> int:
    """Logits and bits once, parameters and results."""
    vocab_bytes = problem["vocab"] * dtypes.itemsize(problem["dtype"])
    words = 4 * (-(-problem["vocab"] // WORD) + 1) * problem["has_penalty"]
    row = 20 * problem["has_temperature"] + 12 * problem["has_filters"] + 4
    return int(problem["rows"] * (vocab_bytes + words + row + 4 * problem["has_logprobs"]))


def _constraint(problem):
    if problem["has_filters"] and not problem["has_temperature"]:
        return "has_filters needs has_temperature: the filters change nothing without a draw"
    return None


def _problem(rows: int, vocab: int, kind: str, dtype: str = "bfloat16") -> Problem:
    """``kind`` is greedy, random, or filtered."""
    return Problem.of(
        "sample", rows=rows, vocab=vocab, dtype=dtype, has_temperature=kind != "greedy",
        has_filters=kind == "filtered", has_penalty=False, has_logprobs=False,
    )  # fmt: skip


KINDS = ("greedy", "random", "filtered")
TARGETS = (
    *(
        (rows, 201088, kind)
        for rows in (1, 8, 64, 256)
        for kind in ("greedy", "random", "filtered")
    ),
    (8, 151936, "filtered"),
    (64, 129280, "filtered"),
)
"""Rows, vocab and kind: gpt-oss, Qwen3 and DeepSeek-V3."""


def _random_problem(dice: Random) -> Problem:
    """Logits of a model, in any of the three kinds."""
    vocab, dtype = model_with(dice).vocab, dice.choice(("bfloat16", "float32"))
    return _problem(log_uniform(dice, 1, 256), vocab, dice.choice(KINDS), dtype)


RANDOM, FILTERS = {"flag": "has_temperature"}, {"flag": "has_filters"}
PENALTY = {"flag": "has_penalty"}

ENTRY = Entry(
    name="sample",
    summary="A token for each row of logits: penalty, temperature, min_p, top_k, top_p and draw.",
    axes=(
        Axis.size("rows", "rows of logits", 0, 40, varies=True),
        Axis.size("vocab", "tokens of the vocabulary", 1, 4000),
        Axis.choice("dtype", "element type of logits", *DTYPES),
        Axis.flag("has_temperature", "tokens are drawn; without it, the largest logit wins"),
        Axis.flag("has_filters", "min_p, top_k and top_p are given"),
        Axis.flag("has_penalty", "seen tokens get a repetition penalty"),
        Axis.flag("has_logprobs", "logprobs are computed", minor=True),
    ),
    inputs=(
        Tensor("logits", ("rows", "vocab"), "dtype", "scores; -inf: never chosen"),
        Tensor("temperature", ("rows",), "float32", "0: the first token in order", **RANDOM),
        Tensor("seed", ("rows",), "int64", "key of the random numbers", **RANDOM),
        Tensor("offset", ("rows",), "int64", "counter: the position of the token", **RANDOM),
        Tensor("min_p", ("rows",), "float32", "least weight, largest is 1; 0: off", **FILTERS),
        Tensor("top_k", ("rows",), "int32", "tokens that stay; 0: off", **FILTERS),
        Tensor("top_p", ("rows",), "float32", "part of the weight that stays; 1: off", **FILTERS),
        Tensor("seen", ("rows", SEEN_WORDS), "int32", "a bit for each token", **PENALTY),
        Tensor("penalty", ("rows",), "float32", "repetition penalty; 1: none", **PENALTY),
    ),
    outputs=(
        Tensor(
            "ids", ("rows",), "int32", "chosen tokens", tolerance=EXACT, optional_for_peers=True
        ),
        Tensor(
            "logprobs", ("rows",), "float32", "natural log of the token's probability",
            flag="has_logprobs", tolerance=Tolerance(2e-5, 1e-5), optional_for_peers=True,
        ),
    ),
    preconditions=(
        below_infinity("logits", minus_infinity=True),
        least("temperature", 0),
        least("min_p", 0),
        least("top_k", 0),
        least("top_p", 0, excluded=True),
        least("penalty", 0, excluded=True),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, Tolerance(2e-5, 1e-5)),
    flops=lambda problem: 2 * problem["rows"] * problem["vocab"],
    bytes_moved=_bytes_moved,
    problems={f"{kind}-{r}x{vocab}": _problem(r, vocab, kind) for r, vocab, kind in TARGETS},
    random_problem=_random_problem,
    peers=(peer_in("_sample_peers", "torch"), peer_in("_sample_peers", "flashinfer")),
    constraint=_constraint,
)  # fmt: skip
