// SPDX-License-Identifier: Apache-2.0
// Meetings, in which the ranks of a model agree. All ranks meet in each call that ends a step, publishes, discards,
// captures or replays. Each rank states why it came and what it lacks. Usually all statements are the same, and equal
// hashes show that. Otherwise every rank gets all statements, so all ranks come to the same verdict and text.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "engine/runtime/runtime.h"
#include "engine/runtime/step.h"
#include "transport/team.h"

namespace fsdp::engine {

// A rank's statement in a meeting: why it came, and what it lacks.

enum class Intent : uint32_t { finish = 1, update, publish, step, discard, capture, replay, collect, give_back };

struct Meeting {
  Intent intent = Intent::finish;
  uint32_t sound = 1;   // the numbers can be compared; 0: `missing` says what this rank lacks
  int64_t blamed = -1;  // the rank of the job that is the reason for `missing`; -1: this rank itself
  uint64_t version = 0;
  double value = 1;        // scale of finish_grads, or lr of a step or replay: must be the same on every rank
  uint64_t reduces = 0;    // number of contributions, of groups that reduce each one: must be the same on every rank
  uint64_t calls = 0;      // hash of the gathers and reduces since the last update, if these are messages
  uint64_t order = 0;      // hash of how gathers and reduces are interleaved with calls of other models: may differ
  uint64_t capture = 0;    // number of the capture under way or to be replayed; 0: none
  uint64_t trained = 0;    // hash of which parameters are trained: must be the same on every rank
  uint64_t given = 0;      // hash of which skippable parameters have a gradient: may differ
  uint64_t waited_ns = 0;  // time waited for peers at the end of a step before this meeting; 0: not known
  uint64_t flags = 0;      // flags of fsdp_finish_grads, or a hash of options: must be the same on every rank
  union {
    WireText<416> missing;
    StepNumbers numbers;
  };

  Meeting() noexcept : missing{} {}
};
static_assert(sizeof(Meeting) == 512 && std::is_trivially_copyable_v<Meeting>);

inline const char *intent_call(Intent intent) {
  switch (intent) {
    case Intent::finish: return "fsdp_finish_grads";
    case Intent::update: return "fsdp_begin_update";
    case Intent::publish: return "fsdp_publish_weights";
    case Intent::step: return "fsdp_step_adamw";
    case Intent::capture: return "fsdp_end_capture";
    case Intent::replay: return "fsdp_prepare_replay";
    case Intent::collect: return "fsdp_collect_matrices";
    case Intent::give_back: return "fsdp_return_matrices";
    default: return "fsdp_discard_step";
  }
}

// How the ranks' statements differ. All statements are compared with that of the team's first rank, so that all ranks
// report the same text.
struct Differences {
  std::string text;       // empty: there are no differences
  int32_t rank = -1;      // the lowest rank of the job that has the first difference in the text
  bool mismatch = false;  // true: ranks contradict each other; false: a rank lacks something or discards
  void add(uint32_t odd, const std::string &what);
};
// Did all ranks come for the same reason?
bool compare_intents(std::span<const Meeting> told, const transport::Team &team, Differences &found);
void list_missing(std::span<const Meeting> told, const transport::Team &team, Differences &found);
// Says how the callers on all ranks must go on.
std::string way_on(std::span<const Meeting> told);

class Meetings {
 public:
  explicit Meetings(Runtime &runtime);

  // This rank's arrival. `missing` says why this rank cannot do the call; if it is empty, the rank's numbers can be
  // compared.
  struct Arrival {
    Intent intent = Intent::finish;
    double value = 1;
    std::string missing = {};
    int32_t blamed = -1;  // the rank of the job that is the reason for `missing`; -1: this rank
    StepNumbers numbers = {};
    uint64_t reduces = 0;  // for a step that finishes: its number of reduces
    uint64_t given = 0;    // for a step that finishes: hash of which parameters have a gradient (given_grads.h)
    uint32_t capture = 0;  // number of the capture under way or to be replayed; 0: none
    uint64_t flags = 0;    // flags of fsdp_finish_grads, or a hash of the options of fsdp_collect_matrices
    bool again = false;    // true for the second meeting of one call: its wait is not measured
  };
  // meet() is collective over the model. Then check() throws the same error on all ranks if they came for different
  // reasons or one of them lacks something. The step has then failed.
  void meet(const Arrival &call);
  void check(Intent intent);
  // Throws MISMATCH, which fails the context, if ranks have published different numbers of times: they then hold
  // different weights.
  void check_versions();
  // Did all ranks come for this intent? meet_again() meets once more with the same statements, so that all ranks go on
  // together.
  bool all_came_for(Intent intent) const;
  void meet_again();
  // say_sound() tells the next meeting whether this rank's collectives can end by themselves. all_sound(): could the
  // collectives of all ranks, in the last meeting?
  void say_sound(bool sound) { meetings_.back().sound = sound; }
  bool all_sound() const;
  // In the last meeting: do all ranks that share two models interleave the calls of this model with those of the other
  // in the same order? Collective.
  bool models_are_in_one_order();
  // In the last meeting: do the same parameters have a gradient on every rank?
  bool all_gave_alike() const;
  uint64_t count() const { return count_; }              // number of meetings so far
  uint32_t captures() const { return captures_; }        // highest number of a capture that any rank has stated
  int32_t last_rank() const { return last_rank_; }       // rank that came last to the end of a step; -1: not known
  uint64_t last_lag_ns() const { return last_lag_ns_; }  // how long it came after the first rank
 private:
  // The statements of all ranks; a single one if all ranks have said the same.
  std::span<const Meeting> told() const {
    return ballot_.agreed() ? std::span(meetings_).last(1) : std::span(meetings_).first(meetings_.size() - 1);
  }
  void exchange();
  void note_lag();
  void compare_all(Intent intent);
  void compare_calls(Differences &found);
  void compare_orders(Differences &found);
  bool orders_differ() const;
  void compare(Differences &found);

  Runtime &runtime_;
  std::vector<Meeting> meetings_;  // one per rank, if they differ, and this rank's own at the end
  transport::Ballot ballot_;       // ballot of the last meeting
  uint64_t count_ = 0;
  uint32_t captures_ = 0;
  uint64_t waited_ns_ = 0;  // time waited for peers at the last end of a step; 0: not known
  int32_t last_rank_ = -1;
  uint64_t last_lag_ns_ = 0;
};

}  // namespace fsdp::engine
