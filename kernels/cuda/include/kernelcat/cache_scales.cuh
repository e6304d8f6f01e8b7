// Which keys and values of a paged cache share a scale.
#pragma once

namespace kernelcat {

enum class Scales {
  kNone,  // the cache has no scales
  kHead,  // all tokens of a key-value head
  kPage,  // the tokens of a page, of a key-value head
};

}  // namespace kernelcat
