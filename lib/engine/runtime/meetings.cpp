// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/meetings.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/runtime/call_order.h"
#include "engine/runtime/param_settings.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp::engine {
namespace {

// The hash of all numbers that must be the same on all ranks.
uint64_t hash(Meeting meeting) {
  meeting.waited_ns = 0;
  return XXH3_64bits(&meeting, sizeof meeting);
}

}  // namespace

Meetings::Meetings(Runtime &runtime) : runtime_(runtime), meetings_(runtime.team().size() + 1) {}

void Meetings::meet(const Arrival &call) {
  runtime_.replays.check();
  Meeting &mine = meetings_.back();
  mine = {};
  mine.intent = call.intent;
  mine.sound = call.missing.empty();
  mine.blamed = call.blamed;
  mine.version = runtime_.step.version();
  mine.value = call.value;
  mine.reduces = call.reduces;
  mine.trained = runtime_.step.trained();
  mine.given = call.given;
  mine.calls = runtime_.calls.hash();
  mine.order = runtime_.model_calls ? runtime_.model_calls->hash() : 0;
  mine.capture = call.capture;
  mine.flags = call.flags;
  mine.waited_ns = std::exchange(waited_ns_, 0);
  StepNumbers numbers = call.numbers;
  numbers.scalings = runtime_.step.scalings();
  numbers.lr_scales = runtime_.step.lr_scales();
  if (mine.sound)
    std::construct_at(&mine.numbers, numbers);
  else
    mine.missing.set(call.missing);
  runtime_.gathers.trace->settle();
  for (const CollectiveStream &stream : runtime_.reduces) stream.trace->settle();
  const trace::FlightScope flight(*runtime_.flights.meetings, intent_call(call.intent), 0);
  const uint64_t came = trace::now_ns();
  exchange();
  if (call.intent == Intent::finish && !call.again) waited_ns_ = std::max<uint64_t>(1, trace::now_ns() - came);
  note_lag();
  ++count_;
  // Captures are counted here, because all ranks get the same statements. A capture that could not begin on this rank
  // counts, too.
  for (const Meeting &one : told()) captures_ = std::max(captures_, static_cast<uint32_t>(one.capture));
}

// The exchange has the same name for all intents. The statements themselves tell which rank called what.
void Meetings::exchange() {
  const WaitSpan span(runtime_, WaitKind::peers);
  constexpr auto what = "the end of a step";
  const Meeting &mine = meetings_.back();
  ballot_ = runtime_.team().agree({.same = hash(mine), .troubled = mine.sound == 0, .waited_ns = mine.waited_ns}, what);
  if (!ballot_.agreed()) runtime_.team().all_gather(&mine, sizeof mine, meetings_.data(), what);
}

void Meetings::meet_again() { exchange(); }

bool Meetings::all_came_for(Intent intent) const {
  return std::ranges::all_of(told(), [&](const Meeting &one) { return one.intent == intent; });
}

bool Meetings::all_sound() const {
  return std::ranges::all_of(told(), [](const Meeting &one) { return one.sound != 0; });
}

bool Meetings::all_gave_alike() const {
  return std::ranges::all_of(told(), [&](const Meeting &one) { return one.given == told().front().given; });
}

// Clocks of hosts differ, so ranks state how long they have waited. The rank that waited least came last.
void Meetings::note_lag() {
  const transport::Team &team = runtime_.team();
  if (team.size() < 2 || ballot_.least_waited_ns == 0) return;
  last_rank_ = static_cast<int32_t>(team.world_rank(ballot_.last));
  last_lag_ns_ = ballot_.max_waited_ns - ballot_.least_waited_ns;
}

void Meetings::check(Intent intent) {
  if (!ballot_.agreed()) compare_all(intent);
  if (runtime_.model_calls) runtime_.model_calls->settle();
}

void Meetings::compare_all(Intent intent) {
  const auto all = told();
  const transport::Team &team = runtime_.team();
  Differences found;
  compare_calls(found);
  if (found.text.empty()) compare_orders(found);
  const bool same_intent = compare_intents(all, team, found), all_came = found.text.empty();
  if (same_intent) compare(found);
  list_missing(all, team, found);
  if (found.text.empty()) return check_versions();
  const fsdp_status status = found.mismatch ? FSDP_MISMATCH : FSDP_INVALID_STATE;
  const uint32_t model = runtime_.number();
  // No rank has done any work of the capture yet.
  if (all_came && intent == Intent::capture)
    fail_rank(status, found.rank, "{}: model {}: the graph is of no use, and the model is as before it: {}",
              intent_call(intent), model, found.text);
  if (all_came && intent == Intent::replay)
    fail_rank(status, found.rank, "{}: model {}: the graph must not be launched, and the model is as before: {}",
              intent_call(intent), model, found.text);
  if (runtime_.step.version()) runtime_.step.fail(found.text);
  const bool ends = intent != Intent::collect && intent != Intent::give_back;
  fail_rank(status, found.rank, "{}model {}: {}{}; {}",
            same_intent ? format_text("{}: ", intent_call(intent)) : std::string(), model,
            ends ? "the step cannot end: " : "", found.text, way_on(all));
}

void Meetings::check_versions() {
  if (ballot_.agreed()) return;
  const transport::Team &team = runtime_.team();
  for (uint32_t r = 1; r < team.size(); ++r) {
    if (meetings_[r].version == meetings_[0].version) continue;
    const Error error(FSDP_MISMATCH,
                      format_text("model {}: rank {} has published {} times, rank {} {} times", runtime_.number(),
                                  team.world_rank(r), meetings_[r].version, team.world_rank(0), meetings_[0].version),
                      static_cast<int32_t>(team.world_rank(r)));
    runtime_.context.failure().set(error);
    throw error;
  }
}

}  // namespace fsdp::engine

namespace fsdp::engine {

// The error text if ranks have met and differ. It is made only from the statements of all ranks, so it is the same on
// all of them.

namespace {

void append(std::string &text, const std::string &what) {
  if (!what.empty()) text += (text.empty() ? "" : "; ") + what;
}

std::string describe_capture(const Meeting &meeting) {
  if (meeting.capture == 0) return "is in no capture";
  const char *what = meeting.intent == Intent::replay ? "replayed" : "is in";
  return format_text("{} capture {}", what, meeting.capture);
}

// Compares the arguments of two ranks for the same call.
std::string compare_given(uint32_t rank, const Meeting &other, uint32_t first, const Meeting &of_first) {
  std::string text;
  if (other.value != of_first.value)
    text = format_text("rank {} gave {} {}, rank {} gave {}", rank, other.intent == Intent::finish ? "scale" : "lr",
                       other.value, first, of_first.value);
  if (other.flags != of_first.flags && other.intent == Intent::collect)
    append(text, format_text("ranks {} and {} gave another source, target or dtype", first, rank));
  else if (other.flags != of_first.flags)
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

// Names each call with the lowest rank that made it. If a rank discards, other calls only came at the wrong moment, and
// the advice is the same.
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
                format_text("rank {}: {}", team.world_rank(r), told[r].missing.view()));
}

// Advises how to go on. Before the first publish there is no step to discard.
std::string way_on(std::span<const Meeting> told) {
  if (std::all_of(told.begin(), told.end(), in_capture))
    return "end the capture with fsdp_end_capture on every rank to go on";
  if (std::any_of(told.begin(), told.end(), in_capture))
    return "end the capture with fsdp_end_capture where there is one, and call fsdp_discard_step on every rank, to go "
           "on";
  if (std::all_of(told.begin(), told.end(), [](const Meeting &one) { return one.version == 0; }))
    return format_text("make it the same on every rank and call {} again",
                       intent_call(told[0].intent == Intent::collect ? Intent::collect : Intent::publish));
  return "call fsdp_discard_step on every rank to go on";
}

// Finds the lowest rank with numbers that differ from the first rank's, and lists all of its differences. Ranks that
// lack something have stated that instead of their numbers. Replicas meet only in the last reduce, so only the count of
// reduces shows that one of them had more micro-batches.
void Meetings::compare(Differences &found) {
  transport::Team &team = runtime_.team();
  const auto told = this->told();
  const auto sound = std::find_if(told.begin(), told.end(), [](const Meeting &one) { return one.sound != 0; });
  const auto base = static_cast<uint32_t>(sound - told.begin());
  const StepNumbers of_base = sound == told.end() ? StepNumbers() : sound->numbers;
  for (uint32_t r = 1; r < told.size(); ++r) {
    const uint32_t rank = team.world_rank(r);
    std::string text = compare_given(rank, told[r], team.world_rank(0), told[0]);
    if (told[r].trained != told[0].trained) append(text, compare_trained(runtime_.spec, team, 0, r));
    if (told[r].sound && r > base) {
      if (told[r].reduces != sound->reduces)
        append(text, format_text("rank {} reduced {} contributions of groups in this step, rank {} reduced {}", rank,
                                 told[r].reduces, team.world_rank(base), sound->reduces));
      const StepNumbers numbers = told[r].numbers;
      append(text, describe_differences(rank, numbers, team.world_rank(base), of_base));
      if (numbers.lr_scales != of_base.lr_scales) append(text, compare_lr_scales(runtime_.spec, team, base, r));
    }
    if (text.empty()) continue;
    found.mismatch = true;
    return found.add(rank, text);
  }
}

// Finds the first call that differs if ranks have met and their sequences of gathers and reduces, as messages, are not
// the same.

namespace {

// Packs the bytes to send: the number of calls, then the calls that were kept.
std::vector<std::byte> pack(const CallSequence &sequence) {
  const uint64_t count = sequence.count();
  std::vector<std::byte> bytes(sizeof count + sequence.calls().size_bytes());
  std::memcpy(bytes.data(), &count, sizeof count);
  if (!sequence.calls().empty())
    std::memcpy(bytes.data() + sizeof count, sequence.calls().data(), sequence.calls().size_bytes());
  return bytes;
}

struct Calls {
  uint64_t count = 0;
  std::vector<SequencedCall> kept;

  explicit Calls(std::span<const std::byte> bytes)
      : kept(bytes.size() > sizeof count ? (bytes.size() - sizeof count) / sizeof(SequencedCall) : 0) {
    if (bytes.size() >= sizeof count) std::memcpy(&count, bytes.data(), sizeof count);
    if (!kept.empty()) std::memcpy(kept.data(), bytes.data() + sizeof count, kept.size() * sizeof(SequencedCall));
  }
};

std::string describe(const Runtime &state, const Calls &calls, size_t index) {
  if (index >= calls.kept.size()) return calls.count > calls.kept.size() ? "something later" : "nothing more";
  return describe_call(state, calls.kept[index]);
}

std::string describe_difference(const Runtime &state, uint32_t a, const Calls &of_a, uint32_t b, const Calls &of_b) {
  const size_t both = std::min(of_a.kept.size(), of_b.kept.size());
  const auto same = static_cast<size_t>(
      std::mismatch(of_a.kept.begin(), of_a.kept.begin() + static_cast<ptrdiff_t>(both), of_b.kept.begin()).first -
      of_a.kept.begin());
  return format_text(
      "ranks gathered and reduced different things since the last update: as number {}, rank {} {}, rank {} {} "
      "({} and {} calls in all)",
      same + 1, state.team().world_rank(a), describe(state, of_a, same), state.team().world_rank(b),
      describe(state, of_b, same), of_a.count, of_b.count);
}

}  // namespace

// Ranks of one inner axis exchange messages with each other; if groups have several meshes, all ranks do. Every rank
// knows whether any ranks differ, so all ranks come to the exchange.
void Meetings::compare_calls(Differences &found) {
  const Runtime &state = runtime_;
  const uint32_t size = state.team().size();
  uint32_t odd = 0;  // the lowest rank that differs; 0 if none does, as rank 0 is the first of its axis
  for (uint32_t r = 0; r < size; ++r) {
    if (meetings_[r].intent == Intent::discard) return;
    if (odd == 0 && meetings_[r].calls != meetings_[state.first_compared(r)].calls) odd = r;
  }
  if (odd == 0) return;
  const std::vector<std::byte> mine = pack(state.calls);
  const auto all = state.team().all_gather(mine, "gathers and reduces that differ");
  const uint32_t first = state.first_compared(odd);
  found.mismatch = true;
  found.add(state.team().world_rank(odd), describe_difference(state, first, Calls(all[first]), odd, Calls(all[odd])));
}

// A quick check by hashes. It may also be true for ranks with different other models, which are legal;
// find_order_difference() decides.
bool Meetings::orders_differ() const {
  const std::span<const Meeting> all = told();
  for (uint32_t r = 0; r < all.size(); ++r)
    if (all[r].order != all[runtime_.first_compared(r)].order) return true;
  return false;
}

void Meetings::compare_orders(Differences &found) {
  if (std::ranges::any_of(told(), [](const Meeting &one) { return one.intent == Intent::discard; })) return;
  if (!orders_differ()) return;
  const auto difference = find_order_difference(runtime_);
  if (!difference) return;
  found.mismatch = true;
  found.add(runtime_.team().world_rank(difference->odd), describe_order_difference(runtime_, *difference));
}

bool Meetings::models_are_in_one_order() { return !orders_differ() || !find_order_difference(runtime_); }

}  // namespace fsdp::engine
