// SPDX-License-Identifier: Apache-2.0
// Carries the chunks of calls from the device to slots of pinned memory, lets the host do what it does with each, and
// carries the results back: two streams of the device, one for each direction, and a lane of the host between them.
//
// What bounds the time of a call is its bytes over the link between host and device: each direction has its own copy
// engine and its own stream here, and the host only waits between the two, so both are busy at once. For that several
// chunks are under way:
//
//   down   | bring 4 | bring 5 |         |          the device's bytes into a slot
//   lane             | step 3  | step 4  |          every rank has brought its bytes of the chunk
//   up                         | take 3  | take 4   from the slots to the device, and sums there
//
// All is enqueued by the calling thread, each piece after those that it depends on: streams that share a hardware queue
// then wait in an order in which all of them come to an end. At most `ahead` chunks are under way; who enqueues more
// waits for the device, so that no queue of CUDA's ever fills up, where a wait would have no end and no timeout.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "transport/team.h"

namespace fsdp::transport::staging {

class Conveyor {
 public:
  static constexpr uint64_t slots = 4;
  static constexpr uint64_t ahead = 32;

  Conveyor(device::Device &device, const std::string &name);

  device::Stream &down() { return *down_; }
  device::Stream &up() { return *up_; }
  device::HostLane &lane() { return *lane_; }
  // Of the chunk that was last brought to the slot: its bytes are there; it has been taken.
  const device::Event &brought(uint64_t slot) const { return *brought_[slot]; }
  const device::Event &taken(uint64_t slot) const { return *taken_[slot]; }

  // What is on the stream comes before the next chunks. end: what follows on it comes after them, and after `done`.
  void begin(device::Stream &stream);
  void end(device::Stream &stream, device::Event &done);
  // What is brought from now on comes after what was taken so far.
  void turn();
  // One chunk, in this order. pace: before it is enqueued; chunk counts from 0 since all was idle.
  void pace(uint64_t chunk);
  void mark_brought(uint64_t slot) { down_->record(*brought_[slot]); }
  void mark_taken(uint64_t chunk);

 private:
  static constexpr uint64_t stride = ahead / 2;

  device::Device &device_;
  std::unique_ptr<device::Event> turn_;
  std::array<std::unique_ptr<device::Event>, slots> brought_, taken_;
  std::array<std::unique_ptr<device::Event>, 2> paces_;
  // Streams last, so that they end first: their work refers to the events, and to what the owner has beside this.
  std::unique_ptr<device::Stream> down_, up_;
  std::unique_ptr<device::HostLane> lane_;
};

// UNSUPPORTED on a stream that is being captured: before anything is recorded or given up.
void refuse_capture(const device::Stream &stream, const Fingerprint &call);

}  // namespace fsdp::transport::staging
