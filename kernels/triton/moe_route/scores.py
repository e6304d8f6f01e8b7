"""Scores of experts, and the limit to the best groups.

Experts lie in columns: group g has columns g * GROUP_COLS ..., of which the first GROUP_SIZE are
experts. Both GROUP_COLS and the number of columns are powers of two. Columns are in the order of
experts. Columns without an expert have a score of -inf.
"""

import triton
import triton.language as tl


@triton.jit
def expert_of(cols, num_groups, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr):
    """Experts of columns, and which columns have one; both of the shape of ``cols``."""
    in_group = cols % GROUP_COLS
    experts = cols // GROUP_COLS * GROUP_SIZE + in_group
    return experts, (in_group < GROUP_SIZE) & (cols // GROUP_COLS < num_groups)


@triton.jit
def column_of(experts, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr):
    """Columns of experts."""
    return experts // GROUP_SIZE * GROUP_COLS + experts % GROUP_SIZE


@triton.jit
def selection_scores(
    logits, correction, experts, is_expert, SOFTMAX: tl.constexpr, CORRECTION: tl.constexpr
):
    """What experts are selected by (rows, columns); ``experts`` is (columns,)."""
    if SOFTMAX:
        return logits
    scores = tl.sigmoid(logits)
    if CORRECTION:
        scores += tl.load(correction + experts, mask=is_expert, other=0.0)[None, :]
    return tl.where(is_expert[None, :], scores, float("-inf"))


@triton.jit
def limit_to_groups(
    scores, num_groups, top_groups, GROUP_SIZE: tl.constexpr, GROUP_COLS: tl.constexpr
):
    """The scores (rows, columns) with -inf outside of each row's best groups."""
    ROWS: tl.constexpr = scores.shape[0]
    GROUPS: tl.constexpr = scores.shape[1] // GROUP_COLS
    grouped = tl.reshape(scores, (ROWS, GROUPS, GROUP_COLS))
    sums = tl.max(grouped, axis=2)
    if GROUP_SIZE > 1:
        best = tl.argmax(grouped, axis=2, tie_break_left=True)[:, :, None]
        is_best = tl.arange(0, GROUP_COLS)[None, None, :] == best
        sums += tl.max(tl.where(is_best, float("-inf"), grouped), axis=2)
    group = tl.arange(0, GROUPS)
    is_lower = (group[None, :] < group[:, None])[None, :, :]
    this, other = sums[:, :, None], sums[:, None, :]
    is_better = (other > this) | ((other == this) & is_lower)
    is_better = is_better & (group < num_groups)[None, None, :]
    is_selected = tl.sum(is_better.to(tl.int32), axis=2) < top_groups
    limited = tl.where(is_selected[:, :, None], grouped, float("-inf"))
    return tl.reshape(limited, (ROWS, GROUPS * GROUP_COLS))


@triton.jit
def unscaled_weights(logits, max_logit, SOFTMAX: tl.constexpr):
    """Numerators of weights."""
    return tl.exp(logits - max_logit) if SOFTMAX else tl.sigmoid(logits)
