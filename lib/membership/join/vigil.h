// SPDX-License-Identifier: Apache-2.0
// From the moment a rank joins until all have met, the connections by which the ranks have joined stay open: rank 0
// hears who dies or gives up, and tells all others whom; they see whether rank 0 lives, and those between. What ranks
// watch each other with afterwards does not exist yet, or not everywhere.
//
// Looked at by the waits of the caller's thread, as its Waiter's duty. If the job does not form, rank 0's word is what
// all ranks report.
#pragma once

#include <chrono>
#include <string>

#include "base/failure.h"
#include "membership/join/message.h"
#include "membership/verdict.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

// One that ends without finish tells the others that this rank gives up, if settle has not said why.
class Vigil : public Duty {
 public:
  virtual ~Vigil() = default;
  // All have met, and watch each other.
  virtual void finish() noexcept = 0;
};

namespace vigil {

using namespace std::chrono_literals;

constexpr auto look_period = 5ms;
constexpr auto grace = 60ms;         // for what ends at the same time
constexpr auto doubt = 300ms;        // for the end of a peer to be seen by rank 0, when another rank has felt it
constexpr auto answer_time = 600ms;  // for rank 0's word after a report
constexpr auto farewell = 200ms;
constexpr auto lateness = 700ms;  // beyond the deadline: waits with a limit of their own name who is late

// A peer is to blame, or the link to it, but perhaps only because of another one that rank 0 knows of.
bool blames_others(const Error &error, uint32_t rank);
// Nothing that peers did: what this rank reports whatever they say.
bool is_own(const Error &error, uint32_t rank);
Error late(std::chrono::steady_clock::time_point deadline);
// What was queued goes out, if the other end takes it soon.
void flush_soon(FrameStream &stream, std::chrono::steady_clock::time_point end) noexcept;
void give_up(Vigil &vigil) noexcept;

}  // namespace vigil

// With these codes of a FrameStream its other end's host is silent: nobody's process is to blame.
bool host_is_silent(int code) noexcept;
Error lost_contact(const std::string &one, const std::string &other);
// EBADMSG: so is none whose words somebody changed on their way.
Error changed_contact(const std::string &one, const std::string &other, const std::string &problem);

// What a rank tells the others of an error that ends its forming: one of its own is its failure.
message::Refusal report_of(const Error &error, uint32_t rank);
// What such a word says. A peer wrote it.
Error error_of(const message::Refusal &word, uint32_t world_size);

}  // namespace fsdp::membership
