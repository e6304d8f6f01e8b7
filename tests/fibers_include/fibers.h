// Stacks of one host thread that take turns.
//
// swapcontext() does that, too, but saves the mask of signals by two system calls each time, which
// takes most of the time of a kernel whose threads meet often.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace host {

// Where a stack goes on: that of a fiber, or of whoever starts fibers.
class Context {
 public:
  // Has `function` begin on `stack` at the first switch to this context. It must not return.
  void prepare(char* stack, size_t bytes, void (*function)()) {
    getcontext(&beginning_);
    beginning_.uc_stack.ss_sp = stack;
    beginning_.uc_stack.ss_size = bytes;
    beginning_.uc_link = nullptr;
    makecontext(&beginning_, function, 0);
    is_prepared_ = true;
  }

  // Leaves this context and goes on with `next`; returns when somebody switches back.
  void switch_to(Context& next) {
    if (_setjmp(place_) != 0) return;
    if (next.is_prepared_) {
      next.is_prepared_ = false;
      setcontext(&next.beginning_);
    }
    _longjmp(next.place_, 1);
  }

 private:
  ucontext_t beginning_;
  jmp_buf place_;
  bool is_prepared_ = false;
};

}  // namespace host
