// A token's row in the cache of multi-head latent attention (MLA): 512 latent values, which are the
// token's value, then the 64 rotated elements of its key. All 576 are the key.
#pragma once

namespace kernelcat {

constexpr int kLatent = 512, kRope = 64;       // elements
constexpr int kRowElements = kLatent + kRope;  // of a query and of a row of 16-bit elements
constexpr int kScaleGroup = 128;               // latent values that share a scale in a PackedRow
constexpr int kRowScales = kLatent / kScaleGroup;

// 656 bytes: latents in float8_e4m3fn, their scales in float32, the rotated part in bfloat16.
struct PackedRow {
  static constexpr int kScalesAt = kLatent, kRopeAt = kScalesAt + 4 * kRowScales;  // bytes
  static constexpr int kBytes = kRopeAt + 2 * kRope;
};

}  // namespace kernelcat
