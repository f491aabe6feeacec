// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other at the end of a step: why they came, and what they miss.
#pragma once

#include <cstdint>

namespace fsdp::engine {

enum class Intent : uint32_t { finish = 1, update, publish, step, discard, capture, replay };

struct Meeting {
  Intent intent = Intent::finish;
  uint32_t sound = 1;  // 0: `text` says what is missing
  uint64_t version = 0;
  double value = 1;  // the scale of finish_grads, the lr of a step or replay: must be the same on every rank
  uint64_t reduces = 0;  // contributions of this step that were to be reduced one by one: the same on every rank
  uint64_t calls = 0;    // a hash of the gathers and reduces since the last update, where these are messages
  uint64_t capture = 0;  // the number of the one under way, or to be replayed; 0: none
  char text[464] = {};
};
static_assert(sizeof(Meeting) == 512);

inline const char *intent_call(Intent intent) {
  switch (intent) {
    case Intent::finish: return "fsdp_finish_grads";
    case Intent::update: return "fsdp_begin_update";
    case Intent::publish: return "fsdp_publish_weights";
    case Intent::step: return "fsdp_step_adamw";
    case Intent::capture: return "fsdp_capture_end";
    case Intent::replay: return "fsdp_prepare_replay";
    default: return "fsdp_discard_step";
  }
}

}  // namespace fsdp::engine
