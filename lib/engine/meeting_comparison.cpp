// SPDX-License-Identifier: Apache-2.0
// What is said where ranks have met and differ. It follows from what all of them were told, and so is the same on all.
#include <algorithm>

#include "engine/lr_scales.h"
#include "engine/meetings.h"
#include "engine/trained.h"

namespace fsdp::engine {
namespace {

void append(std::string &text, const std::string &what) {
  if (!what.empty()) text += (text.empty() ? "" : "; ") + what;
}

std::string describe_capture(const Meeting &meeting) {
  if (meeting.capture == 0) return "is in no capture";
  const char *what = meeting.intent == Intent::replay ? "replayed" : "is in";
  return format_text("{} capture {}", what, meeting.capture);
}

// Of two that came for the same.
std::string compare_given(uint32_t rank, const Meeting &other, uint32_t first, const Meeting &of_first) {
  std::string text;
  if (other.value != of_first.value)
    text = format_text("rank {} gave {} {}, rank {} gave {}", rank, other.intent == Intent::finish ? "scale" : "lr",
                       other.value, first, of_first.value);
  if (other.flags != of_first.flags)
    append(text, format_text("rank {} gave fsdp_finish_grads FSDP_LAST, rank {} did not", other.flags ? rank : first,
                             other.flags ? first : rank));
  if (other.capture != of_first.capture)
    append(text,
           format_text("rank {} {}, rank {} {}", rank, describe_capture(other), first, describe_capture(of_first)));
  return text;
}

bool in_capture(const Meeting &meeting) { return meeting.capture != 0 && meeting.intent != Intent::replay; }

}  // namespace

void Differences::add(uint32_t odd, const std::string &what) {
  append(text, what);
  if (rank < 0) rank = static_cast<int32_t>(odd);
}

// Each call with the lowest rank that made it. A rank that discards contradicts nobody: it is the wrong moment, and the
// way on is the same.
bool compare_intents(std::span<const Meeting> told, const transport::Team &team, Differences &found) {
  const auto odd =
      std::find_if(told.begin(), told.end(), [&](const Meeting &one) { return one.intent != told[0].intent; });
  if (odd == told.end()) return true;
  std::vector<Intent> calls;
  std::string text;
  for (uint32_t r = 0; r < told.size(); ++r) {
    if (std::find(calls.begin(), calls.end(), told[r].intent) != calls.end()) continue;
    calls.push_back(told[r].intent);
    text +=
        format_text("{}rank {} called {}", text.empty() ? "" : ", ", team.world_rank(r), intent_call(told[r].intent));
  }
  found.add(team.world_rank(static_cast<uint32_t>(odd - told.begin())), text);
  if (std::count(calls.begin(), calls.end(), Intent::discard) + 1 < std::ssize(calls)) found.mismatch = true;
  return false;
}

void list_missing(std::span<const Meeting> told, const transport::Team &team, Differences &found) {
  for (uint32_t r = 0; r < told.size(); ++r)
    if (!told[r].sound)
      found.add(told[r].blamed < 0 ? team.world_rank(r) : static_cast<uint32_t>(told[r].blamed),
                format_text("rank {}: {}", team.world_rank(r), told[r].text));
}

// Before the first publish there is no step that could be discarded.
std::string way_on(std::span<const Meeting> told) {
  if (std::all_of(told.begin(), told.end(), in_capture))
    return "end the capture with fsdp_end_capture on every rank to go on";
  if (std::any_of(told.begin(), told.end(), in_capture))
    return "end the capture with fsdp_end_capture where there is one, and call fsdp_discard_step on every rank, to go "
           "on";
  if (std::all_of(told.begin(), told.end(), [](const Meeting &one) { return one.version == 0; }))
    return "make it the same on every rank and call fsdp_publish_weights again";
  return "call fsdp_discard_step on every rank to go on";
}

// The lowest rank that gave something else than the first, and all that it gave otherwise. Ranks that miss something
// have told that instead of their numbers. Replicas meet in the last reduce alone: nothing but the count of reduces
// tells that one had more micro-batches.
void Meetings::compare(Differences &found) {
  transport::Team &team = *runtime_.teams.all;
  const auto told = this->told();
  const auto sound = std::find_if(told.begin(), told.end(), [](const Meeting &one) { return one.sound != 0; });
  const auto base = static_cast<uint32_t>(sound - told.begin());
  const StepNumbers of_base = sound == told.end() ? StepNumbers() : sound->numbers();
  for (uint32_t r = 1; r < told.size(); ++r) {
    const uint32_t rank = team.world_rank(r);
    std::string text = compare_given(rank, told[r], team.world_rank(0), told[0]);
    if (told[r].trained != told[0].trained) append(text, compare_trained(runtime_.spec, team, 0, r));
    if (told[r].sound && r > base) {
      if (told[r].reduces != sound->reduces)
        append(text, format_text("rank {} reduced {} contributions of groups in this step, rank {} reduced {}", rank,
                                 told[r].reduces, team.world_rank(base), sound->reduces));
      const StepNumbers numbers = told[r].numbers();
      append(text, compare_numbers(rank, numbers, team.world_rank(base), of_base));
      if (numbers.lr_scales != of_base.lr_scales) append(text, compare_lr_scales(runtime_.spec, team, base, r));
    }
    if (text.empty()) continue;
    found.mismatch = true;
    return found.add(rank, text);
  }
}

}  // namespace fsdp::engine
