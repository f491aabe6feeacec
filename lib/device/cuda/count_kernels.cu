// SPDX-License-Identifier: Apache-2.0
// Counts Inf and NaN in fp32, and counts zeros. Each thread first adds up its own counts, and each block the counts of
// its threads. So a model whose weights are all NaN is counted as fast as any other: each block makes one addition to
// the result. Least traffic: 4 bytes per element.
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

constexpr uint64_t max_count_blocks = 1024;  // a few for each of a GPU's processors

struct NonfiniteNumber {
  using Element = float;
  FSDP_DEVICE static bool counts(float value) { return (bits_of(value) & 0x7f800000) == 0x7f800000; }
};

struct ZeroNumber {
  using Element = float;
  FSDP_DEVICE static bool counts(float value) { return (bits_of(value) & 0x7fffffff) == 0; }
};

// Counts of a thread in one of the blocks on which it works in turn.
template <class Kind>
struct CountInto {
  const typename Kind::Element *values;
  uint32_t *found;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<typename Kind::Element, n> loaded[m];
    for (unsigned k = 0; k < m; ++k) loaded[k] = load_pack<n>(values + first + k * step);
    for (unsigned k = 0; k < m; ++k)
      for (unsigned j = 0; j < n; ++j) *found += Kind::counts(loaded[k].lane[j]);
  }
};

struct FoundByThreads {
  uint32_t lane[threads];
};

template <class Kind>
struct Count {
  static constexpr unsigned threads = cuda::threads, batch = 4;
  using Shared = FoundByThreads;
  uint64_t *result;
  const typename Kind::Element *values;
  Division division;
  uint64_t parts, blocks;  // each block works on every `blocks`-th part

  FSDP_DEVICE void first(Shared &shared) const {
    uint32_t found = 0;
    const CountInto<Kind> work{values, &found};
    for (uint64_t part = blockIdx.x; part < parts; part += blocks) run_block<batch>(work, division, part, threadIdx.x);
    shared.lane[threadIdx.x] = found;
  }
  FSDP_DEVICE void second(Shared &shared) const {
    if (threadIdx.x != 0) return;
    uint64_t found = 0;
    for (unsigned i = 0; i < threads; ++i) found += shared.lane[i];
    if (found) add_atomically(result, found);
  }
};

__global__ void set_count(uint64_t *count) { *count = 0; }

template <class Kind>
int count_of(kernels::Stream stream, uint64_t *result, const typename Kind::Element *values, uint64_t count) {
  if (const int error = FSDP_LAUNCH(set_count, 1, 1, stream, result)) return error;
  const Division division = divide(count, misfit(values, sizeof *values), true);
  const uint64_t parts = blocks_of<Count<Kind>::batch>(division);
  const uint64_t blocks = parts < max_count_blocks ? parts : max_count_blocks;
  const Count<Kind> work{result, values, division, parts, blocks};
  return blocks ? FSDP_LAUNCH_PHASED(work, static_cast<unsigned>(blocks), work.threads, stream) : 0;
}

}  // namespace

namespace kernels {

int count_nonfinite(Stream stream, uint64_t *result, const float *values, uint64_t count) {
  return count_of<NonfiniteNumber>(stream, result, values, count);
}

int count_zeros(Stream stream, uint64_t *result, const float *values, uint64_t count) {
  return count_of<ZeroNumber>(stream, result, values, count);
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
