// SPDX-License-Identifier: Apache-2.0
// Replays of graphs that the GPU was given and has not ended. The graph is the caller's launch, so no communicator
// knows of its collectives, and one that waits for a peer which never launched would wait for ever. No thread watches
// from outside: each call that meets peers or waits for the GPU looks here, so that those waits end and say which
// replay is the reason.
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
  // Events, which cannot be made once the caller captures. Before anything else, of a device alone.
  void make_room();
  // As many are kept. With more under way the caller waits for the oldest: bounded.
  void await_room();
  // What follows on the stream comes after what was prepared for a replay that was given up.
  void join(device::Stream &caller) const;
  // ... and this after the last graph that was launched.
  void join_last(device::Stream &stream) const;
  // The stream has been given all that comes before the graph; then the graph.
  void prepare(uint32_t capture, const char *name, device::Stream &caller);
  void commit(device::Stream &caller);
  // TIMEOUT, which fails the context and is told to peers, if the GPU has been at the oldest for the timeout.
  void check();
  // The oldest that the GPU has come to, as text; empty if there is none.
  std::string describe_oldest();
  void settle() noexcept override;

 private:
  static constexpr uint64_t most = 64;
  using Clock = std::chrono::steady_clock;
  struct Replay {
    std::unique_ptr<device::Event> begun, ended;
    uint32_t capture = 0;
    const char *name = nullptr;  // the flight recorder's copy
    uint64_t handle = 0;         // in the flight recorder
  };
  Replay &at(uint64_t number) { return replays_[number % most]; }
  const Replay &at(uint64_t number) const { return replays_[number % most]; }
  void complete() noexcept;
  bool at_oldest() noexcept;

  Context &context_;
  std::optional<trace::FlightSequence> flights_;
  std::mutex mutex_;
  std::array<Replay, most> replays_;
  uint64_t oldest_ = 0, next_ = 0;  // those between are under way; the next is being prepared
  uint64_t seen_ = UINT64_MAX;      // the GPU was seen at this one
  Clock::time_point since_;         // ... first then
};

}  // namespace fsdp::engine
