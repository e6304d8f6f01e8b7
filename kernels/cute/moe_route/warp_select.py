"""One warp selects the experts of one token.

Scores are compared as *keys*: unsigned integers in the order of floats, of which the hardware finds
the largest one of a warp in one instruction. -0 and 0 have one key. The key 0 belongs to no score:
it stands for an expert that is taken or that the token may not use.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelcat.kernels.cute.common.bits import bits_of, float_of
from kernelcat.kernels.cute.moe_route.scores import Score, is_better

LANES = 32
SIGN = 0x80000000
NO_EXPERT = 0xFFFFFFFF


class WarpSelect:
    """A lane has ``per_lane`` experts, in vectors of ``vector`` consecutive ones.

    Neighbouring lanes have neighbouring vectors. Other arguments are as in `naive.Router`.
    """

    def __init__(
        self,
        score: str,
        correction: bool,
        renormalize: bool,
        limited: bool,
        per_lane: int,
        vector: int,
    ):
        self.score = Score(score, correction)
        self.renormalize, self.limited = renormalize, limited
        self.per_lane, self.vector = per_lane, vector
        self.max_experts = LANES * per_lane

    def expert_of(self, i):
        """The lane's expert number ``i``."""
        first = i // self.vector * LANES * self.vector
        return first + cute.arch.lane_idx() * self.vector + i % self.vector

    @cute.jit
    def load(
        self,
        gLogits: cute.Tensor,  # (vector, experts / vector), of a token
        raw: cute.Tensor,  # (vector, per_lane / vector), written where there are experts
    ):
        """Starts to load a token's logits."""
        for j in cutlass.range_constexpr(self.per_lane // self.vector):
            idx = j * LANES + cute.arch.lane_idx()
            if idx < gLogits.shape[1]:
                cute.autovec_copy(gLogits[None, idx], raw[None, j])

    @cute.jit
    def widen(
        self,
        raw: cute.Tensor,  # (vector, per_lane / vector)
        logits: cute.Tensor,  # (per_lane,) float32, written: -inf beyond the last expert
        experts: Int32,
    ):
        """Converts loaded logits to float32."""
        for i in cutlass.range_constexpr(self.per_lane):
            logits[i] = -Float32.inf
            if self.expert_of(i) < experts:
                logits[i] = Float32(raw[i % self.vector, i // self.vector])

    @cute.jit
    def load_rule(
        self,
        mCorrection: cute.Tensor,  # (experts,)
        corrections: cute.Tensor,  # (per_lane,), written
        group_bits: cute.Tensor,  # (per_lane,), written: bits of the experts' groups
        experts: Int32,
        group_size: Int32,
        group_lanes: Int32,
    ):
        """Loads what all tokens share about the lane's experts."""
        for i in cutlass.range_constexpr(self.per_lane):
            expert = self.expert_of(i)
            corrections[i], group_bits[i] = Float32(0), Uint32(0)
            if expert < experts:
                corrections[i] = self.score.correction_of(mCorrection, expert)
                if cutlass.const_expr(self.limited):
                    group_bits[i] = Uint32(1) << Uint32(expert // group_size * group_lanes)

    @cute.jit
    def make_keys(
        self,
        logits: cute.Tensor,  # (per_lane,)
        corrections: cute.Tensor,  # (per_lane,)
        group_bits: cute.Tensor,  # (per_lane,)
        sScores: cute.Tensor,  # (max_experts,), for this warp
        keys: cute.Tensor,  # (per_lane,), written
        experts: Int32,
        group_size: Int32,
        top_groups: Int32,
        group_lanes: Int32,
    ):
        """Computes the keys of a token's experts."""
        for i in cutlass.range_constexpr(self.per_lane):
            expert = self.expert_of(i)
            keys[i] = Uint32(0)
            if expert < experts:
                score = self.score.of_selection(logits[i], corrections[i])
                keys[i] = key_of(score)
                if cutlass.const_expr(self.limited):
                    sScores[expert] = score
        if cutlass.const_expr(self.limited):
            cute.arch.sync_warp()
            allowed = best_groups(sScores, experts, group_size, top_groups, group_lanes)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(self.per_lane):
                if allowed & group_bits[i] == Uint32(0):
                    keys[i] = Uint32(0)

    @cute.jit
    def take_best(
        self,
        keys: cute.Tensor,  # (per_lane,), changed
    ):
        """Takes out the best expert, the lowest one of equals; returns the expert and its key."""
        best = keys[0]
        for i in cutlass.range_constexpr(1, self.per_lane):
            best = cutlass.max(best, keys[i])
        best = cute.arch.warp_redux_sync(best, "max")
        lowest = Uint32(NO_EXPERT)
        for i in cutlass.range_constexpr(self.per_lane - 1, -1, -1):
            if keys[i] == best:
                lowest = Uint32(self.expert_of(i))
        expert = Int32(cute.arch.warp_redux_sync(lowest, "min"))
        self.remove(keys, expert)
        return expert, best

    @cute.jit
    def remove(
        self,
        keys: cute.Tensor,  # (per_lane,), changed
        expert: Int32,
    ):
        """Takes out an expert; a negative number is no expert."""
        for i in cutlass.range_constexpr(self.per_lane):
            if self.expert_of(i) == expert:
                keys[i] = Uint32(0)

    @cute.jit
    def max_of(
        self,
        logits: cute.Tensor,  # (per_lane,)
    ):
        """The largest logit of the token."""
        largest = logits[0]
        for i in cutlass.range_constexpr(1, self.per_lane):
            largest = cute.arch.fmax(largest, logits[i])
        return value_of(cute.arch.warp_redux_sync(key_of(largest), "max"))

    @cute.jit
    def weigh(
        self,
        logits: cute.Tensor,  # (per_lane,)
        expert: Int32,  # of the lane, -1 for none; only the first 16 lanes have experts
        logit: Float32,  # of that expert
        max_logit: Float32,
        scaling: Float32,
    ):
        """The weight of the lane's expert, 0 where it has none."""
        numerator = Float32(0)
        if expert >= 0:
            numerator = self.score.of_weight(logit, max_logit)
        factor = scaling
        if cutlass.const_expr(self.renormalize):
            total = cute.arch.warp_reduction_sum(numerator, threads_in_group=16)
            factor = scaling * cute.arch.rcp_approx(total + 1e-20)
        elif cutlass.const_expr(self.score.is_softmax):
            total = Float32(0)
            for i in cutlass.range_constexpr(self.per_lane):
                total += self.score.of_weight(logits[i], max_logit)
            factor = scaling * cute.arch.rcp_approx(cute.arch.warp_reduction_sum(total))
        return numerator * factor


@cute.jit
def best_groups(
    sScores: cute.Tensor,  # (max_experts,)
    experts: Int32,
    group_size: Int32,
    top_groups: Int32,
    group_lanes: Int32,  # lanes that find the best scores of a group: a power of two
):
    """A bit for each lane, set where the token may use the lane's group.

    The lanes of a group read its scores in turns. Groups begin at different experts, so that the
    lanes read different banks.
    """
    lane, num_groups = cute.arch.lane_idx(), experts // group_size
    group, part = lane // group_lanes, lane % group_lanes
    best, second = -Float32.inf, -Float32.inf
    if group < num_groups:
        num_steps = cute.ceil_div(group_size, group_lanes)
        step = group % num_steps
        for _ in cutlass.range(num_steps, unroll=4):
            idx = step * group_lanes + part
            if idx < group_size:
                score = sScores[group * group_size + idx]
                second = cute.arch.fmax(second, cute.arch.fmin(best, score))
                best = cute.arch.fmax(best, score)
            step += 1
            if step == num_steps:
                step = Int32(0)
    distance = Int32(1)
    while distance < group_lanes:
        other_best = cute.arch.shuffle_sync_bfly(best, distance)
        other_second = cute.arch.shuffle_sync_bfly(second, distance)
        worse = cute.arch.fmin(best, other_best)
        second = cute.arch.fmax(worse, cute.arch.fmax(second, other_second))
        best = cute.arch.fmax(best, other_best)
        distance = distance * 2
    total = best
    if group_size > 1:
        total = best + second
    num_better = Int32(0)
    for other in cutlass.range(num_groups, unroll=4):
        other_total = cute.arch.shuffle_sync(total, other * group_lanes)
        if is_better(other_total, other, total, group):
            num_better += 1
    return Uint32(
        cute.arch.vote_ballot_sync((group < num_groups) & (num_better < top_groups))
    )


@cute.jit
def key_of(score: Float32):
    """The key of a score."""
    bits = bits_of(score + 0.0)  # -0 + 0 = 0
    key = bits | Uint32(SIGN)
    if bits >= Uint32(SIGN):
        key = ~bits
    return key


@cute.jit
def value_of(key: Uint32):
    """The score that has this key."""
    bits = ~key
    if key >= Uint32(SIGN):
        bits = key - Uint32(SIGN)
    return float_of(bits)
