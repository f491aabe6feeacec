// SPDX-License-Identifier: Apache-2.0
#include "info/divergence.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

namespace tools {
namespace {

using Place = std::pair<uint64_t, uint64_t>;
using Row = std::vector<const FlightCollective *>;  // one entry for each record; NULL if the record lacks the
                                                    // collective

// Gathers pull what peers have published: each rank makes those that it needs.
bool comparable(const FlightCollective &of) { return of.sequence.rfind("gathers", 0) != 0; }

std::map<std::string, std::map<Place, Row>> align(const std::vector<FlightRecord> &records) {
  std::map<std::string, std::map<Place, Row>> aligned;
  for (size_t r = 0; r < records.size(); ++r)
    for (const FlightCollective &of : records[r].collectives) {
      if (!comparable(of)) continue;
      Row &row = aligned[of.sequence][of.place()];
      row.resize(records.size());
      row[r] = &of;
    }
  return aligned;
}

// The last place of each record in a sequence; none: the rank made no call of the sequence.
std::vector<std::optional<Place>> last_places(const std::map<Place, Row> &sequence, size_t count) {
  std::vector<std::optional<Place>> last(count);
  for (const auto &[place, row] : sequence)
    for (size_t r = 0; r < count; ++r)
      if (row[r]) last[r] = place;
  return last;
}

// True if the collective did not end on some rank, and the ranks' calls differ or a rank did not make it.
bool diverges(const Row &row, const std::vector<bool> &absent) {
  const FlightCollective *first = nullptr;
  bool open = false, differs = false;
  for (const FlightCollective *of : row) {
    if (!of) continue;
    if (!first) first = of;
    open = open || !of->completed();
    differs = differs || of->key() != first->key();
  }
  return open && (differs || std::find(absent.begin(), absent.end(), true) != absent.end());
}

// "reduces of model 0 on ranks 0-3 among ranks 1, 3": only the ranks in the last list make these calls; without a list
// all ranks do.
bool takes_part(const std::string &sequence, uint64_t rank) {
  const std::string word = " ranks ";
  const size_t at = sequence.rfind(word);
  if (at == std::string::npos) return true;
  std::istringstream list(sequence.substr(at + word.size()));
  for (std::string item; std::getline(list, item, ',');) {
    const size_t dash = item.find('-');
    const uint64_t first = std::stoull(item),
                   last = dash == std::string::npos ? first : std::stoull(item.substr(dash + 1));
    if (first <= rank && rank <= last) return true;
  }
  return false;
}

int64_t first_time(const std::vector<FlightRecord> &records, const Row &row) {
  std::optional<int64_t> first;
  for (size_t r = 0; r < row.size(); ++r)
    if (row[r]) {
      const int64_t time = records[r].unix_time(row[r]->enqueued_ns);
      first = first ? std::min(*first, time) : time;
    }
  return first.value_or(0);
}

}  // namespace

// Only the last round of a sequence counts: what was skipped in a step before it was settled by discarding that step.
std::optional<Divergence> find_divergence(const std::vector<FlightRecord> &records) {
  std::optional<Divergence> first;
  for (const auto &[name, sequence] : align(records)) {
    const auto last = last_places(sequence, records.size());
    const uint64_t round = sequence.rbegin()->first.first;
    for (auto at = sequence.lower_bound({round, 0}); at != sequence.end(); ++at) {
      std::vector<bool> absent(records.size());
      for (size_t r = 0; r < records.size(); ++r)
        absent[r] = takes_part(name, records[r].rank) && !at->second[r] && (!last[r] || *last[r] < at->first);
      if (!diverges(at->second, absent)) continue;
      const int64_t time = first_time(records, at->second);
      if (!first || time < first->unix_time)
        first = {name, at->first.first, at->first.second, time, at->second, absent};
      break;
    }
  }
  return first;
}

}  // namespace tools
