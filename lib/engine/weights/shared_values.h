// SPDX-License-Identifier: Apache-2.0
// Numbers of a model that are spread over the ranks with slots: shares of a norm, and amaxes. On a device they are
// exchanged on the library's streams, and no thread waits for them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// `of` names the numbers in traces. `event` is reusable and orders the two axes.
struct ValuesGather {
  Traced of;
  transport::Part from;  // each inner rank's piece
  std::byte *whole;      // all pieces, in the order of the ranks that hold slots
  uint64_t bytes;        // size of a piece
  device::Event &event;
};
// Gathers after the work of the caller's stream. Returns the stream on which all numbers are then available.
device::Stream &gather_values(Runtime &runtime, const ValuesGather &gather, device::Stream &caller);
// The scales of parameters that have one scale each. A scale is made from the largest magnitude on any rank. All scales
// are found at once, whenever weights are published.
//
//   amaxes (each rank, on the caller's stream)  ->  those of all ranks that hold slots  ->  scales and their inverses
//
// Like shares of norms, amaxes are exchanged between the callers, or on the library's streams (gather_values()).

class SharedAmaxes {
 public:
  explicit SharedAmaxes(Runtime &runtime);

  // This rank's amax of a parameter; it is always 0 if this rank has no part of the parameter.
  float *own(uint64_t index) const { return own_ + index; }
  const float *scale(uint64_t index) const { return scales_ + index; }
  const float *inverse(uint64_t index) const { return inverses_ + index; }
  // Collective over the holders. This rank's amaxes must have been written on the caller's stream; later work on that
  // stream has the scales.
  void find_scales(device::Stream &caller);

 private:
  device::Stream &gather(uint64_t first, uint64_t count, device::Stream &caller);

  Runtime &runtime_;
  const uint64_t count_;
  float *own_, *all_, *scales_, *inverses_;
};

// The norm that all ranks of a model compute from their shares, where it lies, and what waits for it.
//
//   share (each rank, on the caller's stream)  ->  shares of all slots  ->  norm and factor  ->  a copy for the host
//
// Ranks in host memory exchange the shares between their callers. On a device the shares are exchanged on the library's
// streams, and only readers of the norm wait for them: AdamW, which uses the factor, or the host.

class SharedNorm {
 public:
  explicit SharedNorm(Runtime &runtime);

  // A norm can no longer be read once another one is asked for, because its share may be overwritten.
  double *squares() const { return squares_; }  // one per parameter, for the code that adds up the share
  double *share() const { return share_; }
  // True if the callers exchange the shares of all ranks. If false, they are exchanged on the library's streams.
  bool callers_tell() const { return !own_.arena; }
  double *shares() const { return shares_; }  // one per rank that holds slots
  // Computes the norm. The share must be written on the caller's stream; if callers exchange shares, those of all ranks
  // must be there.
  void find(double max_norm, device::Stream &caller);
  // Orders later work on the stream after the norm; that work may read the factor.
  void await(device::Stream &caller);
  const float *factor() const { return &norm_->factor; }
  // Blocks the calling thread until the norm is there.
  const device::Norm &read() const;

 private:
  device::Stream &gather(device::Stream &caller);

  Runtime &runtime_;
  double *squares_, *share_, *shares_;
  device::Norm *norm_;   // the norm on the device
  device::Norm *copy_;   // its copy for the host
  transport::Part own_;  // this rank's share, for all inner ranks
};

}  // namespace fsdp::engine
