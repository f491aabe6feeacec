// SPDX-License-Identifier: Apache-2.0
// Finds where the calls of a job's ranks first differ: the first collective that did not end and that not all ranks
// called in the same way.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "info/flight_record.h"

namespace tools {

struct Divergence {
  std::string sequence;
  uint64_t round = 0, number = 0;
  int64_t unix_time = 0;  // when the first rank came to it
  // By record: what it called there; NULL: it never came, or its entry is lost.
  std::vector<const FlightCollective *> called;
  std::vector<bool> absent;  // it never came
};

std::optional<Divergence> find_divergence(const std::vector<FlightRecord> &records);

}  // namespace tools
