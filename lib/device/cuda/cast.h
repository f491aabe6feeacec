// SPDX-License-Identifier: Apache-2.0
// A kernel that converts elements of one type to another.
#pragma once

#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {

template <class To, class From>
struct Cast {
  static constexpr unsigned batch = 4;
  void *to;
  const void *from;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<typename From::Stored, n> stored[m];
    for (unsigned k = 0; k < m; ++k) stored[k] = load<From, n>(from, first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      Pack<float, n> values;
      for (unsigned j = 0; j < n; ++j) values.lane[j] = From::value(stored[k].lane[j]);
      store<To, n>(to, first + k * step, values);
    }
  }
};

template <class To, class From>
Division divide_two(const void *to, const void *from, uint64_t count) {
  const unsigned at = misfit(to, sizeof(typename To::Stored));
  return divide(count, at, misfit(from, sizeof(typename From::Stored)) == at);
}

template <template <class, class> class Work, class To, class From>
int apply(kernels::Stream stream, void *to, const void *from, uint64_t count) {
  return for_each(Work<To, From>{to, from}, divide_two<To, From>(to, from, count), stream);
}

}  // namespace fsdp::device::cuda
