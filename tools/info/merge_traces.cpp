// SPDX-License-Identifier: Apache-2.0
#include "info/merge_traces.h"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>

namespace tools {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void fail(const std::string &path, const std::string &problem) {
  throw std::runtime_error(fmt::format("{}: {}", path, problem));
}

Json read_events(const std::string &path) {
  std::ifstream in(path);
  if (!in) fail(path, std::generic_category().message(errno));
  Json trace = Json::parse(in, nullptr, false);
  if (!trace.is_object() || !trace.contains("traceEvents") || !trace["traceEvents"].is_array())
    fail(path, "this is no trace: a JSON object with an array \"traceEvents\" was expected");
  return std::move(trace["traceEvents"]);
}

}  // namespace

void merge_traces(const std::string &path, const std::vector<std::string> &files) {
  // If OUT is forgotten, the first trace takes its place and would be overwritten.
  if (std::filesystem::exists(path)) fail(path, "the file to write exists already; give a new name, or remove it");
  std::vector<Json> traces;
  for (const std::string &file : files) traces.push_back(read_events(file));
  std::ofstream out(path);
  out << "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n";
  const char *separator = "";
  for (const Json &events : traces)
    for (const Json &event : events) {
      out << separator << event.dump();
      separator = ",\n";
    }
  out << "\n]}\n";
  out.close();
  if (!out) fail(path, std::generic_category().message(errno));
}

}  // namespace tools
