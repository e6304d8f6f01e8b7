"""Triton kernel of `sample`: one program a row, which goes over the logits a few times.

No sort is needed. The tokens that stay are a prefix of the order of tokens (by falling logits): a
token stays if few enough tokens precede the token (top_k), and if the tokens before the token have
little enough weight (top_p). The first candidate is the token with the largest score. If a
candidate does not stay, no token after the candidate stays, and the best token before the candidate
is the next candidate. In most rows the first candidate stays. A threshold is searched only for
top_k, because top_p needs the weight of the tokens that top_k leaves.
"""

import triton
import triton.language as tl

from kernelcat.reference import _sampling

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_TOKEN = tl.constexpr(2147483647)
MAX_DRAW = tl.constexpr(_sampling.MAX_DRAW)
MAX_ADVANTAGE = tl.constexpr(27.0)
"""A token whose x / temperature is smaller than the largest one by this number cannot be chosen:
exponentials are between 2^-33 and 17."""
NUM_PIVOTS = tl.constexpr(4)


@triton.jit
def load_logits(row, seen, penalty, first, vocab, HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr):
    """Ids and penalized logits (BLOCK,) from token ``first`` on; beyond the vocabulary -inf.

    row : pointer to the logits of the row
    seen : pointer to the row's bits
    """
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    if HAS_PENALTY:
        word = tl.load(seen + ids // 32, mask=ids < vocab, other=0)
        is_seen = ((word >> (ids % 32)) & 1) != 0
        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
    return ids, x


@triton.jit
def log2_exponentials(key, offset, first, BLOCK: tl.constexpr):
    """log2 of exponential random numbers (BLOCK,) of the tokens from ``first`` on.

    Small numbers decide and need full precision: -ln(1 - u) is a series for small u.
    """
    fours = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zeros = tl.zeros((BLOCK // 4,), tl.uint32)
    low, high = zeros + offset.to(tl.uint32), zeros + (offset >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key.to(tl.uint64), fours, zeros, low, high)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    u = words.to(tl.uint32, bitcast=True).to(tl.float32) * 2.0**-32 + 2.0**-33
    u = tl.minimum(u, MAX_DRAW)
    series = 1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))
    small = u + u * u * series
    return tl.log2(tl.where(u < 0.125, small, tl.log2(1.0 - u) * -LN2))


@triton.jit
def first_of(scores, ids, logits):
    """The largest of scores (BLOCK,) with the least id: its id and its logit."""
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, ids, NO_TOKEN), 0)
    return token, tl.max(tl.where(ids == token, logits, float("-inf")), 0)


@triton.jit
def find_largest(
    row, seen, penalty, vocab, HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first token in the order, and its logit."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    for first in range(0, vocab, BLOCK):
        ids, x = load_logits(row, seen, penalty, first, vocab, HAS_PENALTY, BLOCK)
        is_better = x > best
        best, best_ids = tl.where(is_better, x, best), tl.where(is_better, ids, best_ids)
    return first_of(best, best_ids, best)


@triton.jit
def sum_weights(
    row, seen, penalty, vocab, x_max, scale, least, HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum of the weights of tokens with x >= least."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        _, x = load_logits(row, seen, penalty, first, vocab, HAS_PENALTY, BLOCK)
        total += tl.where(x >= least, tl.exp2((x - x_max) * scale), 0.0)
    return tl.sum(total, 0)


@triton.jit
def find_top_k(
    row, seen, penalty, vocab, low, high, top_k, HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The border of the first ``top_k`` tokens, from tokens with x >= low; no token has x >= high.

    Returns ``least``, ``all_from`` and ``num_tied``: tokens with x >= all_from stay. Tokens with
    least <= x < all_from have equal logits, and the first ``num_tied`` of these tokens stay. Each
    pass counts the tokens from each of several pivots on, and the next pass searches between two
    neighbouring pivots.
    """
    num_above, num_tied, all_from = 0, 0, low
    is_open = True
    steps = tl.arange(0, NUM_PIVOTS)
    while is_open:
        pivots = low + (high - low) * (steps.to(tl.float32) / NUM_PIVOTS)
        if not HAS_PENALTY:  # only values that a logit can have differ as pivots
            rounded = pivots.to(row.dtype.element_ty).to(tl.float32)
            is_finite = tl.abs(rounded) < float("inf")
            pivots = tl.where((steps > 0) & is_finite, rounded, pivots)
        counts = tl.zeros((BLOCK, NUM_PIVOTS), tl.int32)
        for first in range(0, vocab, BLOCK):
            _, x = load_logits(row, seen, penalty, first, vocab, HAS_PENALTY, BLOCK)
            is_between = (x >= low) & (x < high)
            is_counted = is_between[:, None] & (x[:, None] >= pivots[None, :])
            counts += is_counted.to(tl.int32)
        num_from = num_above + tl.sum(counts, 0)
        is_enough = num_from >= top_k
        next_low = tl.max(tl.where(is_enough, pivots, low), 0)
        next_high = tl.min(tl.where(is_enough, high, pivots), 0)
        num_from_low = tl.min(tl.where(is_enough, num_from, NO_TOKEN), 0)
        is_stuck = (next_low == low) & (next_high == high)
        if tl.max(num_from, 0) <= top_k or num_from_low == top_k:  # no ties
            all_from, is_open = next_low, False
        elif is_stuck:  # no value lies between low and high
            num_tied, all_from, is_open = top_k - num_above, high, False
        else:
            num_above = tl.max(tl.where(is_enough, num_above, num_from), 0)
            high = next_high
        low = next_low
    return low, all_from, num_tied


@triton.jit
def best_before(
    row, seen, penalty, vocab, x_max, scale, key, offset, least, last_x, last_id,
    HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tokens with x >= least that come before token (last_x, last_id) in the order.

    Returns their number, the sum of their weights, and id and logit of the one that the draw takes.
    """
    count, weight = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids, best_x = tl.full((BLOCK,), NO_TOKEN, tl.int32), best
    for first in range(0, vocab, BLOCK):
        ids, x = load_logits(row, seen, penalty, first, vocab, HAS_PENALTY, BLOCK)
        is_before = (x > last_x) | ((x == last_x) & (ids < last_id))
        is_in = is_before & (x >= least)
        if tl.max(is_in.to(tl.int32), 0) > 0:
            exponents = (x - x_max) * scale
            count += is_in.to(tl.int32)
            weight += tl.where(is_in, tl.exp2(exponents), 0.0)
            scores = exponents - log2_exponentials(key, offset, first, BLOCK)
            is_better = is_in & (scores > best)
            best, best_x = tl.where(is_better, scores, best), tl.where(is_better, x, best_x)
            best_ids = tl.where(is_better, ids, best_ids)
    token, token_x = first_of(best, best_ids, best_x)
    return tl.sum(count, 0), tl.sum(weight, 0), token, token_x


@triton.jit
def draw(
    row, seen, penalty, vocab, x_max, scale, key, offset, temperature, min_p, top_k, top_p,
    HAS_FILTERS: tl.constexpr, HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Id and logit of the token that is drawn; the filters are read where HAS_FILTERS."""
    least = x_max - temperature * MAX_ADVANTAGE  # tokens below cannot win
    all_from, num_tied = least, 0
    if HAS_FILTERS:
        if min_p > 0:
            least = tl.maximum(least, x_max + temperature * tl.log(min_p))
            all_from = least
        if top_k > 0:
            low = least
            if not HAS_PENALTY:
                rounded = least.to(row.dtype.element_ty).to(tl.float32)
                low = tl.where(tl.abs(rounded) < float("inf"), rounded, least)
            # 2^-6 of x_max is more than a step of bfloat16.
            high = x_max + tl.maximum(tl.abs(x_max), temperature) * 2.0**-6
            found, all_from, num_tied = find_top_k(
                row, seen, penalty, vocab, low, high, top_k, HAS_PENALTY, BLOCK
            )
            num_tied = tl.where(found < least, 0, num_tied)
            all_from = tl.where(found < least, least, all_from)
            least = tl.maximum(found, least)
    _, _, token, token_x = best_before(
        row, seen, penalty, vocab, x_max, scale, key, offset, least, float("-inf"), NO_TOKEN,
        HAS_PENALTY, BLOCK,
    )  # fmt: skip
    if HAS_FILTERS:
        needs_check = (num_tied > 0) | (top_p < 1.0)
        if needs_check:
            total = sum_weights(
                row, seen, penalty, vocab, x_max, scale, all_from, HAS_PENALTY, BLOCK
            )
            total += num_tied * tl.exp2((least - x_max) * scale)
            is_open = True
            while is_open:
                count, weight, other, other_x = best_before(
                    row, seen, penalty, vocab, x_max, scale, key, offset, least, token_x, token,
                    HAS_PENALTY, BLOCK,
                )  # fmt: skip
                in_top_k = (top_k <= 0) | (count < top_k)
                in_top_p = (top_p >= 1.0) | (weight < top_p * total)
                is_open = (count > 0) & ((in_top_k & in_top_p) == 0)
                if is_open:
                    token, token_x = other, other_x
    return token, token_x


@triton.jit
def sample(
    logits,  # (rows, vocab)
    temperature,  # (rows,) float32, like seed and offset where HAS_TEMPERATURE
    seed,  # (rows,) int64
    offset,  # (rows,) int64
    min_p,  # (rows,) float32, like top_k and top_p where HAS_FILTERS
    top_k,  # (rows,) int32
    top_p,  # (rows,) float32
    seen,  # (rows, ceil(vocab / 32)) int32, like penalty where HAS_PENALTY
    penalty,  # (rows,) float32
    ids,  # (rows,) int32
    logprobs,  # (rows,) float32, where HAS_LOGPROBS
    vocab,
    HAS_TEMPERATURE: tl.constexpr, HAS_FILTERS: tl.constexpr, HAS_PENALTY: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of one row, and its log probability."""
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * vocab
    bits, row_penalty = seen, 1.0
    if HAS_PENALTY:
        bits = seen + program.to(tl.int64) * tl.cdiv(vocab, 32)
        row_penalty = tl.load(penalty + program)
    token, x_max = find_largest(row, bits, row_penalty, vocab, HAS_PENALTY, BLOCK)
    token_x, scale = x_max, LOG2E
    if HAS_TEMPERATURE:
        row_temperature = tl.load(temperature + program)
        if row_temperature > 0:
            scale = 1.0 / row_temperature * LOG2E
            row_min_p, row_top_k, row_top_p = 0.0, 0, 1.0
            if HAS_FILTERS:
                row_min_p, row_top_k = tl.load(min_p + program), tl.load(top_k + program)
                row_top_p = tl.load(top_p + program)
            token, token_x = draw(
                row, bits, row_penalty, vocab, x_max, scale, tl.load(seed + program),
                tl.load(offset + program), row_temperature, row_min_p, row_top_k, row_top_p,
                HAS_FILTERS, HAS_PENALTY, BLOCK,
            )  # fmt: skip
    tl.store(ids + program, token)
    if HAS_LOGPROBS:
        total = sum_weights(
            row, bits, row_penalty, vocab, x_max, scale, float("-inf"), HAS_PENALTY, BLOCK
        )
        tl.store(logprobs + program, ((token_x - x_max) * scale - tl.log2(total)) * LN2)
