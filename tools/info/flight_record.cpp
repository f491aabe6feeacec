// SPDX-License-Identifier: Apache-2.0
#include "info/flight_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace tools {
namespace {

constexpr uint64_t max_file_bytes = uint64_t{256} << 20;
constexpr size_t max_entries = size_t{1} << 21;  // of each kind
constexpr size_t max_text = 4096;
constexpr uint64_t max_ranks = uint64_t{1} << 20;

[[noreturn]] void refuse(const std::string &path, const std::string &problem) {
  throw std::runtime_error(fmt::format("{}: {}", path, problem));
}

// Whatever a file says is printed to a terminal: no control characters.
std::string printable(std::string text) {
  if (text.size() > max_text) text.resize(max_text);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

// Takes what it knows and passes over the rest: {header, "error": {}, "wait": {}, "calls": [{}], "collectives": [{}]}.
class Reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Reader(FlightRecord &record) : record_(record) {}
  bool is_record() const { return format_ == 1; }
  const std::string &problem() const { return problem_; }

  bool key(string_t &name) override {
    key_ = name.substr(0, 64);
    if (depth_ == 1) section_ = key_;
    return true;
  }
  bool start_object(size_t) override {
    if (++depth_ == 3 && section_ == "calls") return add(record_.calls);
    if (depth_ == 3 && section_ == "collectives") return add(record_.collectives);
    return depth_ <= 3 || stop("it is nested too deeply");
  }
  bool start_array(size_t) override { return ++depth_ <= 3 || stop("it is nested too deeply"); }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool string(string_t &value) override { return put_text(printable(std::move(value))), true; }
  bool number_unsigned(number_unsigned_t value) override { return put_number(value), true; }
  bool number_integer(number_integer_t value) override { return put_signed(value), true; }
  bool number_float(number_float_t, const string_t &) override { return true; }
  bool boolean(bool) override { return true; }
  bool null() override { return true; }
  bool binary(binary_t &) override { return true; }
  bool parse_error(size_t at, const std::string &, const nlohmann::json::exception &) override {
    return stop(fmt::format("it is no JSON, or torn, at byte {}", at));
  }

 private:
  bool stop(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  template <class Entries>
  bool add(Entries &entries) {
    if (entries.size() >= max_entries) return stop(fmt::format("it has more than {} {}", max_entries, section_));
    entries.emplace_back();
    return true;
  }
  using Texts = std::initializer_list<std::pair<const char *, std::string *>>;
  using Numbers = std::initializer_list<std::pair<const char *, uint64_t *>>;
  template <class Fields, class Value>
  void put(const Fields &fields, Value &&value) {
    for (const auto &[name, field] : fields)
      if (key_ == name) {
        *field = std::forward<Value>(value);
        return;
      }
  }
  void put_text(std::string &&value) {
    if (depth_ == 1) return put(Texts{{"version", &record_.version}, {"host", &record_.host}}, std::move(value));
    if (depth_ == 2 && section_ == "error") return put(Texts{{"message", &record_.message}}, std::move(value));
    if (depth_ == 2 && section_ == "wait")
      return put(Texts{{"for", &record_.wait_for}, {"group", &record_.wait_group}}, std::move(value));
    if (depth_ != 3) return;
    if (section_ == "calls" && !record_.calls.empty()) {
      FlightCall &call = record_.calls.back();
      return put(Texts{{"call", &call.call}, {"group", &call.group}, {"phase", &call.phase}, {"state", &call.state}},
                 std::move(value));
    }
    if (section_ != "collectives" || record_.collectives.empty()) return;
    FlightCollective &of = record_.collectives.back();
    put(Texts{{"sequence", &of.sequence},
              {"what", &of.what},
              {"group", &of.group},
              {"dtype", &of.dtype},
              {"state", &of.state}},
        std::move(value));
  }
  void put_number(uint64_t value) {
    if (depth_ == 1)
      return put(Numbers{{"fsdp_flight", &format_},
                         {"rank", &record_.rank},
                         {"world_size", &record_.world_size},
                         {"pid", &record_.pid},
                         {"monotonic_ns", &record_.monotonic_ns},
                         {"unix_ns", &record_.unix_ns}},
                 value);
    if (depth_ == 2 && section_ == "wait") return put(Numbers{{"since_ns", &record_.wait_since_ns}}, value);
    if (depth_ == 3 && section_ == "calls" && !record_.calls.empty()) {
      FlightCall &call = record_.calls.back();
      put(Numbers{{"entry", &call.entry}, {"at_ns", &call.at_ns}}, value);
    } else if (depth_ == 3 && section_ == "collectives" && !record_.collectives.empty()) {
      FlightCollective &of = record_.collectives.back();
      put(Numbers{{"round", &of.round},
                  {"number", &of.number},
                  {"elements", &of.elements},
                  {"bytes", &of.bytes},
                  {"call_entry", &of.call_entry},
                  {"enqueued_ns", &of.enqueued_ns}},
          value);
    }
    if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) put_signed(static_cast<int64_t>(value));
  }
  void put_signed(int64_t value) {
    if (depth_ == 2 && section_ == "error" && key_ == "status") record_.status = value;
    if (depth_ == 2 && section_ == "error" && key_ == "rank") record_.blamed = value;
    if (depth_ == 3 && section_ == "calls" && key_ == "status" && !record_.calls.empty())
      record_.calls.back().status = value;
  }

  FlightRecord &record_;
  int depth_ = 0;
  std::string section_, key_, problem_;
  uint64_t format_ = 0;
};

void check(const FlightRecord &record, const Reader &reader) {
  if (!reader.is_record())
    refuse(record.path, "this is no flight record: an object with \"fsdp_flight\": 1 was expected");
  if (record.world_size == 0 || record.world_size > max_ranks || record.rank >= record.world_size)
    refuse(record.path, fmt::format("it is of rank {} of {}, which cannot be", record.rank, record.world_size));
}

}  // namespace

std::string FlightCall::text() const {
  std::string text = call.empty() ? "a call" : call;
  if (!group.empty()) text += fmt::format(" of '{}'", group);
  if (!phase.empty()) text += fmt::format(" ({})", phase);
  return text;
}

std::string FlightCollective::text() const {
  std::string text = what.empty() ? "a collective" : what;
  if (!group.empty()) text += fmt::format(" of '{}'", group);
  if (!dtype.empty()) return text + fmt::format(" ({} elements of {})", elements, dtype);
  return bytes ? text + fmt::format(" ({} bytes)", bytes) : text;
}

const FlightCall *FlightRecord::call(uint64_t entry) const {
  for (const FlightCall &call : calls)
    if (call.entry == entry) return &call;
  return nullptr;
}

FlightRecord read_flight_record(const std::string &path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) refuse(path, std::generic_category().message(errno));
  if (!std::filesystem::is_regular_file(path)) refuse(path, "it is no regular file");
  const auto bytes = in.tellg();
  if (bytes < 0) refuse(path, "it cannot be read");
  if (static_cast<uint64_t>(bytes) > max_file_bytes)
    refuse(path, fmt::format("it has {} bytes, more than any flight record", static_cast<uint64_t>(bytes)));
  in.seekg(0);
  FlightRecord record;
  record.path = path;
  Reader reader(record);
  if (!nlohmann::json::sax_parse(in, &reader))
    refuse(path, reader.problem().empty() ? "it cannot be read" : reader.problem());
  check(record, reader);
  return record;
}

}  // namespace tools
