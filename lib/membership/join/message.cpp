// SPDX-License-Identifier: Apache-2.0
#include "membership/join/message.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace fsdp::membership::message {
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
  std::string text(uint32_t most) {
    const auto part = block(most);
    std::string value(reinterpret_cast<const char *>(part.data()), part.size());
    if (!std::all_of(value.begin(), value.end(), printable)) wrong("a text has control characters");
    return value;
  }
  std::vector<std::byte> card() {
    const auto part = block(most_card_bytes);
    return {part.begin(), part.end()};
  }
  void nonce(Nonce &to) {
    const auto part = take(to.size());
    if (!part.empty()) std::memcpy(to.data(), part.data(), to.size());
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
void put(Writer &to, const Entries &entries) { to.bytes(entries.body().data(), entries.body().size()); }
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
    case Refusal::kind: return parse_as<Refusal>(body);
    case Entries::kind: return parse_entries(body);
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

}  // namespace fsdp::membership::message
