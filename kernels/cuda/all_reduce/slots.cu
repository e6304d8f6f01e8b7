// Every rank sends its rows into slots of all peers' windows, without flags and signals, and sums
// up what arrives; it may add a residual and normalize the sums, of which a thread block has whole
// rows.
#include <kernelcat/move_vectors.cuh>
#include <kernelcat/pair_sums.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/row_slots.cuh>
#include <kernelcat/warp_sum.cuh>

namespace kernelcat {

// The sum over all threads of the thread block, which call this together. `scratch` is shared
// memory, (kThreads / 32,).
template <int kThreads>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  __syncthreads();  // the threads have read what stood there before
  if (threadIdx.x % kWarpThreads == 0) scratch[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / kWarpThreads; ++i) sum += scratch[i];
  return sum;
}

template <typename T>
__device__ __forceinline__ float square_sum(const uint4& vector) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = to_float(reinterpret_cast<const T*>(&vector)[i]);
    sum += value * value;
  }
  return sum;
}

// Each element times `factor` and its weight.
template <typename T>
__device__ __forceinline__ uint4 scaled(const uint4& vector, float factor, const uint4& weight) {
  const T* values = reinterpret_cast<const T*>(&vector);
  const T* weights = reinterpret_cast<const T*>(&weight);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = pack<T>(to_float(values[2 * i]) * factor * to_float(weights[2 * i]),
                       to_float(values[2 * i + 1]) * factor * to_float(weights[2 * i + 1]));
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Rows are at most kVectors vectors for each thread.
template <typename T, int kRanks, int kThreads, int kVectors, bool kNorm, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    all_reduce_slots(const uint4* x,         // (tokens, hidden), of T
                     const uint4* residual,  // (tokens, hidden), or null
                     const uint4* weight,    // (hidden,), with kNorm
                     uint4* out,             // (tokens, hidden)
                     uint4* normed,          // (tokens, hidden), with kNorm
                     int num_tokens, int hidden, float eps, int rank, Window* window0,
                     Window* window1, Window* window2, Window* window3, Window* window4,
                     Window* window5, Window* window6, Window* window7) {
  extern __shared__ uint8_t dynamic_shared[];
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  constexpr int kUnroll = kRanks == 2 ? (kVectors < 4 ? kVectors : 4) : 1;
  const uint32_t epoch = begin_epoch(own);
  Waiting waiting(own);
  const int num_vectors = hidden / 8;
  const RowSlots slots{static_cast<int>(epoch % 2), num_tokens, num_vectors};
  for (int token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    const uint4* row = x + static_cast<int64_t>(token) * num_vectors;
    move_vectors<kThreads, kUnroll>(
        num_vectors, [&](int at) { return row[at]; },
        [&](int at, const uint4& vector) {
#pragma unroll
          for (int shift = 1; shift < kRanks; ++shift) {
            send_to_slot(slots.of(windows.of[shift], rank, token) + at, vector);
          }
        });
  }
  for (int token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    const int64_t row = static_cast<int64_t>(token) * num_vectors;
    uint4 sums[ceil_div(kVectors, kUnroll) * kUnroll] = {};
    float squares = 0.0f;
#pragma unroll
    for (int first = 0; first < kVectors; first += kUnroll) {
      uint4 parts[kUnroll * kRanks] = {}, mine[kUnroll] = {}, added[kUnroll] = {};
      const auto at = [&](int i) { return (first + i) * kThreads + int(threadIdx.x); };
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (at(i) >= num_vectors) continue;
        if (residual) added[i] = residual[row + at(i)];
        mine[i] = x[row + at(i)];
      }
      take_from_slots(
          parts, waiting,
          [&](int i) {
            const int place = at(i / kRanks), source = i % kRanks;
            const bool travels = source != rank && place < num_vectors;
            return travels ? slots.of(own, source, token) + place : nullptr;
          },
          [](int i) { return i % kRanks; });
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (at(i) >= num_vectors) continue;
        const auto part_of = [&](int source) {
          return select(source == rank, mine[i], parts[i * kRanks + source]);
        };
        PairSums<T, 4> sum;
        sum.start(residual ? added[i] : part_of(0));
        if (residual) sum.add(part_of(0));
#pragma unroll
        for (int source = 1; source < kRanks; ++source) sum.add(part_of(source));
        sums[first + i] = rounded_vector(sum);
        out[row + at(i)] = sums[first + i];
        if constexpr (kNorm) squares += square_sum<T>(sums[first + i]);
      }
    }
    if constexpr (kNorm) {
      squares = block_sum<kThreads>(squares, reinterpret_cast<float*>(dynamic_shared));
      const float factor = rsqrtf(squares / hidden + eps);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = i * kThreads + threadIdx.x;
        if (at < num_vectors) normed[row + at] = scaled<T>(sums[i], factor, weight[at]);
      }
    }
  }
  end_epoch(own, epoch);
}

}  // namespace kernelcat
