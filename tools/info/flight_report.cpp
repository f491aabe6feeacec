// SPDX-License-Identifier: Apache-2.0
#include "info/flight_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <stdexcept>

#include "fsdp.h"
#include "info/divergence.h"

namespace tools {
namespace {

using Records = std::vector<FlightRecord>;

// "rank 1", "ranks 0, 2-5".
std::string rank_list(const std::set<uint64_t> &ranks) {
  std::string text;
  for (auto at = ranks.begin(); at != ranks.end();) {
    const uint64_t first = *at;
    uint64_t last = first;
    while (++at != ranks.end() && *at == last + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", first);
    if (last > first) text += fmt::format("{}{}", last == first + 1 ? ", " : "-", last);
  }
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", text);
}

Records read_all(const std::vector<std::string> &files) {
  Records records;
  for (const std::string &file : files) {
    FlightRecord record = read_flight_record(file);
    for (const FlightRecord &other : records) {
      if (other.world_size != record.world_size)
        throw std::runtime_error(fmt::format("{}: it is of a job of {} ranks, {} of one of {}", file, record.world_size,
                                             other.path, other.world_size));
      if (other.rank == record.rank)
        throw std::runtime_error(fmt::format("{}: it is of rank {}, as is {}", file, record.rank, other.path));
    }
    records.push_back(std::move(record));
  }
  std::sort(records.begin(), records.end(), [](const auto &a, const auto &b) { return a.rank < b.rank; });
  return records;
}

std::set<uint64_t> missing_ranks(const Records &records) {
  std::set<uint64_t> missing;
  for (uint64_t rank = 0; rank < records[0].world_size; ++rank) missing.insert(rank);
  for (const FlightRecord &record : records) missing.erase(record.rank);
  return missing;
}

std::string last_call(const FlightRecord &record) {
  if (record.calls.empty()) return "none";
  const FlightCall &call = record.calls.back();
  return fmt::format("{}, {:.1f} s before, {}", call.text(), record.ago(call.at_ns),
                     call.state == "started" ? "still inside" : call.state);
}

std::string wait_text(const FlightRecord &record) {
  if (record.wait_for.empty()) return "nothing";
  const std::string group = record.wait_group.empty() ? "" : fmt::format(" of '{}'", record.wait_group);
  return fmt::format("{}{}, since {:.1f} s", record.wait_for, group, record.ago(record.wait_since_ns));
}

std::string end_text(const FlightRecord &record) {
  if (record.status == 0) return "has not failed";
  return fmt::format("{}{}", fsdp_get_status_name(static_cast<fsdp_status>(record.status)),
                     record.blamed < 0 ? "" : fmt::format(", blames rank {}", record.blamed));
}

void print_ranks(const Records &records) {
  for (const FlightRecord &record : records) {
    fmt::print("\nrank {} (host {}, pid {}): {}\n", record.rank, record.host, record.pid, end_text(record));
    fmt::print("  last call   {}\n  waits for   {}\n", last_call(record), wait_text(record));
    if (!record.message.empty()) fmt::print("  error       {}\n", record.message);
  }
}

void print_divergence(const Records &records, const Divergence &at) {
  fmt::print("\nThe ranks parted at number {} of the {}, round {}:\n", at.number, at.sequence, at.round);
  std::map<std::string, std::set<uint64_t>> calls;
  for (size_t r = 0; r < records.size(); ++r) {
    if (!at.called[r]) continue;
    const FlightCall *by = records[r].call(at.called[r]->call_entry);
    const bool same = !by || by->call == at.called[r]->what;
    calls[at.called[r]->text() + (same ? "" : fmt::format(", in {}", by->text()))].insert(records[r].rank);
  }
  for (const auto &[text, ranks] : calls) fmt::print("  {} called {}\n", rank_list(ranks), text);
  for (size_t r = 0; r < records.size(); ++r)
    if (at.absent[r])
      fmt::print("  rank {} never came to it; its last call was {}\n", records[r].rank, last_call(records[r]));
}

// The rank that most of the failed ranks blame.
bool print_culprit(const Records &records) {
  std::map<int64_t, std::set<uint64_t>> blamers;
  for (const FlightRecord &record : records)
    if (record.status && record.blamed >= 0) blamers[record.blamed].insert(record.rank);
  if (blamers.empty()) return false;
  const auto most = std::max_element(blamers.begin(), blamers.end(),
                                     [](const auto &a, const auto &b) { return a.second.size() < b.second.size(); });
  const bool self = most->second.size() == 1 && *most->second.begin() == static_cast<uint64_t>(most->first);
  fmt::print("\nRank {} is to blame, {}.\n", most->first,
             self ? "as it says itself" : fmt::format("say {}", rank_list(most->second)));
  return true;
}

int report(const Records &records) {
  const auto missing = missing_ranks(records);
  fmt::print("{} of {} ranks have a flight record{}\n", records.size(), records[0].world_size,
             missing.empty() ? "" : fmt::format("; missing: {}", rank_list(missing)));
  const auto divergence = find_divergence(records);
  if (divergence) print_divergence(records, *divergence);
  const bool blamed = print_culprit(records);
  const bool failed = std::any_of(records.begin(), records.end(), [](const auto &r) { return r.status != 0; });
  if (!divergence && !blamed)
    fmt::print("\n{}\n", failed ? "The ranks failed, and nothing in these records tells why they differ."
                                : "The ranks agree: all made the same collectives.");
  print_ranks(records);
  return divergence || blamed || !failed ? 0 : 1;
}

}  // namespace

int report_flights(const std::vector<std::string> &files) {
  try {
    return report(read_all(files));
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-info flight: {}\n", error.what());
    return 2;
  }
}

}  // namespace tools
