// SPDX-License-Identifier: Apache-2.0
// How kernels walk over elements. A thread has up to `batch` packs of 4 elements under way at once. The packs are
// `threads` packs apart, so that a warp accesses whole lines. With 16 bytes per load of fp32 and 64 bytes per operand
// and thread, half of the occupancy is enough to saturate the memory of an H200.
#pragma once

#include <cstddef>
#include <span>

#include "device/cuda/elements.h"
#include "device/cuda/portable.h"

namespace fsdp::device::cuda {

// Many pieces of work of one kind in one launch, passed as arguments of the kernel. Each piece has its own blocks.

template <class Span, unsigned most>
struct Batch {
  Span spans[most];
  uint32_t first_block[most];
  uint32_t count;

  // Returns the last span that begins at or before the block, so that a span without blocks is never found.
  FSDP_DEVICE unsigned span_of(uint32_t block) const {
    unsigned low = 0, high = count;
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      if (first_block[middle] <= block)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
  void add(const Span &span, uint64_t block) {
    spans[count] = span;
    first_block[count++] = static_cast<uint32_t>(block);
  }
};

// The limit for all arguments of a launch. Every driver allows 4 KB, which includes padding.
constexpr size_t max_argument_bytes = 4000;

struct Filled {
  size_t spans;
  uint64_t blocks;
};

// Fills the batch with as many of the given spans as fit into one launch, and skips spans without blocks.
template <class Span, unsigned most, class BlocksOf>
Filled fill(Batch<Span, most> &batch, std::span<const Span> spans, const BlocksOf &blocks_of) {
  constexpr uint64_t max_blocks = 0x7fffffff;
  Filled filled{0, 0};
  for (batch.count = 0; filled.spans < spans.size() && batch.count < most; ++filled.spans) {
    const Span &span = spans[filled.spans];
    const uint64_t blocks = blocks_of(span);
    if (blocks == 0) continue;
    if (batch.count > 0 && filled.blocks + blocks > max_blocks) break;
    batch.add(span, filled.blocks);
    filled.blocks += blocks;
  }
  return filled;
}

// Fills and launches batches until all spans are done or a launch fails. launch(blocks) starts the work in the batch.
template <class Span, unsigned most, class BlocksOf, class Launch>
int launch_all(Batch<Span, most> &batch, std::span<const Span> spans, const BlocksOf &blocks_of, const Launch &launch) {
  while (!spans.empty()) {
    const Filled filled = fill(batch, spans, blocks_of);
    spans = spans.subspan(filled.spans);
    if (batch.count == 0) continue;
    if (const int error = launch(static_cast<unsigned>(filled.blocks))) return error;
  }
  return 0;
}

// Does the same for works whose spans are made by make_span(work, index), at most `most` at a time.
template <unsigned most, class Span, class Work, class MakeSpan, class BlocksOf, class Launch>
int launch_each(Batch<Span, most> &batch, std::span<const Work> works, const MakeSpan &make_span,
                const BlocksOf &blocks_of, const Launch &launch) {
  for (size_t first = 0; first < works.size(); first += most) {
    Span spans[most];
    const size_t count = works.size() - first < most ? works.size() - first : most;
    for (size_t i = 0; i < count; ++i) spans[i] = make_span(works[first + i], first + i);
    if (const int error = launch_all(batch, std::span<const Span>(spans, count), blocks_of, launch)) return error;
  }
  return 0;
}

}  // namespace fsdp::device::cuda

// The only ways to start a kernel. Under nvcc they launch it. In the simulation, whose shim is included first and
// defines both macros, they put a function into the stream's queue. Both return a cudaError_t as int and copy the
// arguments.
//
// FSDP_LAUNCH(kernel, blocks, threads, stream, arguments...) starts a __global__ function whose threads do not depend
// on each other. FSDP_LAUNCH_PHASED(work, blocks, threads, stream) runs work.first(shared) in all threads of a block,
// and then work.second(shared) in all of them, and then work.third(shared) if it exists. Each block has one
// uninitialized object of the type Work::Shared. If there is a type Work::Kept, there are three functions, whose second
// argument is an object of this type: the data that a thread keeps in registers from one function to the next. A
// barrier in a kernel would need threads that the simulation can suspend; several functions do not.

#ifndef FSDP_SIMULATED_CUDA
#include <cuda_runtime.h>

namespace fsdp::device::cuda {

// <<<>>> is not used, because its error would be stored in a place that other calls also use.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, CUstream_st *stream,
           const Arguments &...arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class Work>
__global__ void __launch_bounds__(Work::threads) phased(const __grid_constant__ Work work) {
  __shared__ typename Work::Shared shared;
  if constexpr (requires { typename Work::Kept; }) {
    typename Work::Kept kept;
    work.first(shared, kept);
    __syncthreads();
    work.second(shared, kept);
    __syncthreads();
    work.third(shared, kept);
  } else {
    work.first(shared);
    __syncthreads();
    work.second(shared);
    if constexpr (requires { work.third(shared); }) {
      __syncthreads();
      work.third(shared);
    }
  }
}

}  // namespace fsdp::device::cuda

#define FSDP_LAUNCH(kernel, blocks, threads, stream, ...) \
  ::fsdp::device::cuda::launch(kernel, blocks, threads, stream, __VA_ARGS__)
#define FSDP_LAUNCH_PHASED(work, blocks, threads, stream) \
  ::fsdp::device::cuda::launch(::fsdp::device::cuda::phased<decltype(work)>, blocks, threads, stream, work)

#endif

namespace fsdp::device::cuda {

constexpr unsigned threads = 256, pack = 4;

// Divides `count` elements of several arrays: first `head` single elements, then `packs` whole packs at addresses that
// are aligned in all arrays, then single elements. If no address is aligned in all of them, all elements are single.
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

// work.run<n, m>(first, step) processes n elements at each of the m places first, first + step, ...
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

// The work of one of the blocks that share `division`. The first block also processes the single elements.
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
