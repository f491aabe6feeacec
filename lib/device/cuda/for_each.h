// SPDX-License-Identifier: Apache-2.0
// How kernels walk over elements. A thread has up to `batch` packs of 4 elements under way at once, `threads` packs
// apart, so that a warp's accesses are whole lines: 16 bytes per load of fp32 and 64 bytes per operand and thread are
// enough in flight to fill the memory of an H200 at half of its occupancy.
#pragma once

#include "device/cuda/elements.h"
#include "device/cuda/launch.h"

namespace fsdp::device::cuda {

constexpr unsigned threads = 256, pack = 4;

// count elements of several arrays: `head` single ones, then `packs` whole packs at addresses that suit all arrays,
// then single ones; all single ones if no address suits them all.
struct Division {
  uint64_t count = 0, head = 0, packs = 0;
  bool wide = false;

  FSDP_BOTH uint64_t units() const { return wide ? packs : count; }
  FSDP_BOTH uint64_t edges() const { return wide ? count - packs * pack : 0; }
  FSDP_BOTH uint64_t edge(uint64_t i) const { return i < head ? i : i + packs * pack; }
};

FSDP_BOTH unsigned misfit(const void *address, unsigned element_bytes) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address) / element_bytes % pack);
}

FSDP_BOTH Division divide(uint64_t count, unsigned misfit, bool alike) {
  Division division;
  division.count = count;
  division.head = (pack - misfit) % pack;
  division.wide = alike && count >= division.head + pack;
  if (division.wide)
    division.packs = (count - division.head) / pack;
  else
    division.head = 0;
  return division;
}

// work.run<n, m>(first, step): n elements from each of m places first, first + step ...
template <unsigned batch, unsigned n, class Work>
FSDP_DEVICE void run_units(const Work &work, uint64_t head, uint64_t units, uint64_t block, unsigned thread) {
  constexpr uint64_t step = uint64_t{threads} * n;
  const uint64_t first = block * threads * batch + thread;
  if (first + uint64_t{threads} * (batch - 1) < units) {
    work.template run<n, batch>(head + first * n, step);
  } else {
    for (uint64_t unit = first; unit < units; unit += threads) work.template run<n, 1>(head + unit * n, step);
  }
}

// What one block of those that divide `division` does; the first does the edges.
template <unsigned batch, class Work>
FSDP_DEVICE void run_block(const Work &work, const Division &division, uint64_t block, unsigned thread) {
  if (!division.wide) return run_units<batch, 1>(work, 0, division.count, block, thread);
  run_units<batch, pack>(work, division.head, division.packs, block, thread);
  if (block == 0 && thread < division.edges()) work.template run<1, 1>(division.edge(thread), 0);
}

template <unsigned batch>
FSDP_BOTH uint64_t blocks_of(const Division &division) {
  return (division.units() + threads * batch - 1) / (threads * batch);
}

template <class Work>
__global__ void __launch_bounds__(threads) each_element(const __grid_constant__ Work work, const Division division) {
  run_block<Work::batch>(work, division, blockIdx.x, threadIdx.x);
}

template <class Work>
int for_each(const Work &work, const Division &division, CUstream_st *stream) {
  if (division.count == 0) return 0;
  return FSDP_LAUNCH(each_element<Work>, static_cast<unsigned>(blocks_of<Work::batch>(division)), threads, stream, work,
                     division);
}

}  // namespace fsdp::device::cuda
