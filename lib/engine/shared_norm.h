// SPDX-License-Identifier: Apache-2.0
// The norm that all ranks of a model make of their shares, where it lies, and who waits for it.
//
//   share (each rank, on the caller's stream)  ->  shares of all slots  ->  norm and factor  ->  a copy for the host
//
// Between ranks of the host the shares travel in the meeting of the callers. Those of a device travel on the streams of
// the library, and nobody waits for them but what reads the norm: AdamW by the factor, or the host.
#pragma once

#include <vector>

#include "engine/runtime.h"

namespace fsdp::engine {

class SharedNorm {
 public:
  explicit SharedNorm(Runtime &runtime);

  // Who asks again reads the last norm no more: its share may be overwritten on the way.
  double *squares() const { return squares_; }  // one a parameter, for who adds up the share
  double *share() const { return share_; }
  // Do the shares of all travel in the meeting of the callers, who have them when they meet? Else by the library's
  // streams.
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
