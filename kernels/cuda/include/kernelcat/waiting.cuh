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

  // Until `has_come()`. If that takes too long, `missing_rank()` names who is missing.
  template <typename HasCome, typename MissingRank>
  __device__ __forceinline__ void until(HasCome has_come, MissingRank missing_rank) {
    Patience patience;
    while (!has_come() && !has_given_up_) {
      if (patience.is_over()) {
        report_missing(own_, missing_rank());
        has_given_up_ = true;
      }
    }
  }

  // Until `missing()` returns -1, and no longer the rank of which something is missing.
  template <typename Missing>
  __device__ __forceinline__ void until_none(Missing missing) {
    int rank = -1;
    until([&] { return (rank = missing()) < 0; }, [&] { return rank; });
  }

 private:
  Window* own_;
  bool has_given_up_;
};

}  // namespace kernelcat
