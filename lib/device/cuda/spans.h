// SPDX-License-Identifier: Apache-2.0
// Many pieces of work of one kind in one launch, as arguments of the kernel: each has blocks of its own.
#pragma once

#include <cstddef>
#include <span>

#include "device/cuda/portable.h"

namespace fsdp::device::cuda {

template <class Span, unsigned most>
struct Batch {
  Span spans[most];
  uint32_t first_block[most];
  uint32_t count;

  // Of those that begin at or before the block, the last: one without blocks is never found.
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

// All arguments of a launch, at most 4 KB on every driver, with their padding.
constexpr size_t most_argument_bytes = 4000;

struct Filled {
  size_t spans;
  uint64_t blocks;
};

// As many of those given as fit into one launch, but for those without elements.
template <class Span, unsigned most, class BlocksOf>
Filled fill(Batch<Span, most> &batch, std::span<const Span> spans, const BlocksOf &blocks_of) {
  constexpr uint64_t most_blocks = 0x7fffffff;
  Filled filled{0, 0};
  for (batch.count = 0; filled.spans < spans.size() && batch.count < most; ++filled.spans) {
    const Span &span = spans[filled.spans];
    if (span.count == 0) continue;
    const uint64_t blocks = blocks_of(span);
    if (batch.count > 0 && filled.blocks + blocks > most_blocks) break;
    batch.add(span, filled.blocks);
    filled.blocks += blocks;
  }
  return filled;
}

// launch(blocks) starts what is in the batch; the first error ends it.
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

}  // namespace fsdp::device::cuda
