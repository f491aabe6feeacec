// SPDX-License-Identifier: Apache-2.0
#include "trace/flight_record.h"

#include <unistd.h>

#include <ctime>
#include <iterator>

#include "base/dtype.h"
#include "base/json.h"

namespace fsdp::trace {
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

// Ranks that make the same sequence give it the same name, and others do not.
std::string sequence_name(const FlightRecorder::Collective &of,
                          const std::vector<FlightRecorder::FlightModel> &models) {
  if (of.sequence == Sequence::values || of.model >= models.size()) return "values";
  const FlightRecorder::FlightModel &model = models[of.model];
  const auto name = [&](const char *what, const std::string &among) {
    return format_text("{} of model {}{}{}{}{}", what, model.number, model.ranks.empty() ? "" : " on ranks ",
                       model.ranks, among.empty() ? "" : " among ranks ", among);
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
  // Times below are of the first clock; the second tells where it stands on this host.
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
