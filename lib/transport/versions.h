// SPDX-License-Identifier: Apache-2.0
// Who pulls from its peers' memory must know when it is written, and they when it has been read.
//
//   a rank     writes its parts   publish     await, pull ...      meets the others       writes its parts   publish
//              of version v                   all ranks' parts     its pulls have ended   of version v + 1
//
// That they are written is told here. That they have been read need not be: what is written next is agreed on, so all
// ranks meet in between, each when its own pulls have ended on its streams, and from then on nobody reads.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace fsdp::transport {

class Versions {
 public:
  virtual ~Versions() = default;
  // This rank's parts are those of the version, which is never less than the last one, when the writer has done what it
  // was given before. Peers know from now on that this rank's caller has done its part.
  virtual void publish(uint64_t version, device::Stream &writer) = 0;
  // Are those of all ranks? One acquire load a rank, no system call.
  virtual bool ready(uint64_t version) const noexcept = 0;
  // What follows on the reader comes after that. Threads that wait poll what they must, and the calling thread may do
  // so again if it was interrupted. what: for messages; it stays where it is until the stream has come by.
  virtual void await(uint64_t version, device::Stream &reader, const char *what) = 0;
};

}  // namespace fsdp::transport
