// SPDX-License-Identifier: Apache-2.0
// Replays of graphs that the GPU was given and has not ended. The caller launches the graph, so no communicator knows
// of its collectives. A collective that waits for a peer which never launched would wait for ever, and no thread
// watches it. So each call that synchronizes with peers or waits for the GPU checks the replays. Its wait then ends and
// says which replay is the reason.
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
  // Makes events, which cannot be made once the caller captures. Called before anything else, and only on a device.
  void make_room();
  // A fixed number of replays is kept. If more are under way, the caller waits for the oldest, for a bounded time.
  void await_room();
  // Later work on the stream comes after the work that was prepared for a replay that was given up.
  void join(device::Stream &caller) const;
  // Later work on the stream comes after the last graph that was launched.
  void join_last(device::Stream &stream) const;
  // prepare(): the stream has been given all work before the graph. commit(): it has been given the graph.
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
  uint64_t seen_ = UINT64_MAX;      // the replay on which the GPU was last seen to work
  Clock::time_point since_;         // when it was first seen to work on that
};

}  // namespace fsdp::engine
