// SPDX-License-Identifier: Apache-2.0
// Replays of graphs that are enqueued on the GPU and have not ended. The caller launches a graph, so no communicator
// knows of its collectives. If a peer never launches, a collective waits for it forever, and no thread watches that
// wait. Therefore each call that synchronizes with peers or waits for the GPU checks the replays. Its wait then ends
// with an error that names the replay.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/context/context.h"

namespace fsdp::engine {

class Replays final : public Unsettled {
 public:
  explicit Replays(Context &context) : context_(context) { context.flight_log().add_unsettled(this); }
  ~Replays() override { context_.flight_log().remove_unsettled(this); }
  Replays(const Replays &) = delete;
  Replays &operator=(const Replays &) = delete;

  void set_flights(trace::FlightSequence flights) { flights_.emplace(flights); }
  // Makes the events, which cannot be made while the caller captures. Must be called first, and only on a device.
  void make_room();
  // The number of replays that are kept is fixed. If more are under way, the caller waits for the oldest, for a bounded
  // time.
  void await_room();
  // Orders later work on the stream after the work that was prepared for a replay that was given up.
  void join(device::Stream &caller) const;
  // Orders later work on the stream after the last graph that was launched.
  void join_last(device::Stream &stream) const;
  // prepare() is called when all work before the graph is enqueued on the stream, and commit() when the graph is, too.
  void prepare(uint32_t capture, const char *name, device::Stream &caller);
  void commit(device::Stream &caller);
  // Throws TIMEOUT, which fails the context and is told to peers, if the GPU has worked on the oldest replay for the
  // whole timeout.
  void check();
  // Describes the oldest replay that the GPU has reached; empty if there is none.
  std::string describe_oldest();
  void settle() noexcept override;

 private:
  static constexpr uint64_t most = 64;
  using Clock = std::chrono::steady_clock;
  struct Replay {
    std::unique_ptr<device::Event> begun, ended;
    uint32_t capture = 0;
    const char *name = nullptr;  // the flight recorder's copy
    uint64_t handle = 0;         // handle in the flight recorder
  };
  Replay &at(uint64_t number) { return replays_[number % most]; }
  const Replay &at(uint64_t number) const { return replays_[number % most]; }
  void complete() noexcept;
  bool at_oldest() noexcept;

  Context &context_;
  std::optional<trace::FlightSequence> flights_;
  std::mutex mutex_;
  std::array<Replay, most> replays_;
  uint64_t oldest_ = 0, next_ = 0;  // replays from oldest_ up to next_ are under way; next_ is being prepared
  uint64_t seen_ = UINT64_MAX;      // the last replay on which the GPU was seen to work
  Clock::time_point since_;         // when the GPU was first seen to work on that replay
};

}  // namespace fsdp::engine
