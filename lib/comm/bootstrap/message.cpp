// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/message.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace fsdp::comm::message {
namespace {

constexpr size_t entry_bytes = 8 * sizeof(uint32_t);  // of each, and what it does not share with the one before it
constexpr size_t most_expanded_bytes = 1 << 20;       // of the hosts' names and cards of one message

bool printable(char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; }

// How many bytes two blocks begin with alike, and how many of what follows they end with alike.
struct SharedEnds {
  size_t front = 0, back = 0;
  SharedEnds(std::span<const std::byte> a, std::span<const std::byte> b) {
    front = static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
    const size_t most = std::min(a.size(), b.size()) - front;
    while (back < most && a[a.size() - 1 - back] == b[b.size() - 1 - back]) ++back;
  }
  size_t between(size_t size) const { return size - front - back; }
};

std::span<const std::byte> bytes_of(const std::string &text) { return std::as_bytes(std::span(text)); }

std::string name_of(std::string value, uint32_t most) {
  value.resize(std::min<size_t>(value.size(), most));
  std::replace_if(
      value.begin(), value.end(), [](char c) { return !printable(c); }, '?');
  return value;
}

class Writer {
 public:
  void number(uint32_t value) { bytes(&value, sizeof value); }
  void text(std::string value, uint32_t most) { block(bytes_of(name_of(std::move(value), most))); }
  // In what it differs from the one before it.
  void block_after(std::span<const std::byte> before, std::span<const std::byte> value) {
    const SharedEnds ends(before, value);
    number(static_cast<uint32_t>(ends.front));
    number(static_cast<uint32_t>(ends.back));
    block(value.subspan(ends.front, ends.between(value.size())));
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

// Reads until something is wrong; the first thing that was is the problem, and everything after it is empty.
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
  std::string text(uint32_t most) { return text_of(block(most)); }
  std::string text_of(std::span<const std::byte> part) {
    std::string value(reinterpret_cast<const char *>(part.data()), part.size());
    if (!std::all_of(value.begin(), value.end(), printable)) wrong("a text has control characters");
    return value;
  }
  std::vector<std::byte> card() {
    const auto part = block(most_card_bytes);
    return {part.begin(), part.end()};
  }
  // As Writer::block_after.
  std::vector<std::byte> block_after(std::span<const std::byte> before, uint32_t most) {
    const uint64_t front = number(), back = number();
    const auto part = block(most);
    if (front + back > before.size() || front + part.size() + back > most)
      wrong(format_text("a part of {} bytes takes {} and {} of the {} before it, at most {} are allowed", part.size(),
                        front, back, before.size(), most));
    if (!well()) return {};
    std::vector<std::byte> value(front + part.size() + back);
    std::ranges::copy(before.first(front), value.begin());
    std::ranges::copy(part, value.begin() + static_cast<std::ptrdiff_t>(front));
    std::ranges::copy(before.last(back), value.end() - static_cast<std::ptrdiff_t>(back));
    const SharedEnds ends(before, value);  // there is one way to say it
    if (ends.front != front || ends.back != back) wrong("a part says again what it shares with the one before it");
    expanded_ += value.size();
    if (expanded_ > most_expanded_bytes)
      wrong(format_text("its parts come to more than {} bytes", most_expanded_bytes));
    return value;
  }
  void nonce(Nonce &to) {
    const auto part = take(to.size());
    if (!part.empty()) std::memcpy(to.data(), part.data(), to.size());
  }
  bool well() const { return problem_.empty(); }
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
  size_t at_ = 0, expanded_ = 0;
  std::string problem_;
};

void put(Writer &to, const Join &join) {
  for (const uint32_t value : {join.rank, join.world_size, join.attempt}) to.number(value);
  to.text(join.host_id, most_name_bytes);
  to.text(join.host, most_name_bytes);
  to.text(join.listens, most_name_bytes);
}
void put(Writer &to, const Hello &hello) {
  to.number(hello.wire_version);
  to.number(hello.rank);
  to.text(hello.library, most_name_bytes);
}
void put(Writer &to, const Card &card) {
  to.number(card.rank);
  to.block(card.bytes);
}
void put(Writer &to, const Admitted &admitted) {
  to.number(admitted.rank);
  to.text(admitted.host, most_name_bytes);
  to.text(admitted.address, most_name_bytes);
}
void put(Writer &to, const Redirect &redirect) {
  to.number(redirect.rank);
  to.text(redirect.host, most_name_bytes);
  to.text(redirect.address, most_name_bytes);
}
void put(Writer &to, const Gone &gone) { to.number(gone.rank); }
void put(Writer &, const Formed &) {}
void put(Writer &to, const Refusal &refusal) {
  to.number(static_cast<uint32_t>(refusal.status));
  to.number(static_cast<uint32_t>(refusal.rank));
  to.text(refusal.text, most_text_bytes);
  to.number(static_cast<uint32_t>(refusal.party));
}
// Ranks of one host say nearly the same.
void put(Writer &to, const Entry &entry, const Entry &before) {
  to.number(entry.rank);
  to.number(entry.node);
  const std::string host = name_of(entry.host, most_name_bytes), host_before = name_of(before.host, most_name_bytes);
  to.block_after(bytes_of(host_before), bytes_of(host));
  to.block_after(before.card, entry.card);
}
void put(Writer &to, const Entries &entries) {
  to.number(static_cast<uint32_t>(entries.list.size()));
  const Entry none{};
  for (size_t i = 0; i < entries.list.size(); ++i) put(to, entries.list[i], i ? entries.list[i - 1] : none);
}
void put(Writer &to, const Start &start) {
  to.number(start.world_size);
  to.bytes(start.session.data(), start.session.size());
}

void get(Reader &from, Join &join) {
  for (uint32_t *value : {&join.rank, &join.world_size, &join.attempt}) *value = from.number();
  join.host_id = from.text(most_name_bytes);
  join.host = from.text(most_name_bytes);
  join.listens = from.text(most_name_bytes);
}
void get(Reader &from, Hello &hello) {
  hello.wire_version = from.number();
  hello.rank = from.number();
  hello.library = from.text(most_name_bytes);
}
void get(Reader &from, Card &card) {
  card.rank = from.number();
  card.bytes = from.card();
}
void get(Reader &from, Admitted &admitted) {
  admitted.rank = from.number();
  admitted.host = from.text(most_name_bytes);
  admitted.address = from.text(most_name_bytes);
}
void get(Reader &from, Redirect &redirect) {
  redirect.rank = from.number();
  redirect.host = from.text(most_name_bytes);
  redirect.address = from.text(most_name_bytes);
}
void get(Reader &from, Gone &gone) { gone.rank = from.number(); }
void get(Reader &, Formed &) {}
void get(Reader &from, Refusal &refusal) {
  refusal.status = static_cast<int32_t>(from.number());
  refusal.rank = static_cast<int32_t>(from.number());
  refusal.text = from.text(most_text_bytes);
  refusal.party = static_cast<int32_t>(from.number());
}
void get(Reader &from, Entry &entry, const Entry &before) {
  entry.rank = from.number();
  entry.node = from.number();
  entry.host = from.text_of(from.block_after(bytes_of(before.host), most_name_bytes));
  entry.card = from.block_after(before.card, most_card_bytes);
}
void get(Reader &from, Entries &entries) {
  const Entry none{};
  for (uint32_t left = from.number(); left > 0 && from.well(); --left) {
    Entry entry;
    get(from, entry, entries.list.empty() ? none : entries.list.back());
    entries.list.push_back(std::move(entry));
  }
}
void get(Reader &from, Start &start) {
  start.world_size = from.number();
  from.nonce(start.session);
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

std::vector<SharedFrame> share_entries(std::vector<Entry> entries) {
  std::vector<SharedFrame> frames;
  Entries some;
  size_t bytes = 0, expanded = 0;
  for (Entry &entry : entries) {
    entry.host = name_of(std::move(entry.host), most_name_bytes);
    const size_t size = entry.host.size() + entry.card.size();
    if (!some.list.empty()) {
      const Entry &before = some.list.back();
      bytes += entry_bytes + SharedEnds(bytes_of(before.host), bytes_of(entry.host)).between(entry.host.size()) +
               SharedEnds(before.card, entry.card).between(entry.card.size());
      if (bytes > longest || expanded + size > most_expanded_bytes) frames.push_back(share(std::exchange(some, {})));
    }
    if (some.list.empty()) bytes = sizeof(uint32_t) + entry_bytes + size, expanded = 0;
    expanded += size;
    some.list.push_back(std::move(entry));
  }
  if (!some.list.empty()) frames.push_back(share(some));
  return frames;
}

Parsed parse(uint32_t kind, std::span<const std::byte> body) {
  switch (kind) {
    case Join::kind: return parse_as<Join>(body);
    case Refusal::kind: return parse_as<Refusal>(body);
    case Entries::kind: return parse_as<Entries>(body);
    case Start::kind: return parse_as<Start>(body);
    case Hello::kind: return parse_as<Hello>(body);
    case Card::kind: return parse_as<Card>(body);
    case Formed::kind: return parse_as<Formed>(body);
    case Admitted::kind: return parse_as<Admitted>(body);
    case Redirect::kind: return parse_as<Redirect>(body);
    case Gone::kind: return parse_as<Gone>(body);
    default: return {{}, format_text("no message has kind {}", kind)};
  }
}

}  // namespace fsdp::comm::message
