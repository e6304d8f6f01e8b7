// Partial results of a row, from different keys, and how they are added up.
#pragma once

#include <kernelcat/softmax.cuh>

namespace kernelcat {

// Four columns of a row's accumulator, relative to the largest score `row_max` (in base 2) of the
// keys in it, and the sum of these keys' exponentials.
struct PartialSum {
  float4 values = {};
  float row_max = -kInfinity, row_sum = 0.0f;

  __device__ __forceinline__ void add(const PartialSum& part) {
    const float new_max = fmaxf(row_max, part.row_max);
    const float rescale = rescale_factor(row_max, new_max);
    const float part_rescale = rescale_factor(part.row_max, new_max);
    values.x = values.x * rescale + part.values.x * part_rescale;
    values.y = values.y * rescale + part.values.y * part_rescale;
    values.z = values.z * rescale + part.values.z * part_rescale;
    values.w = values.w * rescale + part.values.w * part_rescale;
    row_sum = row_sum * rescale + part.row_sum * part_rescale;
    row_max = new_max;
  }
};

}  // namespace kernelcat
