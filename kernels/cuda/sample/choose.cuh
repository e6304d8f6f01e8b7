// The choice of a token for one row. Threads go over their tokens several times, and reduce the
// results of each pass.
//
// No sort is needed. The tokens that stay are a prefix of the order of tokens (by falling logits):
// a token stays if few enough tokens precede the token (top_k), and if the tokens before the token
// have little enough weight (top_p). The first candidate is the token with the largest score. If a
// candidate does not stay, no token after the candidate stays, and the best token before the
// candidate is the next candidate. In most rows the first candidate stays. A threshold is searched
// only for top_k, because top_p needs the weight of the tokens that top_k leaves.
#pragma once

#include <kernelcat/philox.cuh>
#include <kernelcat/token_order.cuh>

#include "logits.cuh"

namespace kernelcat {

// A token whose x / temperature is smaller than the largest one by this number cannot be chosen:
// exponentials are between 2^-33 and 17.
constexpr float kMaxAdvantage = 27.0f;

struct RowParameters {
  float temperature = 0.0f;  // 0: the first token in the order
  uint2 key;                 // of Philox
  uint2 offset;
  float min_p = 0.0f;
  int top_k = 0;
  float top_p = 1.0f;
};

struct Chosen {
  int id;
  float logprob;
};

// log2 of an exponential random number, from 32 random bits. Numbers near 0 decide and need full
// precision: -ln(1 - u) is a series for small u.
__device__ __forceinline__ float log2_exponential(uint32_t word) {
  const float u = fminf(fmaf(static_cast<float>(word), 0x1p-32f, 0x1p-33f), 1.0f - 0x1p-24f);
  float series = fmaf(u, 1.0f / 6.0f, 1.0f / 5.0f);
  series = fmaf(u, series, 1.0f / 4.0f);
  series = fmaf(u, series, 1.0f / 3.0f);
  series = fmaf(u, series, 1.0f / 2.0f);
  series = fmaf(u * u, series, u);
  return __log2f(u < 0.125f ? series : -kLn2 * __log2f(1.0f - u));
}

// A token with its score in the draw and its logit.
struct Candidate {
  ScoredToken token;
  float x = -kInfinity;

  __device__ __forceinline__ void merge(const Candidate& other) {
    if (other.token.precedes(token)) *this = other;
  }

  // Whether a token comes before this one in the order of logits.
  __device__ __forceinline__ bool follows(float other_x, int id) const {
    return other_x > x || (other_x == x && id < token.id);
  }
};

struct WeightSums {
  float total = 0.0f;   // of all tokens
  float untied = 0.0f;  // of tokens with x >= Border::all_from
  Candidate best;

  __device__ __forceinline__ void merge(const WeightSums& other) {
    total += other.total, untied += other.untied;
    best.merge(other.best);
  }
};

// The tokens before a candidate.
struct TokensBefore {
  int count = 0;
  float weight = 0.0f;
  Candidate best;

  __device__ __forceinline__ void merge(const TokensBefore& other) {
    count += other.count, weight += other.weight;
    best.merge(other.best);
  }
};

constexpr int kNumPivots = 8;

struct PivotCounts {
  int counts[kNumPivots] = {};

  __device__ __forceinline__ void merge(const PivotCounts& other) {
#pragma unroll
    for (int i = 0; i < kNumPivots; ++i) counts[i] += other.counts[i];
  }
};

// Tokens with x >= all_from stay. Tokens with least <= x < all_from have equal logits, and the
// first `num_tied` of these tokens stay.
struct Border {
  float least, all_from;
  int num_tied = 0;
};

// The border of the first `top_k` tokens, from tokens with x >= low; no token has x >= high. Each
// pass counts the tokens from each of several pivots on, and the next pass searches between two
// neighbouring pivots.
template <typename Tokens, typename Team>
__device__ __forceinline__ Border find_top_k(const Tokens& tokens, Team& team, float low,
                                             float high, int top_k) {
  int num_above = 0;  // tokens with x >= high, fewer than top_k
  while (true) {
    float pivots[kNumPivots];
#pragma unroll
    for (int i = 0; i < kNumPivots; ++i) {
      pivots[i] = i == 0 ? low : Tokens::rounded(low + (high - low) * (1.0f / kNumPivots * i));
    }
    PivotCounts pass;
    tokens.for_each([&](int, const EightLogits& x) {
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        if (x[j] < low || x[j] >= high) continue;
#pragma unroll
        for (int i = 0; i < kNumPivots; ++i) pass.counts[i] += x[j] >= pivots[i];
      }
    });
    pass = team.reduce(pass);
    float next_low = low, next_high = high;
    int num_from_low = num_above + pass.counts[0], num_from_high = num_above;
    if (num_from_low <= top_k) return {low, low};
#pragma unroll
    for (int i = 1; i < kNumPivots; ++i) {
      const int num_from_pivot = num_above + pass.counts[i];
      if (num_from_pivot >= top_k) {
        next_low = pivots[i], num_from_low = num_from_pivot;
      } else if (pivots[i] < next_high) {
        next_high = pivots[i], num_from_high = num_from_pivot;
      }
    }
    if (num_from_low == top_k) return {next_low, next_low};
    // No value lies between low and high: the tokens between them are tied.
    if (next_low == low && next_high == high) return {low, high, top_k - num_above};
    low = next_low, high = next_high, num_above = num_from_high;
  }
}

// The passes over a row. `Tokens` has for_each(f), which calls f(first id, eight logits) for the
// tokens of this thread, and rounded(x), the value nearest to x that a logit can have.
template <typename Tokens, typename Team>
struct Chooser {
  const Tokens& tokens;
  Team& team;
  const RowParameters& row;
  float x_max, scale;  // exponents are (x - x_max) * scale, in base 2

  __device__ __forceinline__ float exponent(float x) const { return (x - x_max) * scale; }

  // Merges each of eight tokens for which is_in(x, id) is true into `best`.
  template <typename Predicate>
  __device__ __forceinline__ void merge_best(Candidate& best, int first, const EightLogits& x,
                                             Predicate is_in) const {
#pragma unroll
    for (int four = 0; four < kEight; four += 4) {
      bool is_any = false;
#pragma unroll
      for (int i = four; i < four + 4; ++i) is_any |= is_in(x[i], first + i);
      if (!is_any) continue;
      const uint32_t idx = (first + four) / 4;
      const uint4 random = philox_words(row.key, {idx, 0, row.offset.x, row.offset.y});
      const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float token_x = x[four + i];
        const int id = first + four + i;
        if (!is_in(token_x, id)) continue;
        best.merge({{exponent(token_x) - log2_exponential(words[i]), id}, token_x});
      }
    }
  }

  // The tokens that can win.
  __device__ __forceinline__ Border winnable() const {
    const float least = x_max - kMaxAdvantage * row.temperature;
    return {least, least};
  }

  // The tokens with x >= least that min_p and top_k leave.
  __device__ __forceinline__ Border filtered_border(float least) {
    if (row.min_p > 0.0f) least = fmaxf(least, x_max + row.temperature * logf(row.min_p));
    if (row.top_k <= 0) return {least, least};
    // 2^-6 of x_max is more than a step of bfloat16.
    const float high = x_max + fmaxf(fabsf(x_max) * 0x1p-6f, row.temperature * 0x1p-6f);
    const Border found = find_top_k(tokens, team, Tokens::rounded(least), high, row.top_k);
    return found.least < least ? Border{least, least} : found;
  }

  __device__ __forceinline__ WeightSums weigh(const Border& border, bool has_logprob) {
    WeightSums sums;
    tokens.for_each([&](int first, const EightLogits& x) {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        if (!has_logprob && !(x[i] >= border.least)) continue;
        const float weight = fast_exp2(exponent(x[i]));
        sums.total += weight;
        sums.untied += x[i] >= border.all_from ? weight : 0.0f;
      }
      merge_best(sums.best, first, x, [&](float v, int) { return v >= border.least; });
    });
    return team.reduce(sums);
  }

  // The best token that stays. `candidate` is the best token inside the border, `weight` the sum of
  // the weights that min_p and top_k leave.
  __device__ __forceinline__ Candidate filtered(Candidate candidate, float weight, int top_k) {
    while (true) {
      TokensBefore before;
      tokens.for_each([&](int first, const EightLogits& x) {
        const auto is_before = [&](float v, int id) { return candidate.follows(v, id); };
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          if (!is_before(x[i], first + i)) continue;
          before.count += 1;
          before.weight += fast_exp2(exponent(x[i]));
        }
        merge_best(before.best, first, x, is_before);
      });
      before = team.reduce(before);
      const bool stays = (top_k <= 0 || before.count < top_k) &&
                         (row.top_p >= 1.0f || before.weight < row.top_p * weight);
      if (before.count == 0 || stays) return candidate;
      candidate = before.best;
    }
  }
};

// The token of a row, in all threads of the team. Without kDraws the largest logit wins; without
// kFilters min_p, top_k and top_p are off.
template <bool kDraws, bool kFilters, typename Tokens, typename Team>
__device__ __forceinline__ Chosen choose(const Tokens& tokens, Team& team, const RowParameters& row,
                                         bool has_logprob) {
  ScoredToken largest;
  tokens.for_each([&](int first, const EightLogits& x) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (x[i] > largest.score) largest = {x[i], first + i};
    }
  });
  largest = team.reduce(largest);
  const float x_max = largest.score;
  const bool is_greedy = !kDraws || row.temperature == 0.0f;
  if (is_greedy && !has_logprob) return {largest.id, 0.0f};

  const float temperature = is_greedy ? 1.0f : row.temperature;
  Chooser<Tokens, Team> chooser{tokens, team, row, x_max, kLog2E / temperature};
  if (is_greedy) {
    const WeightSums sums = chooser.weigh({kInfinity, kInfinity}, true);
    return {largest.id, -kLn2 * log2f(sums.total)};
  }
  Border border = chooser.winnable();
  if constexpr (kFilters) border = chooser.filtered_border(border.least);
  const WeightSums sums = chooser.weigh(border, has_logprob);
  Candidate candidate = sums.best;
  if (kFilters && (border.num_tied > 0 || row.top_p < 1.0f)) {
    const float tied_weight = border.num_tied * fast_exp2(chooser.exponent(border.least));
    candidate = chooser.filtered(candidate, sums.untied + tied_weight, row.top_k);
  }
  return {candidate.token.id, kLn2 * (chooser.exponent(candidate.x) - log2f(sums.total))};
}

}  // namespace kernelcat
