// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other at the end of a step: why they came, and what they miss.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "engine/step_numbers.h"
#include "transport/team.h"

namespace fsdp::engine {

enum class Intent : uint32_t { finish = 1, update, publish, step, discard, capture, replay };

struct Meeting {
  Intent intent = Intent::finish;
  uint32_t sound = 1;   // the numbers can be compared; 0: `text` says what is missing
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
  char text[424] = {};     // of one that is sound: its numbers

  StepNumbers numbers() const {
    StepNumbers numbers;
    std::memcpy(&numbers, text, sizeof numbers);
    return numbers;
  }
  void put(const StepNumbers &numbers) { std::memcpy(text, &numbers, sizeof numbers); }
};
static_assert(sizeof(Meeting) == 512 && sizeof(StepNumbers) <= sizeof Meeting::text);
static_assert(std::is_trivially_copyable_v<StepNumbers>);

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

}  // namespace fsdp::engine
