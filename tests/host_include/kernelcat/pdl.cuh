// Launches on the host follow one another.
#pragma once

namespace kernelcat {

inline void grid_dependency_wait() {}
inline void launch_dependents() {}

}  // namespace kernelcat
