// SPDX-License-Identifier: Apache-2.0
// The lines that a run of fsdp-perf has found: a table for people, JSON lines for programs, a plot.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace perf {

struct Line {
  std::string operation, variant, dtype;
  uint32_t ranks = 0;
  uint64_t bytes = 0;
  double seconds = 0;
  double bus_factor = 0;  // bus bandwidth over algorithm bandwidth; 0: bandwidths mean nothing here
  std::string reference;  // name of the reference
  double reference_seconds = 0;
  double ratio = 0;  // reference / work; above 1 is faster than the reference
  uint32_t pairs = 0;
  uint64_t wrong = 0;  // elements
  bool checked = false;
  std::string peer;  // empty: none
  double peer_seconds = 0, peer_ratio = 0;
  std::vector<std::pair<std::string, double>> more;  // figures that only this operation has
};

class Report {
 public:
  // live: print the table's rows as they come.
  explicit Report(bool live) : live_(live) {}
  void add(const Line &line);
  const std::vector<Line> &lines() const { return lines_; }
  uint64_t wrong() const;
  void write_json(const std::string &file, const std::string &machine) const;

 private:
  bool live_;
  std::vector<Line> lines_;
};

std::string format_size(uint64_t bytes);
// The processor, its cores, caches and instruction set, and the memory.
std::string describe_machine();
// Ratio against size, one curve for each operation, variant and dtype.
void write_plot(const std::string &file, const std::vector<Line> &lines, const std::string &machine);

}  // namespace perf
