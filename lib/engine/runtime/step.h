// SPDX-License-Identifier: Apache-2.0
// The progress of a model's steps on this rank: the version of its weights, the update window, and why a step cannot go
// on. Every change is a transition below; no other code writes this state.
//
//   closed  --open_window-->  open  --raise_version, close_window-->  closed
//   closed or open  --fail-->  failed  --discard-->  closed, the version as it was
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

namespace fsdp::engine {

// The numbers that every rank passes to the calls of an update window, and that must be equal on all ranks. Each rank
// computes with its own numbers, so a difference would make the replicas of a weight drift apart unnoticed. The model's
// meetings compare these numbers.

enum class ScalingKind : uint64_t { none, scale, clip };

// One scaling of the main grads.
struct Scaling {
  ScalingKind kind = ScalingKind::none;
  double number = 0;  // the factor, or max_norm
  static constexpr double of_the_model = -1;
  double norm = 0;  // the norm that was clipped; differs if only some ranks passed a further mesh
  // Compares bits, except that all NaNs are equal.
  bool operator==(const Scaling &other) const;
};
// All scalings since the update window opened. The first ones are kept, and a hash shows whether any differs.
class Scalings {
 public:
  static constexpr uint64_t max_kept = 3;

  void add(const Scaling &scaling);
  void restart() { *this = {}; }
  uint64_t count() const { return count_; }
  uint64_t hash() const { return hash_ * 31 + count_; }  // for exchanges that have room only for a hash
  const Scaling &kept(uint64_t index) const { return first_[index]; }
  bool operator==(const Scalings &) const = default;

 private:
  uint64_t count_ = 0, hash_ = 0;
  std::array<Scaling, max_kept> first_;
};

struct StepNumbers {
  // The options of a step of AdamW, with defaults filled in.
  double beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
  uint64_t step = 0;
  // The max_norm of fsdp_apply_grads; -1: another call finishes the gradients.
  double max_norm = -1;
  uint64_t asks_norm = 0;
  Scalings scalings;
  uint64_t lr_scales = 0;  // hash of the lr_scales of all parameters
};
// Names each number of the rank that differs from the first rank's, with both values; empty if no number differs. The
// lr_scales are not compared here, because only their hash is known.
std::string describe_differences(uint32_t rank, const StepNumbers &given, uint32_t first, const StepNumbers &expected);
// The part of a step's state that calls in a graph change (capture.h).
struct StepState {
  uint64_t version = 0;
  bool version_ready = false;  // every rank is known to have published the version
  bool window_open = true;     // a sealed model starts in the update window
  bool window_has_grads = false;
  uint64_t adamw_step = 0;
  Scalings scalings;  // scalings of the main grads in this update window
};

class Step : private StepState {
 public:
  uint64_t version() const { return StepState::version; }
  bool version_ready() const { return StepState::version_ready; }
  bool window_open() const { return StepState::window_open; }
  bool window_has_grads() const { return StepState::window_has_grads; }
  uint64_t adamw_step() const { return StepState::adamw_step; }
  const Scalings &scalings() const { return StepState::scalings; }
  bool failed() const { return !failure_.empty(); }
  const std::string &failure() const { return failure_; }  // why this step can only be discarded; empty if it can go on
  uint64_t lr_scales() const { return lr_scales_; }
  uint64_t trained() const { return trained_; }

  // Called by finish_grads, with gradients, or by begin_update.
  void open_window(bool has_grads);
  void scaled(const Scaling &scaling) { StepState::scalings.add(scaling); }
  void stepped(uint64_t number) { StepState::adamw_step = number; }
  // Called when the compute weights of the next version are written. `ready`: every peer has published that version
  // already.
  uint64_t raise_version() { return ++StepState::version; }
  void close_window(bool ready);
  void see_version() { StepState::version_ready = true; }
  void fail(const std::string &why) { failure_ = why; }
  // Called when all ranks gave the step up: the weights are again those of the last published version.
  void discard();
  // Notes whether matrices are collected. Until they are returned, ranks must not meet for anything else.
  void set_collected(bool collected) { collected_ = collected; }
  bool collected() const { return collected_; }
  // Notes whether a pass over chunks of shards is under way. Until it ends, planes in the file are neither whole nor in
  // one place.
  void set_gives_chunks(bool gives_chunks) { gives_chunks_ = gives_chunks; }
  bool gives_chunks() const { return gives_chunks_; }
  void set_lr_scales(uint64_t hash) { lr_scales_ = hash; }
  void set_trained(uint64_t hash) { trained_ = hash; }

  // Each of these throws an error that names the expected call, and also requires that the step has not failed.
  void require_unfailed(const char *call) const;
  void require_weights(const char *call) const;      // also requires that the window is closed
  void require_window(const char *call) const;       // also requires that the window is open
  void require_no_matrices(const char *call) const;  // requires only that no matrices are collected
  void require_returned(const char *call) const;     // also requires that no chunks of shards are given
  void require_grads(const char *call) const;  // also requires an open window with the gradients of a finished step
  const StepState &state() const { return *this; }
  // For graphs: restores the state from before a capture, or moves to the state after a replay.
  void set_state(const StepState &state) { static_cast<StepState &>(*this) = state; }
  void set_failure(const std::string &failure) { failure_ = failure; }

 private:
  std::string failure_;
  bool collected_ = false;
  bool gives_chunks_ = false;
  uint64_t lr_scales_ = 0;  // hash of the lr_scales of all parameters
  uint64_t trained_ = 0;    // hash of which parameters are trained
};

}  // namespace fsdp::engine
