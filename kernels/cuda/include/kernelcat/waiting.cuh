// Waiting for other ranks, with an end.
#pragma once

#include <kernelcat/window.cuh>

namespace kernelcat {

// What one thread waits for. Where something does not come in time, the thread names the rank in
// the window, and neither it nor a later launch waits for anything any more.
class Waiting {
 public:
  // Loads what tells whether an earlier launch has failed; nobody waits for it here.
  __device__ __forceinline__ explicit Waiting(Window* own)
      : own_(own), has_given_up_(has_failed(own)) {}

  // Until `missing()` returns -1, and no longer the rank of which something is missing.
  template <typename Missing>
  __device__ __forceinline__ void until_none(Missing missing) {
    Patience patience;
    while (true) {
      const int rank = missing();
      if (rank < 0 || has_given_up_) return;
      if (patience.is_over()) {
        report_missing(own_, rank);
        has_given_up_ = true;
      }
    }
  }

 private:
  Window* own_;
  bool has_given_up_;
};

}  // namespace kernelcat
