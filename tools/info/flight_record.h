// SPDX-License-Identifier: Apache-2.0
// A rank's flight record, read from its file. The file may be truncated, foreign or hostile, so what is read is
// limited.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace tools {

struct FlightCall {
  uint64_t entry = 0;
  std::string call, group, phase, state;
  int64_t status = 0;
  uint64_t at_ns = 0;

  std::string text() const;  // "fsdp_unshard of 'layer.3' (FORWARD)"
};

struct FlightCollective {
  std::string sequence, what, group, dtype, state;
  uint64_t round = 0, number = 0, elements = 0, bytes = 0, call_entry = 0, enqueued_ns = 0;

  std::pair<uint64_t, uint64_t> place() const { return {round, number}; }
  bool completed() const { return state == "completed"; }
  // What all ranks must agree on.
  auto key() const { return std::tie(what, group, dtype, elements, bytes); }
  std::string text() const;  // "reduce_scatter of 'layer.3' (1024 bytes)"
};

struct FlightRecord {
  std::string path, version, host;
  uint64_t rank = 0, world_size = 0, pid = 0;
  uint64_t monotonic_ns = 0, unix_ns = 0;  // the same moment on two clocks: when it was written
  int64_t status = 0, blamed = -1;         // status 0: the context has not failed
  std::string message;
  std::string wait_for, wait_group;  // empty: the caller waits for nothing
  uint64_t wait_since_ns = 0;
  std::vector<FlightCall> calls;
  std::vector<FlightCollective> collectives;

  // A time of the record's clock on the clock that hosts share.
  int64_t unix_time(uint64_t ns) const { return static_cast<int64_t>(unix_ns - (monotonic_ns - ns)); }
  double ago(uint64_t ns) const { return monotonic_ns > ns ? 1e-9 * static_cast<double>(monotonic_ns - ns) : 0; }
  const FlightCall *call(uint64_t entry) const;
};

// Throws std::runtime_error naming the file and what is wrong with it.
FlightRecord read_flight_record(const std::string &path);

}  // namespace tools
