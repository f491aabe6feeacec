// SPDX-License-Identifier: Apache-2.0
// The flight recorder of one context: its last calls and collectives, in two rings that are allocated once. It is
// always on, so an entry costs only a few stores and a reading of the clock: no lock, no allocation, no system call.
// Any thread may read at the same time; entries that are being written are left out.
//
// The thread inside the context writes the entries of calls and of enqueued collectives, one at a time. Streams only
// advance the state of a collective. The recorder keeps copies of texts (unless they are literals), because it
// may be read after models end.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "fsdp.h"
#include "trace/timeline.h"

namespace fsdp::trace {

enum class FlightState : uint8_t { enqueued = 1, started, completed, failed };

// The sequence to which a collective belongs. Collectives of one sequence have the same order on every rank.
enum class Sequence : uint8_t { values, meetings, reduces, gathers, params, outer, replays };

struct FlightCollective {
  const char *what = nullptr;    // such as "reduce_scatter", or the name of the call that exchanges
  const char *object = nullptr;  // a group's name, or NULL
  uint64_t elements = 0;         // bytes if dtype is 0
  fsdp_dtype dtype = 0;
  Sequence sequence = Sequence::values;
  uint16_t model = 0;
  uint32_t round = 0;
  uint32_t number = 0;  // position in the round
};

class FlightRecorder {
 public:
  static constexpr uint32_t default_capacity = 1024;
  static constexpr uint32_t max_capacity = uint32_t{1} << 20;

  // Each ring has half of the capacity, rounded up to a power of two.
  explicit FlightRecorder(uint32_t capacity);
  FlightRecorder(const FlightRecorder &) = delete;
  FlightRecorder &operator=(const FlightRecorder &) = delete;

  // enter() begins a call; its name must be a literal. set_object() names the object of the call, and leave() ends the
  // call.
  void enter(const char *call) noexcept {
    CallSlot &slot = calls_[next_call_ & mask_];
    slot.state.store(2 * next_call_ + 1, std::memory_order_relaxed);
    // The fields are released after the odd state, so a reader that sees a new field also sees that the state has
    // changed.
    slot.name.store(call, std::memory_order_release);
    slot.object.store(nullptr, std::memory_order_release);
    slot.waited_ns.store(0, std::memory_order_release);
    slot.begin_ns.store(coarse_ns(), std::memory_order_release);
    slot.outcome.store(pack(FlightState::started, 0, 0), std::memory_order_release);
    slot.state.store(2 * next_call_ + 2, std::memory_order_release);
    call_.store(++next_call_, std::memory_order_release);
    if (wait_what_.load(std::memory_order_relaxed))
      wait_what_.store(nullptr, std::memory_order_relaxed);  // a wait that ended by an error
  }
  void set_object(const char *object, fsdp_phase phase = 0) noexcept {
    CallSlot &slot = present();
    slot.object.store(object, std::memory_order_release);  // a reader of the pointer must also see the text
    slot.outcome.store(pack(FlightState::started, phase, 0), std::memory_order_release);
  }
  void leave() noexcept {
    std::atomic<uint64_t> &outcome = present().outcome;
    const auto phase = static_cast<fsdp_phase>(outcome.load(std::memory_order_relaxed) >> 8 & 0xff);
    outcome.store(pack(FlightState::completed, phase, 0), std::memory_order_release);
  }
  // Ends the call with an error. Has no effect if the call has already ended.
  void leave_failed(fsdp_status status) noexcept {
    const uint64_t count = call_.load(std::memory_order_acquire);
    if (!count) return;
    std::atomic<uint64_t> &outcome = calls_[(count - 1) & mask_].outcome;
    uint64_t before = outcome.load(std::memory_order_relaxed);
    if ((before & 0xff) != static_cast<uint64_t>(FlightState::started)) return;
    const uint64_t after = pack(FlightState::failed, static_cast<fsdp_phase>(before >> 8 & 0xff), status);
    outcome.compare_exchange_strong(before, after, std::memory_order_release, std::memory_order_relaxed);
  }

  // Notes that the caller waits; `what` must be a literal. A wait that ends by an error remains until the next call, to
  // show for what the caller waited.
  void begin_wait(const char *what, const char *object, uint64_t now) noexcept;
  void end_wait(uint64_t now) noexcept;

  // Returns the handle with which streams advance the collective. Only the thread inside the context may call this.
  uint64_t enqueue(const FlightCollective &collective) noexcept;
  void start(uint64_t handle) noexcept { advance(handle, FlightState::started); }
  void complete(uint64_t handle) noexcept { advance(handle, FlightState::completed); }
  void fail(uint64_t handle) noexcept { advance(handle, FlightState::failed); }

  // Returns a copy of the text that exists as long as the recorder.
  const char *keep(std::string_view text);
  // The arguments list the model's ranks, and the ranks on its two axes, as texts. `ranks` is empty if the model has
  // all ranks of the job; `inner` or `outer` is empty if the axis has all ranks of the model. Models of the same ranks
  // have the same numbers on all of these ranks. open_model() returns the number that names the model in entries.
  uint32_t count_models(const std::string &ranks) const;  // the number that the next model of these ranks will get
  uint16_t open_model(const std::string &ranks, const std::string &inner, const std::string &outer);
  // Opens the sequences of a further mesh of an open model; `mesh` is above 0.
  uint16_t open_mesh(uint16_t model, uint32_t mesh, const std::string &inner, const std::string &outer);

  struct FlightModel {
    uint32_t number = 0;  // number among the models of the same ranks
    std::string ranks, inner, outer;
    uint32_t mesh = 0;
  };
  struct FlightCall {
    uint64_t number = 0;
    const char *name = nullptr, *object = nullptr;
    uint64_t begin_ns = 0, waited_ns = 0;
    fsdp_phase phase = 0;
    FlightState state = FlightState::started;
    fsdp_status status = 0;
  };
  struct Collective : FlightCollective {
    uint64_t entry = 0;
    uint64_t call = 0;  // the number of the call that enqueued it
    FlightState state = FlightState::enqueued;
    uint64_t enqueued_ns = 0, started_ns = 0, ended_ns = 0;  // 0: not yet
  };
  struct Wait {
    const char *what = nullptr, *object = nullptr;  // `what` is NULL if the caller waits for nothing
    uint64_t since_ns = 0;
  };
  struct FlightSnapshot {
    std::vector<FlightCall> calls;
    std::vector<Collective> collectives;
    std::vector<FlightModel> models;
    uint64_t call_count = 0, collective_count = 0;  // numbers since the start, which include lost entries
    Wait wait;
  };
  FlightSnapshot read() const;

 private:
  // `state` is 2 n + 1 while entry n is being written to this slot, and 2 n + 2 once the entry is complete.
  struct alignas(64) CallSlot {
    std::atomic<uint64_t> state{0};
    std::atomic<const char *> name{}, object{};
    std::atomic<uint64_t> begin_ns{0}, waited_ns{0};
    std::atomic<uint64_t> outcome{0};  // state, phase << 8, status << 32
  };
  struct alignas(64) CollectiveSlot {
    std::atomic<uint64_t> state{0};
    std::atomic<const char *> what{}, object{};
    std::atomic<uint64_t> enqueued_ns{0};
    std::atomic<uint64_t> elements{0};
    std::atomic<uint64_t> place{0};  // round << 32 | number
    std::atomic<uint64_t> kind{0};   // call << 32 | model << 16 | sequence << 8 | dtype
    // started << 34 | ended << 4 | state. Both times are microseconds since the collective was enqueued. Each has 30
    // bits, which a longer time fills with its maximum.
    std::atomic<uint64_t> progress{0};
  };
  static_assert(sizeof(CallSlot) == 64 && sizeof(CollectiveSlot) == 64);

  static uint64_t coarse_ns() noexcept {
    timespec time;
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
  }
  static constexpr uint64_t pack(FlightState state, fsdp_phase phase, fsdp_status status) noexcept {
    return static_cast<uint64_t>(state) | static_cast<uint64_t>(phase & 0xff) << 8 |
           uint64_t{static_cast<uint32_t>(status)} << 32;
  }
  CallSlot &present() noexcept { return calls_[(next_call_ - 1) & mask_]; }
  void advance(uint64_t handle, FlightState state) noexcept;
  bool read_call(uint64_t number, FlightCall &call) const noexcept;
  bool read_collective(uint64_t number, Collective &collective) const noexcept;

  const uint64_t half_, mask_;  // number of entries of each ring (a power of two), and this number - 1
  std::unique_ptr<CallSlot[]> calls_;
  std::unique_ptr<CollectiveSlot[]> collectives_;
  uint64_t next_call_ = 0;  // used only by the thread inside the context
  std::atomic<uint64_t> call_{0};
  std::atomic<uint64_t> next_collective_{0};
  std::atomic<const char *> wait_what_{}, wait_object_{};
  std::atomic<uint64_t> wait_since_{0};
  mutable std::mutex mutex_;  // guards the members below
  uint32_t count_models_locked(const std::string &ranks) const;

  std::vector<FlightModel> models_;
  std::unordered_set<std::string> texts_;
};

// One ordered sequence of collectives in the flight recorder. All ranks give its collectives the same numbers, so that
// the entries of several ranks can be compared.

class FlightSequence {
 public:
  FlightSequence(FlightRecorder &flight, Sequence sequence, uint16_t model = 0) : flight_(flight) {
    next_.sequence = sequence;
    next_.model = model;
    next_.round = 1;
  }

  FlightRecorder &flight() noexcept { return flight_; }
  // Called when the caller enqueues the next collective. Returns the collective's handle in the recorder.
  uint64_t enqueue(const char *what, const char *object, uint64_t bytes) noexcept {
    FlightCollective of = next_;
    of.what = what;
    of.object = object;
    of.elements = bytes;
    ++next_.number;
    return flight_.enqueue(of);
  }
  void next_round() noexcept {
    ++next_.round;
    next_.number = 0;
  }

 private:
  FlightRecorder &flight_;
  FlightCollective next_;
};

// During this scope the caller's thread itself carries out a collective.
class FlightScope {
 public:
  FlightScope(FlightSequence &sequence, const char *what, uint64_t bytes, const char *object = nullptr) noexcept
      : flight_(sequence.flight()), handle_(sequence.enqueue(what, object, bytes)) {
    flight_.start(handle_);
  }
  ~FlightScope() {
    if (std::uncaught_exceptions() > exceptions_)
      flight_.fail(handle_);
    else
      flight_.complete(handle_);
  }
  FlightScope(const FlightScope &) = delete;
  FlightScope &operator=(const FlightScope &) = delete;

 private:
  FlightRecorder &flight_;
  uint64_t handle_;
  int exceptions_ = std::uncaught_exceptions();
};

// Formats the contents of a flight recorder as the file that fsdp-info flight reads: JSON with one entry per line.
// docs/guides/debugging-a-hang.md describes the file.

// The rank and process to which the record belongs. It has no secrets, and no arguments or variables of the process.
struct FlightOwner {
  uint32_t rank = 0, world_size = 1;
  std::optional<Error> error;  // the error that failed the context
};

std::string format_flight_record(const FlightRecorder::FlightSnapshot &snapshot, const FlightOwner &owner);

}  // namespace fsdp::trace
