// SPDX-License-Identifier: Apache-2.0

#include "membership/join/message.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace fsdp::membership::message {

namespace {

using Bytes = std::span<const std::byte>;
constexpr size_t head_bytes = 2 * sizeof(uint32_t);
constexpr size_t entry_bytes = sizeof(uint32_t) + 2 * 3 * sizeof(uint16_t);  // without the bytes between

Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// The difference between a value and the previous one.
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

// True if neither front nor back could be longer by one byte. If one could, a shorter message would mean the same.
bool is_shortest(Bytes before, size_t front, size_t back, Bytes between) {
  const size_t shorter = std::min(before.size(), front + between.size() + back);
  if (front < shorter && before[front] == (between.empty() ? before[before.size() - back] : between.front()))
    return false;
  return front + back >= shorter || between.empty() || before[before.size() - 1 - back] != between.back();
}

static_assert(max_card_bytes <= UINT16_MAX && max_name_bytes <= UINT16_MAX);

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

std::string name_of(std::string value, uint32_t most) {
  value.resize(std::min<size_t>(value.size(), most));
  std::replace_if(
      value.begin(), value.end(), [](char c) { return !is_printable(c); }, '?');
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

// A value usually has the length of the previous one; in that case only the bytes between are written.
Bytes EntryReader::follow(std::vector<std::byte> &value, uint32_t most) {
  const auto [front, back, bytes] = numbers<PartSizes>();
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

bool EntryReader::next(RosterEntry &entry) {
  if (left_ == 0) {
    if (!rest_.empty()) wrong(format_text("{} bytes follow the message", rest_.size()));
    return false;
  }
  --left_;
  const auto node = numbers<uint32_t>();
  const Bytes host = follow(host_, max_name_bytes);
  if (!std::ranges::all_of(host, [](std::byte b) { return is_printable(static_cast<char>(b)); }))
    wrong("a text has control characters");
  follow(card_, max_card_bytes);
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

Entries::Entries(std::initializer_list<RosterEntry> list) : Entries(list.size() ? list.begin()->rank : 0) {
  for (const RosterEntry &entry : list) add(entry);
}

Entries Entries::parse(Bytes body, std::string &problem) {
  Entries entries;
  EntryReader reader(body);
  for (RosterEntry entry; reader.next(entry);) entries.nodes_.push_back(entry.node);
  problem = reader.problem();
  if (!problem.empty()) return Entries();
  entries.body_.assign(body.begin(), body.end());
  return entries;
}

void Entries::add(const RosterEntry &entry) {
  const std::string host = name_of(std::string(entry.host), max_name_bytes);
  append<uint32_t>(body_, entry.node);
  append(body_, Following(host_, bytes_of(host)));
  append(body_, Following(card_, entry.card));
  host_.assign(bytes_of(host).begin(), bytes_of(host).end());
  card_.assign(entry.card.begin(), entry.card.end());
  nodes_.push_back(entry.node);
  const uint32_t count = size();
  std::memcpy(body_.data() + sizeof count, &count, sizeof count);
}

bool Entries::takes(const RosterEntry &entry, size_t max_bytes) const {
  return body_.size() + entry_bytes + Following(host_, bytes_of(entry.host)).between.size() +
             Following(card_, entry.card).between.size() <=
         max_bytes;
}

namespace {

class Writer {
 public:
  void number(uint32_t value) { bytes(&value, sizeof value); }
  void text(std::string value, uint32_t most) {
    const std::string name = name_of(std::move(value), most);
    block(std::as_bytes(std::span(name)));
  }
  void block(std::span<const std::byte> value) {
    number(static_cast<uint32_t>(value.size()));
    bytes(value.data(), value.size());
  }
  void bytes(const void *data, size_t size) {
    const auto *first = static_cast<const std::byte *>(data);
    body_.insert(body_.end(), first, first + size);
  }
  const std::vector<std::byte> &body() const { return body_; }

 private:
  std::vector<std::byte> body_;
};

// Reads until something is wrong. problem_ describes the first mistake; every later read returns an empty value.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> body) : body_(body) {}

  uint32_t number() {
    uint32_t value = 0;
    const auto part = take(sizeof value);
    if (!part.empty()) std::memcpy(&value, part.data(), sizeof value);
    return value;
  }
  std::span<const std::byte> block(uint32_t most) {
    const uint32_t size = number();
    if (size > most) wrong(format_text("a part announces {} bytes, at most {} are allowed", size, most));
    return take(size);
  }
  std::string text(uint32_t most) {
    const auto part = block(most);
    std::string value(reinterpret_cast<const char *>(part.data()), part.size());
    check_text(value);
    return value;
  }
  void check_text(const std::string &text) {
    if (!std::ranges::all_of(text, is_printable)) wrong("a text has control characters");
  }
  std::vector<std::byte> card() {
    const auto part = block(max_card_bytes);
    return {part.begin(), part.end()};
  }
  void bytes(void *to, size_t size) {
    const auto part = take(size);
    if (!part.empty()) std::memcpy(to, part.data(), size);
  }
  std::string finish() {
    if (at_ < body_.size()) wrong(format_text("{} bytes follow the message", body_.size() - at_));
    return problem_;
  }

 private:
  void wrong(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
    at_ = body_.size();
  }
  std::span<const std::byte> take(size_t size) {
    if (!problem_.empty()) return {};
    if (size > body_.size() - at_) {
      wrong(format_text("the message ends after {} bytes, too early", body_.size()));
      return {};
    }
    at_ += size;
    return body_.subspan(at_ - size, size);
  }

  std::span<const std::byte> body_;
  size_t at_ = 0;
  std::string problem_;
};

void put(Writer &to, const Join &join) {
  for (const uint32_t value : {join.rank, join.world_size, join.attempt}) to.number(value);
  to.text(join.host_id, max_name_bytes);
  to.text(join.host, max_name_bytes);
  to.text(join.listens, max_name_bytes);
}
void put(Writer &to, const Hello &hello) {
  to.number(hello.wire_version);
  to.number(hello.rank);
  to.text(hello.library, max_name_bytes);
}
void put(Writer &to, const Card &card) {
  to.number(card.rank);
  to.block(card.bytes);
}
void put(Writer &to, const Admitted &admitted) {
  to.number(admitted.rank);
  to.text(admitted.host, max_name_bytes);
  to.text(admitted.address, max_name_bytes);
}
void put(Writer &to, const Redirect &redirect) {
  to.number(redirect.rank);
  to.text(redirect.host, max_name_bytes);
  to.text(redirect.address, max_name_bytes);
}
// Ranks of one job have the same library on the same kind of processor, so both messages are sent as their bytes in
// memory.
void put(Writer &to, const Report &report) { to.bytes(&report, sizeof report); }
void put(Writer &to, const Verdict &verdict) { to.bytes(&verdict, sizeof verdict); }
void put(Writer &, const Formed &) {}
void put(Writer &to, const Refused &refused) {
  to.number(static_cast<uint32_t>(refused.status));
  to.number(static_cast<uint32_t>(refused.rank));
  to.text(refused.text, max_text_bytes);
  to.number(static_cast<uint32_t>(refused.to));
}
void put(Writer &to, const Entries &entries) { to.bytes(entries.body().data(), entries.body().size()); }
void put(Writer &to, const Start &start) {
  to.number(start.world_size);
  to.bytes(start.session.data(), start.session.size());
}

void get(Reader &from, Join &join) {
  for (uint32_t *value : {&join.rank, &join.world_size, &join.attempt}) *value = from.number();
  join.host_id = from.text(max_name_bytes);
  join.host = from.text(max_name_bytes);
  join.listens = from.text(max_name_bytes);
}
void get(Reader &from, Hello &hello) {
  hello.wire_version = from.number();
  hello.rank = from.number();
  hello.library = from.text(max_name_bytes);
}
void get(Reader &from, Card &card) {
  card.rank = from.number();
  card.bytes = from.card();
}
void get(Reader &from, Admitted &admitted) {
  admitted.rank = from.number();
  admitted.host = from.text(max_name_bytes);
  admitted.address = from.text(max_name_bytes);
}
void get(Reader &from, Redirect &redirect) {
  redirect.rank = from.number();
  redirect.host = from.text(max_name_bytes);
  redirect.address = from.text(max_name_bytes);
}
void get(Reader &from, Report &report) {
  from.bytes(&report, sizeof report);
  from.check_text(report.accusation.text.copy());
}
void get(Reader &from, Verdict &verdict) {
  from.bytes(&verdict, sizeof verdict);
  from.check_text(verdict.accusation.text.copy());
}
void get(Reader &, Formed &) {}
void get(Reader &from, Refused &refused) {
  refused.status = static_cast<int32_t>(from.number());
  refused.rank = static_cast<int32_t>(from.number());
  refused.text = from.text(max_text_bytes);
  refused.to = static_cast<int32_t>(from.number());
}
void get(Reader &from, Start &start) {
  start.world_size = from.number();
  from.bytes(start.session.data(), start.session.size());
}

template <class M>
Parsed parse_as(std::span<const std::byte> body) {
  Reader reader(body);
  M message;
  get(reader, message);
  std::string problem = reader.finish();
  if (!problem.empty()) return {{}, std::move(problem)};
  return {std::move(message), {}};
}

Parsed parse_entries(std::span<const std::byte> body) {
  std::string problem;
  Entries entries = Entries::parse(body, problem);
  if (!problem.empty()) return {{}, std::move(problem)};
  return {std::move(entries), {}};
}

}  // namespace

std::vector<std::byte> write(const Message &message) {
  return std::visit(
      [](const auto &value) {
        Writer writer;
        put(writer, value);
        return write_frame(value.kind, writer.body());
      },
      message);
}

SharedFrame share(const Message &message) { return share_frame(write(message)); }

Parsed parse(uint32_t kind, std::span<const std::byte> body) {
  switch (kind) {
    case Join::kind: return parse_as<Join>(body);
    case Refused::kind: return parse_as<Refused>(body);
    case Entries::kind: return parse_entries(body);
    case Start::kind: return parse_as<Start>(body);
    case Hello::kind: return parse_as<Hello>(body);
    case Card::kind: return parse_as<Card>(body);
    case Formed::kind: return parse_as<Formed>(body);
    case Admitted::kind: return parse_as<Admitted>(body);
    case Redirect::kind: return parse_as<Redirect>(body);
    case Report::kind: return parse_as<Report>(body);
    case Verdict::kind: return parse_as<Verdict>(body);
    default: return {{}, format_text("no message has kind {}", kind)};
  }
}

}  // namespace fsdp::membership::message
