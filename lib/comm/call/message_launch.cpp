// SPDX-License-Identifier: Apache-2.0
#include "comm/call/message_launch.h"

#include "device/host/kernels.h"

namespace fsdp::comm {
namespace {

Piece piece_of(const void *values, void *to, uint64_t count, bool accumulate) {
  Piece piece{};
  piece.to = static_cast<std::byte *>(to);
  piece.count = count;
  piece.accumulate = accumulate;
  piece.values = static_cast<const std::byte *>(values);
  return piece;
}

}  // namespace

void add_spans(Launch &launch, std::span<const SumSpan> spans) {
  for (const SumSpan &span : spans) {
    launch.pieces.push_back(piece_of(span.values, span.values, span.count, false));
    launch.fingerprint.add_span(FSDP_FLOAT32, FSDP_FLOAT32, span.count);
  }
}

void add_spans(Launch &launch, std::span<const SliceSumSpan> spans, uint32_t ranks) {
  for (const SliceSumSpan &span : spans) {
    launch.pieces.push_back(piece_of(span.values, span.to, span.count, span.accumulate));
    launch.fingerprint.add_span(FSDP_FLOAT32, FSDP_FLOAT32, span.count * ranks);
  }
}

void add_spans(Launch &launch, std::span<const WholeSpan> spans) {
  for (const WholeSpan &span : spans) {
    launch.pieces.push_back(piece_of(span.whole, span.whole, span.bytes, false));
    launch.fingerprint.add_span(0, 0, span.bytes);
  }
}

void add_broadcast(Launch &launch, std::byte *data, uint64_t bytes, uint32_t root, uint32_t ranks) {
  if (root >= ranks) fail(FSDP_INTERNAL, "broadcast from rank {} of {}", root, ranks);
  launch.root = root;
  launch.pieces.push_back(piece_of(data, data, bytes, false));
  launch.fingerprint.add_span(0, static_cast<fsdp_dtype>(root), bytes);  // roots must agree
}

void add_in_rank_order(const std::byte *base, uint64_t stride, uint32_t ranks, float *to, uint64_t count,
                       bool accumulate) {
  if (!accumulate)
    return device::kernels::rank_sum({base, stride, ranks, FSDP_FLOAT32, FSDP_FLOAT32, to, count, 1.0F, false});
  for (uint32_t r = 0; r < ranks; ++r) device::kernels::add(to, FSDP_FLOAT32, base + r * stride, FSDP_FLOAT32, count);
}

}  // namespace fsdp::comm
