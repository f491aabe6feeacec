// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/json_document.h"

#include <set>

#include "base/text.h"

namespace fsdp::checkpoint {
namespace {

using nlohmann::json;

// Builds the document from the parser's events. Limits and duplicate names can be checked only during parsing.
class DocumentMaker {
 public:
  DocumentMaker(std::string_view file, const JsonLimits &limits) : file_(file), limits_(limits) {}

  json document;

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) { return add(value); }
  bool number_float(double value, const std::string &) { return add(value); }
  bool string(std::string &value) { return add(std::move(value)); }
  bool binary(std::vector<uint8_t> &) { return false; }  // does not occur in text
  bool start_object(size_t) { return open(json::object()); }
  bool start_array(size_t) { return open(json::array()); }
  bool end_object() { return open_.pop_back(), true; }
  bool end_array() { return open_.pop_back(), true; }
  bool key(std::string &name) {
    if (open_.back()->contains(name)) refuse_file(file_, "the name \"{}\" comes twice in one object", as_utf8(name));
    name_ = std::move(name);
    return true;
  }
  bool parse_error(size_t position, const std::string &, const std::exception &error) {
    refuse_file(file_, "its JSON ends being JSON at byte {}: {}", position, as_utf8(error.what()));
  }

 private:
  json *put(json &&value) {
    if (++values_ > limits_.values) refuse_file(file_, "its JSON has more than {} values", limits_.values);
    if (open_.empty()) return &(document = std::move(value));
    json &parent = *open_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    return &(parent[name_] = std::move(value));
  }
  bool add(json &&value) { return put(std::move(value)), true; }
  bool open(json &&value) {
    if (open_.size() == limits_.depth) refuse_file(file_, "its JSON is nested deeper than {}", limits_.depth);
    open_.push_back(put(std::move(value)));
    return true;
  }

  std::string_view file_;
  const JsonLimits &limits_;
  std::vector<json *> open_;  // arrays and objects that have not ended; an open one does not move
  std::string name_;
  uint64_t values_ = 0;
};

// Longer texts are cut in errors.
constexpr size_t longest_text = 300, longest_value = 40;

std::string shown(const json &value) {
  const size_t most = value.is_string() ? longest_text : longest_value;
  std::string text = value.dump();
  if (text.size() > most) text = text.substr(0, cut_length(text, most)) + "...";
  return text;
}

}  // namespace

json parse_json(std::string_view text, std::string_view file, const JsonLimits &limits) {
  // The parser would treat a NUL as the end of the text.
  if (const size_t nul = text.find('\0'); nul != text.npos)
    refuse_file(file, "its JSON ends being JSON at byte {}", nul);
  DocumentMaker maker(file, limits);
  json::sax_parse(text, &maker);
  return std::move(maker.document);
}

void JsonValue::require(bool is, std::string_view what) const {
  if (!is) refuse_file(file_, "{} is {}, not {}", path_.empty() ? "its JSON" : path_, shown(value_), what);
}

uint64_t JsonValue::unsigned_number() const {
  require(value_.is_number_unsigned(), "a number of 0 or more");
  return value_.get<uint64_t>();
}

const std::string &JsonValue::text() const {
  require(value_.is_string(), "a text");
  return value_.get_ref<const std::string &>();
}

bool JsonValue::boolean() const {
  require(value_.is_boolean(), "true or false");
  return value_.get<bool>();
}

std::vector<uint64_t> JsonValue::unsigned_numbers(size_t most) const {
  require(value_.is_array() && value_.size() <= most, format_text("an array of at most {} numbers", most));
  std::vector<uint64_t> numbers;
  for_each_element([&](const JsonValue &value) { numbers.push_back(value.unsigned_number()); });
  return numbers;
}

JsonValue JsonValue::operator[](const std::string &name) const {
  require(value_.is_object(), "an object");
  if (!value_.contains(name)) refuse_file(file_, "{}/{} is missing", path_, name);
  return {value_[name], file_, path_ + "/" + name};
}

}  // namespace fsdp::checkpoint
