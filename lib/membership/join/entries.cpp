// SPDX-License-Identifier: Apache-2.0
#include "membership/join/entries.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace fsdp::membership::message {
namespace {

using Bytes = std::span<const std::byte>;
constexpr size_t head_bytes = 2 * sizeof(uint32_t);
constexpr size_t entry_bytes = sizeof(uint32_t) + 2 * 3 * sizeof(uint16_t);  // and what lies between

Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// How a value follows the one before it.
struct Following {
  size_t front = 0, back = 0;
  Bytes between;

  Following(Bytes before, Bytes value) {
    front = static_cast<size_t>(std::ranges::mismatch(before, value).in1 - before.begin());
    const size_t most = std::min(before.size(), value.size()) - front;
    while (back < most && before[before.size() - 1 - back] == value[value.size() - 1 - back]) ++back;
    between = value.subspan(front, value.size() - front - back);
  }
};

// One more byte at the front would differ, and one more at the back: else there would be a shorter way to say it.
bool is_shortest(Bytes before, size_t front, size_t back, Bytes between) {
  const size_t shorter = std::min(before.size(), front + between.size() + back);
  if (front < shorter && before[front] == (between.empty() ? before[before.size() - back] : between.front()))
    return false;
  return front + back >= shorter || between.empty() || before[before.size() - 1 - back] != between.back();
}

static_assert(most_card_bytes <= UINT16_MAX && most_name_bytes <= UINT16_MAX);

template <class Number>
void append(std::vector<std::byte> &to, size_t value) {
  const auto number = static_cast<Number>(value);
  const Bytes bytes = std::as_bytes(std::span(&number, 1));
  to.insert(to.end(), bytes.begin(), bytes.end());
}

void append(std::vector<std::byte> &to, const Following &value) {
  for (const size_t number : {value.front, value.back, value.between.size()}) append<uint16_t>(to, number);
  to.insert(to.end(), value.between.begin(), value.between.end());
}

}  // namespace

bool printable(char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; }

std::string name_of(std::string value, uint32_t most) {
  value.resize(std::min<size_t>(value.size(), most));
  std::replace_if(
      value.begin(), value.end(), [](char c) { return !printable(c); }, '?');
  return value;
}

// -- reading --

void EntryReader::wrong(std::string problem) {
  if (problem_.empty()) problem_ = std::move(problem);
  left_ = 0;
  rest_ = {};
}

Bytes EntryReader::cut_off() {
  wrong(format_text("the message ends after {} bytes, too early", bytes_));
  return {};
}

inline Bytes EntryReader::take(size_t bytes) {
  if (bytes > rest_.size()) return cut_off();
  const Bytes part = rest_.first(bytes);
  rest_ = rest_.subspan(bytes);
  return part;
}

template <class Numbers>
inline Numbers EntryReader::numbers() {
  Numbers values{};
  if (const Bytes part = take(sizeof values); !part.empty()) std::memcpy(&values, part.data(), sizeof values);
  return values;
}

EntryReader::EntryReader(Bytes body) : rest_(body), bytes_(body.size()) {
  rank_ = numbers<uint32_t>();
  left_ = numbers<uint32_t>();
}

// The usual value is as long as the one before it: then only the bytes between are written.
Bytes EntryReader::follow(std::vector<std::byte> &value, uint32_t most) {
  const auto [front, back, bytes] = numbers<Sizes>();
  const Bytes between = take(bytes);
  const size_t before = value.size(), after = size_t{front} + bytes + back;
  if (size_t{front} + back > before || after > most) {
    wrong(format_text("a part of {} bytes takes {} and {} of the {} before it, at most {} are allowed", bytes, front,
                      back, before, most));
  } else if (problem_.empty() && !is_shortest(value, front, back, between)) {
    wrong("a part says again what it shares with the one before it");
  }
  if (!problem_.empty()) return {};
  if (after > before) value.resize(after);
  if (after != before && back) std::memmove(value.data() + after - back, value.data() + before - back, back);
  if (after < before) value.resize(after);
  if (bytes) std::memcpy(value.data() + front, between.data(), bytes);
  return between;
}

bool EntryReader::next(Entry &entry) {
  if (left_ == 0) {
    if (!rest_.empty()) wrong(format_text("{} bytes follow the message", rest_.size()));
    return false;
  }
  --left_;
  const auto node = numbers<uint32_t>();
  const Bytes host = follow(host_, most_name_bytes);
  if (!std::ranges::all_of(host, [](std::byte b) { return printable(static_cast<char>(b)); }))
    wrong("a text has control characters");
  follow(card_, most_card_bytes);
  if (!problem_.empty()) return false;
  entry = {rank_++, node, {reinterpret_cast<const char *>(host_.data()), host_.size()}, card_};
  return true;
}

// -- writing --

uint32_t Entries::first_rank() const noexcept {
  uint32_t rank;
  std::memcpy(&rank, body_.data(), sizeof rank);
  return rank;
}

Entries::Entries(uint32_t first_rank) {
  append<uint32_t>(body_, first_rank);
  append<uint32_t>(body_, 0);
}

Entries::Entries(std::initializer_list<Entry> list) : Entries(list.size() ? list.begin()->rank : 0) {
  for (const Entry &entry : list) add(entry);
}

Entries Entries::parse(Bytes body, std::string &problem) {
  Entries entries;
  EntryReader reader(body);
  for (Entry entry; reader.next(entry);) entries.nodes_.push_back(entry.node);
  problem = reader.problem();
  if (!problem.empty()) return Entries();
  entries.body_.assign(body.begin(), body.end());
  return entries;
}

void Entries::add(const Entry &entry) {
  const std::string host = name_of(std::string(entry.host), most_name_bytes);
  append<uint32_t>(body_, entry.node);
  append(body_, Following(host_, bytes_of(host)));
  append(body_, Following(card_, entry.card));
  host_.assign(bytes_of(host).begin(), bytes_of(host).end());
  card_.assign(entry.card.begin(), entry.card.end());
  nodes_.push_back(entry.node);
  const uint32_t count = size();
  std::memcpy(body_.data() + sizeof count, &count, sizeof count);
}

bool Entries::takes(const Entry &entry, size_t most_bytes) const {
  return body_.size() + entry_bytes + Following(host_, bytes_of(entry.host)).between.size() +
             Following(card_, entry.card).between.size() <=
         most_bytes;
}

}  // namespace fsdp::membership::message
