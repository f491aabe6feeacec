// SPDX-License-Identifier: Apache-2.0
// Numbers about a model that every rank which holds slots has some of (shares of a norm, amaxes), on a device: they
// travel on the streams of the library, and no thread waits for them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// of: what they are, for traces. event: reusable; between the two axes.
struct ValuesGather {
  Traced of;
  transport::Part from;  // each inner rank's piece
  std::byte *whole;      // all pieces, in the order of the ranks that hold slots
  uint64_t bytes;        // of a piece
  device::Event &event;
};

// Behind what the caller's stream was given. Returns the stream on which all of them are there.
device::Stream &gather_values(Runtime &runtime, const ValuesGather &gather, device::Stream &caller);

// Scales of parameters that have one each: made of the largest magnitude that any rank has of them. All are found at
// once, whenever weights are published.
//
//   amaxes (each rank, on the caller's stream)  ->  those of all ranks that hold slots  ->  scales and their inverses
//
// As shares of norms they travel in a meeting of the callers, or on the streams of the library (gather_values.h).

class SharedAmaxes {
 public:
  explicit SharedAmaxes(Runtime &runtime);

  // Of this rank; 0 for ever of a parameter that it has nothing of.
  float *own(uint64_t index) const { return own_ + index; }
  const float *scale(uint64_t index) const { return scales_ + index; }
  const float *inverse(uint64_t index) const { return inverses_ + index; }
  // Collective over the holders. This rank's were written on the caller's stream; what follows on that has the scales.
  void find_scales(device::Stream &caller);

 private:
  device::Stream &gather(uint64_t first, uint64_t count, device::Stream &caller);

  Runtime &runtime_;
  const uint64_t count_;
  float *own_, *all_, *scales_, *inverses_;
};

// The norm that all ranks of a model make of their shares, where it lies, and what waits for it.
//
//   share (each rank, on the caller's stream)  ->  shares of all slots  ->  norm and factor  ->  a copy for the host
//
// Between ranks of the host the shares travel in the meeting of the callers. Those of a device travel on the streams of
// the library, and only what reads the norm waits for them: AdamW by the factor, or the host.

class SharedNorm {
 public:
  explicit SharedNorm(Runtime &runtime);

  // Once a norm is asked for again, the last one cannot be read any more: its share may be overwritten on the way.
  double *squares() const { return squares_; }  // one a parameter, for the code that adds up the share
  double *share() const { return share_; }
  // True if the shares of all travel in the meeting of the callers, which have them when they meet. Else they travel on
  // the library's streams.
  bool callers_tell() const { return !own_.arena; }
  double *shares() const { return shares_; }  // one a rank that holds slots
  // The share is written on the caller's stream, and those of all ranks are there if callers tell them.
  void find(double max_norm, device::Stream &caller);
  // What follows on the stream comes after the norm. Then the factor may be read on it.
  void await(device::Stream &caller);
  const float *factor() const { return &norm_->factor; }
  // The calling thread waits.
  const device::Norm &read() const;

 private:
  device::Stream &gather(device::Stream &caller);

  Runtime &runtime_;
  double *squares_, *share_, *shares_;
  device::Norm *norm_;   // on the device
  device::Norm *copy_;   // ... and for the host
  transport::Part own_;  // this rank's share, for all inner ranks
};

}  // namespace fsdp::engine
