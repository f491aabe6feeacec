// SPDX-License-Identifier: Apache-2.0

#include "trace/flight.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <ctime>
#include <iterator>

#include "base/dtype.h"
#include "base/text.h"

namespace fsdp::trace {

namespace {

constexpr uint64_t max_us = (uint64_t{1} << 30) - 1;

// Never returns 0, which means "not yet".
uint64_t microseconds(uint64_t from, uint64_t to) {
  return std::clamp<uint64_t>(to > from ? (to - from) / 1000 : 0, 1, max_us);
}

}  // namespace

// The slots are value-initialized, so that every page is touched now and not by an entry.
FlightRecorder::FlightRecorder(uint32_t capacity)
    : half_(std::bit_ceil(std::max<uint64_t>(capacity / 2, 1))),
      mask_(half_ - 1),
      calls_(std::make_unique<CallSlot[]>(half_)),
      collectives_(std::make_unique<CollectiveSlot[]>(half_)) {}

void FlightRecorder::begin_wait(const char *what, const char *object, uint64_t now) noexcept {
  wait_since_.store(now, std::memory_order_relaxed);
  wait_object_.store(object, std::memory_order_release);  // a reader of the pointer must also see the text
  wait_what_.store(what, std::memory_order_release);
}

void FlightRecorder::end_wait(uint64_t now) noexcept {
  wait_what_.store(nullptr, std::memory_order_release);
  if (!next_call_) return;
  CallSlot &slot = present();
  const uint64_t waited = now - wait_since_.load(std::memory_order_relaxed);
  slot.waited_ns.store(slot.waited_ns.load(std::memory_order_relaxed) + waited, std::memory_order_relaxed);
}

uint64_t FlightRecorder::enqueue(const FlightCollective &of) noexcept {
  const uint64_t number = next_collective_.load(std::memory_order_relaxed);
  CollectiveSlot &slot = collectives_[number & mask_];
  slot.state.store(2 * number + 1, std::memory_order_relaxed);
  // The fields are released one by one, as in enter().
  slot.what.store(of.what, std::memory_order_release);
  slot.object.store(of.object, std::memory_order_release);
  slot.enqueued_ns.store(now_ns(), std::memory_order_release);
  slot.elements.store(of.elements, std::memory_order_release);
  slot.place.store(uint64_t{of.round} << 32 | of.number, std::memory_order_release);
  slot.kind.store((next_call_ - 1) << 32 | uint64_t{of.model} << 16 | static_cast<uint64_t>(of.sequence) << 8 |
                      static_cast<uint64_t>(of.dtype & 0xff),
                  std::memory_order_release);
  slot.progress.store(static_cast<uint64_t>(FlightState::enqueued), std::memory_order_release);
  slot.state.store(2 * number + 2, std::memory_order_release);
  next_collective_.store(number + 1, std::memory_order_release);
  return number;
}

// An entry that has been overwritten is not changed. Only its stream advances an entry. If the caller overwrites the
// entry during this call, the new entry may at worst lose its first state.
void FlightRecorder::advance(uint64_t handle, FlightState state) noexcept {
  CollectiveSlot &slot = collectives_[handle & mask_];
  if (slot.state.load(std::memory_order_acquire) != 2 * handle + 2) return;
  uint64_t progress = slot.progress.load(std::memory_order_relaxed);
  const uint64_t us = microseconds(slot.enqueued_ns.load(std::memory_order_relaxed), now_ns());
  const uint64_t started = state == FlightState::started ? us : progress >> 34;
  const uint64_t ended = state == FlightState::started ? 0 : us;
  slot.progress.compare_exchange_strong(progress, started << 34 | ended << 4 | static_cast<uint64_t>(state),
                                        std::memory_order_release, std::memory_order_relaxed);
}

const char *FlightRecorder::keep(std::string_view text) {
  const std::lock_guard lock(mutex_);
  return texts_.emplace(text).first->c_str();
}

uint32_t FlightRecorder::count_models(const std::string &ranks) const {
  const std::lock_guard lock(mutex_);
  return count_models_locked(ranks);
}

uint32_t FlightRecorder::count_models_locked(const std::string &ranks) const {
  return static_cast<uint32_t>(std::ranges::count_if(
      models_, [&](const FlightModel &model) { return model.mesh == 0 && model.ranks == ranks; }));
}

uint16_t FlightRecorder::open_model(const std::string &ranks, const std::string &inner, const std::string &outer) {
  const std::lock_guard lock(mutex_);
  models_.push_back({count_models_locked(ranks), ranks, inner, outer});
  return static_cast<uint16_t>(models_.size() - 1);
}

uint16_t FlightRecorder::open_mesh(uint16_t model, uint32_t mesh, const std::string &inner, const std::string &outer) {
  const std::lock_guard lock(mutex_);
  const FlightModel of = models_[model];
  models_.push_back({of.number, of.ranks, inner, outer, mesh});
  return static_cast<uint16_t>(models_.size() - 1);
}

bool FlightRecorder::read_call(uint64_t number, FlightCall &call) const noexcept {
  const CallSlot &slot = calls_[number & mask_];
  if (slot.state.load(std::memory_order_acquire) != 2 * number + 2) return false;
  call.number = number;
  call.name = slot.name.load(std::memory_order_acquire);
  call.object = slot.object.load(std::memory_order_acquire);
  call.begin_ns = slot.begin_ns.load(std::memory_order_acquire);
  call.waited_ns = slot.waited_ns.load(std::memory_order_acquire);
  const uint64_t outcome = slot.outcome.load(std::memory_order_acquire);
  call.state = static_cast<FlightState>(outcome & 0xff);
  call.phase = static_cast<fsdp_phase>(outcome >> 8 & 0xff);
  call.status = static_cast<fsdp_status>(outcome >> 32);
  return slot.state.load(std::memory_order_relaxed) == 2 * number + 2;
}

bool FlightRecorder::read_collective(uint64_t number, Collective &collective) const noexcept {
  const CollectiveSlot &slot = collectives_[number & mask_];
  if (slot.state.load(std::memory_order_acquire) != 2 * number + 2) return false;
  collective.entry = number;
  collective.what = slot.what.load(std::memory_order_acquire);
  collective.object = slot.object.load(std::memory_order_acquire);
  collective.enqueued_ns = slot.enqueued_ns.load(std::memory_order_acquire);
  collective.elements = slot.elements.load(std::memory_order_acquire);
  const uint64_t place = slot.place.load(std::memory_order_acquire);
  const uint64_t kind = slot.kind.load(std::memory_order_acquire);
  const uint64_t progress = slot.progress.load(std::memory_order_acquire);
  collective.round = static_cast<uint32_t>(place >> 32);
  collective.number = static_cast<uint32_t>(place);
  collective.call = kind >> 32;
  collective.model = static_cast<uint16_t>(kind >> 16);
  collective.sequence = static_cast<Sequence>(kind >> 8 & 0xff);
  collective.dtype = static_cast<fsdp_dtype>(kind & 0xff);
  collective.state = static_cast<FlightState>(progress & 0xf);
  const auto time = [&](uint64_t us) { return us ? collective.enqueued_ns + us * 1000 : 0; };
  collective.started_ns = time(progress >> 34);
  collective.ended_ns = time(progress >> 4 & max_us);
  return slot.state.load(std::memory_order_relaxed) == 2 * number + 2;
}

FlightRecorder::FlightSnapshot FlightRecorder::read() const {
  FlightSnapshot snapshot;
  snapshot.call_count = call_.load(std::memory_order_acquire);
  snapshot.collective_count = next_collective_.load(std::memory_order_acquire);
  const auto first = [&](uint64_t count) { return count > half_ ? count - half_ : 0; };
  FlightCall call;
  for (uint64_t number = first(snapshot.call_count); number < snapshot.call_count; ++number)
    if (read_call(number, call)) snapshot.calls.push_back(call);
  Collective collective;
  for (uint64_t number = first(snapshot.collective_count); number < snapshot.collective_count; ++number)
    if (read_collective(number, collective)) snapshot.collectives.push_back(collective);
  {
    const std::lock_guard lock(mutex_);
    snapshot.models = models_;
  }
  snapshot.wait.what = wait_what_.load(std::memory_order_acquire);
  snapshot.wait.object = wait_object_.load(std::memory_order_acquire);
  snapshot.wait.since_ns = wait_since_.load(std::memory_order_relaxed);
  return snapshot;
}

namespace {

using Out = std::back_insert_iterator<std::string>;

const char *state_name(FlightState state) {
  switch (state) {
    case FlightState::enqueued: return "enqueued";
    case FlightState::started: return "started";
    case FlightState::completed: return "completed";
    default: return "failed";
  }
}

const char *phase_text(fsdp_phase phase) {
  switch (phase) {
    case FSDP_FORWARD: return "FORWARD";
    case FSDP_BACKWARD: return "BACKWARD";
    case FSDP_RECOMPUTE: return "RECOMPUTE";
    default: return "EVAL";
  }
}

// Returns the name of a sequence, which is the same on all of its ranks; different sequences have different names.
std::string sequence_name(const FlightRecorder::Collective &of,
                          const std::vector<FlightRecorder::FlightModel> &models) {
  if (of.sequence == Sequence::values || of.model >= models.size()) return "values";
  const FlightRecorder::FlightModel &model = models[of.model];
  const auto name = [&](const char *what, const std::string &among) {
    return format_text("{} of {}model {}{}{}{}{}", what, model.mesh ? format_text("mesh {} of ", model.mesh) : "",
                       model.number, model.ranks.empty() ? "" : " on ranks ", model.ranks,
                       among.empty() ? "" : " among ranks ", among);
  };
  switch (of.sequence) {
    case Sequence::meetings: return name("meetings", "");
    case Sequence::reduces: return name("reduces", model.inner);
    case Sequence::gathers: return name("gathers", model.inner);
    case Sequence::params: return name("parameters", "");
    case Sequence::replays: return name("replays", "");
    default: return name("outer reduces", model.outer);
  }
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

uint64_t unix_ns() {
  timespec time;
  ::clock_gettime(CLOCK_REALTIME, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

void format_owner(Out out, const FlightOwner &owner) {
  fmt::format_to(out, "\"version\": \"{}\", \"rank\": {}, \"world_size\": {}, \"host\": {}, \"pid\": {},\n",
                 FSDP_VERSION_TEXT, owner.rank, owner.world_size, quote_json(host_name()), ::getpid());
  // The times below are of the monotonic clock. The unix time allows converting them on this host.
  fmt::format_to(out, "\"monotonic_ns\": {}, \"unix_ns\": {},\n", now_ns(), unix_ns());
  if (owner.error)
    fmt::format_to(out, "\"error\": {{\"status\": {}, \"rank\": {}, \"message\": {}}},\n", owner.error->status,
                   owner.error->rank, quote_json(owner.error->message));
}

void format_object(Out out, const char *object) {
  if (object) fmt::format_to(out, ", \"group\": {}", quote_json(object));
}

void format_call(Out out, const FlightRecorder::FlightCall &call) {
  fmt::format_to(out, "{{\"entry\": {}, \"call\": {}", call.number, quote_json(call.name));
  format_object(out, call.object);
  if (call.phase) fmt::format_to(out, ", \"phase\": \"{}\"", phase_text(call.phase));
  fmt::format_to(out, ", \"state\": \"{}\", \"at_ns\": {}", state_name(call.state), call.begin_ns);
  if (call.status) fmt::format_to(out, ", \"status\": {}", call.status);
  fmt::format_to(out, ", \"waited_ns\": {}}}", call.waited_ns);
}

void format_collective(Out out, const FlightRecorder::Collective &of,
                       const std::vector<FlightRecorder::FlightModel> &models) {
  fmt::format_to(out, "{{\"entry\": {}, \"sequence\": \"{}\", \"round\": {}, \"number\": {}, \"what\": {}", of.entry,
                 sequence_name(of, models), of.round, of.number, quote_json(of.what));
  format_object(out, of.object);
  if (of.dtype)
    fmt::format_to(out, ", \"dtype\": \"{}\", \"elements\": {}", dtype_name(of.dtype), of.elements);
  else
    fmt::format_to(out, ", \"bytes\": {}", of.elements);
  fmt::format_to(out,
                 ", \"state\": \"{}\", \"call_entry\": {}, \"enqueued_ns\": {}, \"started_ns\": {}, \"ended_ns\": {}}}",
                 state_name(of.state), of.call, of.enqueued_ns, of.started_ns, of.ended_ns);
}

template <class Entries, class Format>
void format_entries(std::string &text, const char *name, uint64_t count, const Entries &entries, Format format) {
  const Out out(text);
  fmt::format_to(out, "\"{}_lost\": {}, \"{}\": [", name, count - entries.size(), name);
  const char *separator = "\n";
  for (const auto &entry : entries) {
    text += separator;
    format(out, entry);
    separator = ",\n";
  }
  text += "\n]";
}

}  // namespace

std::string format_flight_record(const FlightRecorder::FlightSnapshot &snapshot, const FlightOwner &owner) {
  std::string text = "{\"fsdp_flight\": 1, ";
  const Out out(text);
  format_owner(out, owner);
  if (snapshot.wait.what) {
    fmt::format_to(out, "\"wait\": {{\"for\": {}", quote_json(snapshot.wait.what));
    format_object(out, snapshot.wait.object);
    fmt::format_to(out, ", \"since_ns\": {}}},\n", snapshot.wait.since_ns);
  }
  format_entries(text, "calls", snapshot.call_count, snapshot.calls, format_call);
  text += ",\n";
  format_entries(text, "collectives", snapshot.collective_count, snapshot.collectives,
                 [&](Out to, const FlightRecorder::Collective &of) { format_collective(to, of, snapshot.models); });
  return text + "}\n";
}

}  // namespace fsdp::trace
