"""One warp selects the experts of one token, from sorted lists.

Each lane has consecutive experts of one group, in the order of lanes, and sorts them once as
*candidates*. Then the token's best expert is at the head of a lane's list, and of equal heads the
one of the lowest lane comes first.

A candidate has a *key*, the score as an unsigned integer in the order of floats, of which the
hardware finds the largest one of a warp in one instruction. -0 and 0 have one key. The key 0
belongs to no score: it stands for an expert that is taken or that the token may not use. And a
candidate has a *tail*, the complement of the expert, so that of equal keys the one with the larger
tail comes first.

Steps are loops over a lane's experts, not loops over experts with all steps, because the compiler
keeps their order: so one expert's exponential does not wait for another one's reciprocal.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from kernelcat.kernels.cute.common.bits import bits_of, float_of
from kernelcat.kernels.cute.moe_route.scores import Score, sigmoids
from kernelcat.kernels.cute.moe_route.warp_select import LANES, SIGN

MAX_WORDS = 4
"""Most words of one access: 16 bytes."""


class SortedSelect:
    """``group_lanes`` neighbouring lanes, a power of two, have the experts of a group.

    A lane has room for ``per_lane`` experts, which it loads in vectors of ``vector``. A token uses
    the best ``top_groups`` of ``groups`` groups, or all experts, which are one group then. Other
    arguments are axes of `moe_route`. Vectors of words have ``word_vector`` elements.
    """

    def __init__(
        self,
        score: str,
        correction: bool,
        renormalize: bool,
        experts: int,
        top_k: int,
        groups: int,
        top_groups: int,
        group_lanes: int,
        per_lane: int,
        vector: int,
    ):
        self.score, self.renormalize = Score(score, correction), renormalize
        self.experts, self.top_k = experts, top_k
        self.groups, self.top_groups, self.group_size = groups, top_groups, experts // groups
        self.group_lanes, self.per_lane, self.vector = group_lanes, per_lane, vector
        self.word_vector = min(vector, MAX_WORDS)
        self.is_full = LANES * per_lane == experts
        self.slot_lanes = 1 << (top_k - 1).bit_length()
        self.pairs = compared_pairs(per_lane)

    def expert_of(self, i: int):
        """The lane's expert number ``i``."""
        group, part = self.group_and_part()
        return group * self.group_size + part * self.per_lane + i

    def group_and_part(self):
        """The lane's group, and which of the group's lanes it is."""
        lane = cute.arch.lane_idx()
        return lane // self.group_lanes, lane % self.group_lanes

    def has(self, i: int):
        """Whether there is an expert number ``i`` of the lane; all are there if ``is_full``."""
        group, part = self.group_and_part()
        return (group < self.groups) & (part * self.per_lane + i < self.group_size)

    def where_expert(self, i: int, value, other):
        """``value`` where there is an expert number ``i`` of the lane."""
        return value if self.is_full else chosen(self.has(i), value, other)

    @cute.jit
    def load(
        self,
        vectors: cute.Tensor,  # (vector, experts / vector)
        registers: cute.Tensor,  # (vector, per_lane / vector), written where there are experts
    ):
        """Starts to load the vectors of the lane's experts."""
        size = vectors.shape[0]
        for j in cutlass.range_constexpr(self.per_lane // size):
            place = self.expert_of(j * size) // size
            if cutlass.const_expr(self.is_full):
                cute.autovec_copy(vectors[None, place], registers[None, j])
            else:
                if self.has(j * size):
                    cute.autovec_copy(vectors[None, place], registers[None, j])

    @cute.jit
    def store(
        self,
        registers: cute.Tensor,  # (vector, per_lane / vector)
        vectors: cute.Tensor,  # (vector, experts / vector), written
    ):
        """Stores the vectors of the lane's experts."""
        size = vectors.shape[0]
        for j in cutlass.range_constexpr(self.per_lane // size):
            place = self.expert_of(j * size) // size
            if cutlass.const_expr(self.is_full):
                cute.autovec_copy(registers[None, j], vectors[None, place])
            else:
                if self.has(j * size):
                    cute.autovec_copy(registers[None, j], vectors[None, place])

    def widen(
        self,
        raw: cute.Tensor,  # (vector, per_lane / vector)
        logits: cute.Tensor,  # (per_lane,) float32, written: -inf beyond the last expert
    ):
        """Converts loaded logits to float32."""
        for i in range(self.per_lane):
            logit = Float32(raw[i % self.vector, i // self.vector])
            logits[i] = self.where_expert(i, logit, -Float32.inf)

    def make_candidates(
        self,
        logits: cute.Tensor,  # (per_lane,)
        corrections: cute.Tensor,  # (vector, per_lane / vector)
        sSigmoids: cute.Tensor,  # (vector, experts / vector), of this warp; written for sigmoid
        keys: cute.Tensor,  # (per_lane,), written in descending order
        tails: cute.Tensor,  # (per_lane,), written
    ):
        """Computes the candidates of a token."""
        places = range(self.per_lane)
        scores = [logits[i] for i in places]
        if not self.score.is_softmax:
            size = self.word_vector
            registers = cute.make_rmem_tensor((size, self.per_lane // size), Float32)
            for i, score in enumerate(sigmoids(scores)):
                registers[i % size, i // size] = score
            self.store(registers, sSigmoids)
            scores = [registers[i % size, i // size] for i in places]
            scores = [scores[i] + corrections[i % size, i // size] for i in places]
        last = ~Uint32(self.expert_of(0))
        for i, key in enumerate([key_of(score) for score in scores]):
            keys[i], tails[i] = self.where_expert(i, key, Uint32(0)), last - Uint32(i)
        self.sort(keys, tails)
        if self.top_groups < self.groups:
            is_usable = self.may_use_group(keys)
            for i in places:
                keys[i] = chosen(is_usable, keys[i], Uint32(0))

    def sort(self, keys: cute.Tensor, tails: cute.Tensor):
        """Sorts the lane's candidates (per_lane,) in descending order."""
        for i, j in self.pairs:
            key, tail, other_key, other_tail = keys[i], tails[i], keys[j], tails[j]
            is_ordered = wide(key, tail) > wide(other_key, other_tail)
            keys[i] = chosen(is_ordered, key, other_key)
            keys[j] = chosen(is_ordered, other_key, key)
            tails[i] = chosen(is_ordered, tail, other_tail)
            tails[j] = chosen(is_ordered, other_tail, tail)

    def may_use_group(self, keys: cute.Tensor):
        """Whether the lane's group is one of the token's best; ``keys`` (per_lane,) are sorted."""
        best, second = keys[0], keys[1] if self.per_lane > 1 else Uint32(0)
        for power in range(self.group_lanes.bit_length() - 1):
            other_best = cute.arch.shuffle_sync_bfly(best, 1 << power)
            other_second = cute.arch.shuffle_sync_bfly(second, 1 << power)
            worse = cutlass.min(best, other_best)
            second = cutlass.max(worse, cutlass.max(second, other_second))
            best = cutlass.max(best, other_best)
        total = value_of(best)
        if self.group_size > 1:
            total = total + value_of(second)
        return self.num_better_groups(key_of(total)) < self.top_groups

    def num_better_groups(self, key: Uint32):
        """Groups with a larger key than the lane's group; each of a group's lanes compares some."""
        (group, part), num_better = self.group_and_part(), Int32(0)
        for first in range(0, self.groups, self.group_lanes):
            other = first + part
            other_key = cute.arch.shuffle_sync(key, other * self.group_lanes % LANES)
            least = chosen(other < group, key, key + Uint32(1))  # ties go to the lower group
            is_better = (other_key >= least) & (other < self.groups)
            num_better += chosen(is_better, Int32(1), Int32(0))
        for power in range(self.group_lanes.bit_length() - 1):
            num_better += cute.arch.shuffle_sync_bfly(num_better, 1 << power)
        return num_better

    def take_best(self, keys: cute.Tensor, tails: cute.Tensor):
        """Takes the best candidate out of the lanes' sorted lists (per_lane,).

        Returns its key, whether it was this lane's, and the expert at the head of this lane's list.
        """
        key, tail = keys[0], tails[0]
        best = cute.arch.warp_redux_sync(key, "max")
        lower_lanes = (Uint32(1) << Uint32(cute.arch.lane_idx())) - Uint32(1)
        holders = Uint32(cute.arch.vote_ballot_sync(key == best))
        is_mine = (key == best) & ((holders & lower_lanes) == Uint32(0))
        for i in range(self.per_lane - 1):
            keys[i] = chosen(is_mine, keys[i + 1], keys[i])
            tails[i] = chosen(is_mine, tails[i + 1], tails[i])
        end = self.per_lane - 1
        keys[end] = chosen(is_mine, Uint32(0), keys[end])
        return best, is_mine, Int32(~tail)

    def remove(self, keys: cute.Tensor, tails: cute.Tensor, expert: Int32):
        """Takes an expert out of the lanes' lists; a negative number is no expert."""
        for i in range(self.per_lane):
            keys[i] = chosen(Int32(~tails[i]) == expert, Uint32(0), keys[i])

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

    def weigh(
        self,
        logits: cute.Tensor,  # (per_lane,)
        numerator: Float32,  # of the weight of the lane's expert, 0 where it has none
        max_logit: Float32,
        scaling: Float32,
    ):
        """The weight of the lane's expert; only the first top_k lanes have experts."""
        factor = scaling
        if self.renormalize:
            total = cute.arch.warp_reduction_sum(numerator, threads_in_group=self.slot_lanes)
            factor = scaling * cute.arch.rcp_approx(total + 1e-20)
        elif self.score.is_softmax:
            total = Float32(0)
            for i in range(self.per_lane):
                total += self.score.of_weight(logits[i], max_logit)
            factor = scaling * cute.arch.rcp_approx(cute.arch.warp_reduction_sum(total))
        return numerator * factor


def compared_pairs(count: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even mergesort: the pairs of places that are compared, one after another.

    ``count`` is a power of two.
    """
    pairs, size = [], 1
    while size < count:
        distance = size
        while distance:
            for first in range(distance % size, count - distance, 2 * distance):
                for i in range(first, min(first + distance, count - distance)):
                    if i // (2 * size) == (i + distance) // (2 * size):
                        pairs.append((i, i + distance))
            distance //= 2
        size *= 2
    return tuple(pairs)


def chosen(condition, value, other):
    """One of two values of one type, without a branch."""
    return type(value)(cutlass.select_(condition, value, other))


def wide(high: Uint32, low: Uint32):
    """Two words as one integer."""
    return Uint64(high) << Uint64(32) | Uint64(low)


@cute.jit
def key_of(score: Float32):
    """The key of a score."""
    bits = bits_of(score + 0.0)  # -0 + 0 = 0
    return chosen(bits >= Uint32(SIGN), ~bits, bits | Uint32(SIGN))


@cute.jit
def value_of(key: Uint32):
    """The score that has this key."""
    return float_of(chosen(key >= Uint32(SIGN), key - Uint32(SIGN), ~key))
