// SPDX-License-Identifier: Apache-2.0
#include "perf/report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "device/device.h"

namespace perf {
namespace {

double gbs(double bytes, double seconds) { return seconds > 0 ? bytes / seconds * 1e-9 : 0; }
double bytes_of(const Line &line) { return static_cast<double>(line.bytes); }

std::string format_time(double seconds) {
  if (seconds < 1e-6) return fmt::format("{:.0f} ns", seconds * 1e9);
  if (seconds < 1e-3) return fmt::format("{:.2f} us", seconds * 1e6);
  return fmt::format("{:.2f} ms", seconds * 1e3);
}

std::string format_bandwidth(const Line &line) {
  return line.bus_factor > 0 ? fmt::format("{:.2f}", gbs(bytes_of(line), line.seconds)) : "";
}

void print_head() {
  fmt::print("{:<16}{:<21}{:<15}{:>9}{:>11}{:>9}{:>9}{:>8}{:>8}  {}\n", "operation", "variant", "dtype", "size", "time",
             "GB/s", "x ref", "x peer", "wrong", "");
}

void print(const Line &line) {
  std::string more;
  for (const auto &[name, value] : line.more) more += fmt::format("{} {:.6g}  ", name, value);
  if (!line.reference.empty())
    more += fmt::format("(ref: {}, {})", line.reference, format_time(line.reference_seconds));
  fmt::print("{:<16}{:<21}{:<15}{:>9}{:>11}{:>9}{:>9}{:>8}{:>8}  {}\n", line.operation, line.variant, line.dtype,
             line.bytes ? format_size(line.bytes) : "", format_time(line.seconds), format_bandwidth(line),
             line.ratio > 0 ? fmt::format("{:.2f}", line.ratio) : "",
             line.peer.empty() ? "" : fmt::format("{:.2f}", line.peer_ratio),
             line.checked ? fmt::format("{}", line.wrong) : "", more);
  std::fflush(stdout);
}

nlohmann::json to_json(const Line &line) {
  nlohmann::json json = {{"op", line.operation}, {"variant", line.variant}, {"ranks", line.ranks},
                         {"bytes", line.bytes},  {"dtype", line.dtype},     {"time_us", line.seconds * 1e6},
                         {"pairs", line.pairs}};
  const bool bandwidth = line.bus_factor > 0;
  json["algbw_gbs"] = bandwidth ? nlohmann::json(gbs(bytes_of(line), line.seconds)) : nullptr;
  json["busbw_gbs"] = bandwidth ? nlohmann::json(gbs(bytes_of(line), line.seconds) * line.bus_factor) : nullptr;
  json["ref"] = line.reference;
  json["ref_us"] = line.reference_seconds * 1e6;
  json["ref_gbs"] = bandwidth ? nlohmann::json(gbs(bytes_of(line), line.reference_seconds)) : nullptr;
  json["ratio"] = line.ratio > 0 ? nlohmann::json(line.ratio) : nullptr;
  json["wrong"] = line.checked ? nlohmann::json(line.wrong) : nullptr;
  json["peer"] = line.peer.empty() ? nlohmann::json(nullptr) : nlohmann::json(line.peer);
  json["peer_us"] = line.peer.empty() ? nlohmann::json(nullptr) : nlohmann::json(line.peer_seconds * 1e6);
  json["peer_ratio"] = line.peer.empty() ? nlohmann::json(nullptr) : nlohmann::json(line.peer_ratio);
  for (const auto &[name, value] : line.more) json[name] = value;
  return json;
}

std::string read_line_of(const char *path, const std::string &key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key)) {
      const size_t value = line.find_first_not_of(": \t", key.size());
      return value == std::string::npos ? "" : line.substr(value);
    }
  return "unknown";
}

}  // namespace

std::string format_size(uint64_t bytes) {
  const char *units[] = {"B", "KiB", "MiB", "GiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  return fmt::format("{:.4g} {}", value, units[unit]);
}

std::string describe_machine() {
  const char *set = fsdp::device::host_instruction_set();
  return fmt::format("{}, {} cores, L2 {}, L3 {}, memory {}, kernels {}", read_line_of("/proc/cpuinfo", "model name"),
                     ::sysconf(_SC_NPROCESSORS_ONLN),
                     format_size(static_cast<uint64_t>(std::max(0L, ::sysconf(_SC_LEVEL2_CACHE_SIZE)))),
                     format_size(static_cast<uint64_t>(std::max(0L, ::sysconf(_SC_LEVEL3_CACHE_SIZE)))),
                     read_line_of("/proc/meminfo", "MemTotal"), set);
}

void Report::add(const Line &line) {
  if (live_ && lines_.empty()) print_head();
  if (live_) print(line);
  lines_.push_back(line);
}

uint64_t Report::wrong() const {
  uint64_t wrong = 0;
  for (const Line &line : lines_) wrong += line.wrong;
  return wrong;
}

void Report::write_json(const std::string &file, const std::string &machine) const {
  std::ofstream out(file);
  for (const Line &line : lines_) {
    nlohmann::json json = to_json(line);
    json["machine"] = machine;
    out << json.dump() << '\n';
  }
  if (!out.flush()) throw std::runtime_error(fmt::format("cannot write {}", file));
}

}  // namespace perf
