// SPDX-License-Identifier: Apache-2.0
// What messages between hosts look like. All hosts have the same byte order and the same version of the library, which
// the bootstrap has compared; nothing that a message says is trusted beyond that.
#pragma once

#include <cstdint>

#include "transport/call/fingerprint.h"

namespace fsdp::transport::messages {

enum class Kind : uint32_t {
  call = 1,  // this rank is in a collective; payload: its fingerprint. Its buffers are ready for the first chunks
  credit,    // it has summed the chunks before `chunk`: their places are free
  data,      // payload: one chunk
  ended,     // payload: Ended
  ask,       // what has the receiver's caller enqueued? chunk: when it was asked
  answer,    // chunk: of the question; bytes: RoundWords::ended.called
  greeting   // UCX's first message with a header, in either direction; see UcxTransport
};

enum class Stage : uint32_t { reduce, gather };

struct Header {
  uint32_t magic;
  Kind kind;
  uint32_t from;  // rank of the job
  Stage stage;
  uint64_t key;
  uint64_t round;
  uint64_t number;
  uint64_t chunk;
  uint64_t bytes;  // of data; of a chunk in a call
  uint64_t call;   // Fingerprint::hash of the collective that this is of
};
// The longest payload of a message that is no data.
constexpr uint64_t longest_control = sizeof(Fingerprint);
constexpr uint32_t header_magic = 0x66736406;

// RoundWords of a rank, and how far it had come when it wrote them.
struct EndWords {
  uint64_t last;
  uint64_t flags;
  uint64_t phase;
};
// The sender's own, and those of the rank that it ended for, if there is one: this message may overtake that rank's,
// and all ranks are to name the same cause.
struct Ended {
  EndWords own;
  uint64_t cause;  // place among the ranks
  EndWords of_cause;
};

}  // namespace fsdp::transport::messages
