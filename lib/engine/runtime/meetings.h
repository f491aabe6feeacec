// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a model agree: what ends a step, publishes, discards, captures or replays makes all of them meet.
// Each says why it came and what it misses. In a run that goes well all say the same, which a hash tells; where they do
// not, each hears all of it, and so comes to the same verdict and the same words.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/runtime/runtime.h"
#include "engine/runtime/step.h"
#include "transport/team.h"

namespace fsdp::engine {

// What ranks tell each other at the end of a step: why they came, and what they miss.

enum class Intent : uint32_t { finish = 1, update, publish, step, discard, capture, replay };

struct Meeting {
  Intent intent = Intent::finish;
  uint32_t sound = 1;   // there are numbers to compare; 0: `missing` says what this rank lacks
  int64_t blamed = -1;  // ... and this rank of the job is why; -1: the rank that tells it
  uint64_t version = 0;
  double value = 1;        // the scale of finish_grads, the lr of a step or replay: must be the same on every rank
  uint64_t reduces = 0;    // contributions of this step that were to be reduced one by one: the same on every rank
  uint64_t calls = 0;      // a hash of the gathers and reduces since the last update, where these are messages
  uint64_t capture = 0;    // the number of the one under way, or to be replayed; 0: none
  uint64_t trained = 0;    // a hash of which parameters are trained: the same on every rank
  uint64_t given = 0;      // ... of which have a gradient, of those that are skipped without: may differ
  uint64_t waited_ns = 0;  // for peers, at the end of a step before this meeting; 0: nothing to tell
  uint64_t flags = 0;      // of fsdp_finish_grads: must be the same on every rank
  union {
    char missing[424];
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
    default: return "fsdp_discard_step";
  }
}

// How the ranks' meetings differ, in words that no rank sees with its own eyes: the first rank of the team is what
// others are measured by, so that all ranks report the same.
struct Differences {
  std::string text;       // empty: there are none
  int32_t rank = -1;      // of the job: the lowest one that differs, in what the text says first
  bool mismatch = false;  // ranks contradict each other; else one misses something or discards
  void add(uint32_t odd, const std::string &what);
};

// Did all come for the same?
bool compare_intents(std::span<const Meeting> told, const transport::Team &team, Differences &found);
void list_missing(std::span<const Meeting> told, const transport::Team &team, Differences &found);
// What the callers of all ranks do now.
std::string way_on(std::span<const Meeting> told);

class Meetings {
 public:
  explicit Meetings(Runtime &runtime);

  // What this rank comes with. missing: why it cannot do what it came for; empty: its numbers can be compared.
  struct Arrival {
    Intent intent = Intent::finish;
    double value = 1;
    std::string missing = {};
    int32_t blamed = -1;  // the rank of the job that is why; -1: this one
    StepNumbers numbers = {};
    uint64_t reduces = 0;  // of a step that finishes
    uint64_t given = 0;    // ... and a hash of which parameters have a gradient (given_grads.h)
    uint32_t capture = 0;  // the number of the one under way, or to be replayed; 0: none
    uint32_t flags = 0;    // of fsdp_finish_grads
  };
  // Collective over the model. Then check: throws the same on all ranks if they did not come for the same, or one of
  // them misses something; the step has failed then.
  void meet(const Arrival &call);
  void check(Intent intent);
  // MISMATCH, which fails the context: ranks that have published different numbers of times hold different weights.
  void check_versions();
  // Did all come for this? Once more with the same words, to pass what follows together.
  bool all_came_for(Intent intent) const;
  void meet_again();
  // Of the last one: is there a rank whose collectives cannot end by themselves?
  void say_sound(bool sound) { meetings_.back().sound = sound; }
  bool all_sound() const;

  // Of the last one: has every rank given the same parameters a gradient?
  bool all_gave_alike() const;

  uint64_t count() const { return count_; }              // so many were there
  uint32_t captures() const { return captures_; }        // the highest number that any rank has told of
  int32_t last_rank() const { return last_rank_; }       // the rank that came last to the end of a step, -1: not known
  uint64_t last_lag_ns() const { return last_lag_ns_; }  // ... and how long after the first

 private:
  // What all have told, which stands for itself where all have told the same.
  std::span<const Meeting> told() const {
    return ballot_.agreed() ? std::span(meetings_).last(1) : std::span(meetings_).first(meetings_.size() - 1);
  }
  void exchange();
  void note_lag();
  void compare_calls(Differences &found);
  void compare(Differences &found);

  Runtime &runtime_;
  std::vector<Meeting> meetings_;  // one a rank, where they differ, and this rank's own at the end
  transport::Ballot ballot_;       // of the last one
  uint64_t count_ = 0;
  uint32_t captures_ = 0;
  uint64_t waited_ns_ = 0;  // for peers at the last end of a step, which the next meeting tells; 0: nothing to tell
  int32_t last_rank_ = -1;
  uint64_t last_lag_ns_ = 0;
};

}  // namespace fsdp::engine
