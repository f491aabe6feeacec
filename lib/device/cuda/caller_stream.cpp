// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/caller_stream.h"

#include <algorithm>

namespace fsdp::device::cuda {

void CallerStream::point_at(cudaStream_t stream) {
  stream_ = stream;
  name_ =
      stream ? format_text("the caller's stream {}", static_cast<const void *>(stream)) : "the caller's stream NULL";
}

void CallerStream::after() {
  if (capture_id() == 0) last_.record(stream_, 0, name_);
}

// Kernels of two streams must not work in the same scratch at the same time.
void CallerStream::sum_squares_in(std::span<const SquaresSpan> spans) {
  wait(streams_.scratch_free_);
  launch_sum_squares(spans, streams_.scratch_.data());
  record(streams_.scratch_free_);
}

CallerStreams::CallerStreams(Core &core) : core_(core), scratch_(core, "scratch of kernels"), scratch_free_(core) {
  for (KeptStream &slot : slots_) slot.stream = std::make_unique<CallerStream>(core, *this);
  core.add(*this);
}

CallerStream &CallerStreams::at(cudaStream_t stream) {
  const auto same = [=](const KeptStream &slot) { return slot.used != 0 && slot.stream->stream() == stream; };
  auto slot = std::find_if(slots_.begin(), slots_.end(), same);
  if (slot == slots_.end()) {
    slot = std::min_element(slots_.begin(), slots_.end(), [](auto &a, auto &b) { return a.used < b.used; });
    slot->stream->point_at(stream);
  }
  slot->used = ++clock_;
  return *slot->stream;
}

CallerStreams::~CallerStreams() { core_.remove(*this); }

}  // namespace fsdp::device::cuda
