// SPDX-License-Identifier: Apache-2.0
// What ranks and rank 0 tell each other at a TCP rendezvous after both have proven the job secret: bodies of frames.
// Pure functions of bytes: a body is a message exactly, or a reason why it is none.
//
//   rank r -> 0   Hello, Join and, when it has one, its Card
//   0 -> r        Refused, Redirect or Admitted; when all have joined: an Entry of each rank, in their order, in some
//                 Entries; and Start
//
// and from then on, until all have met:
//
//   r -> 0           Report: why the job cannot form, as far as rank r knows
//   0 -> r           Verdict: what rank 0 concludes from all reports
//   r -> 0, 0 -> r   Formed: the sender needs nothing more of this connection
//
// Between r and 0 may be other ranks. They say Admitted and Formed themselves, pass all else on as it is, and report
// which ranks below them died.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "membership/verdict.h"
#include "membership/wire/frame.h"
#include "membership/wire/secret.h"

namespace fsdp::membership::message {

// What the roster says of some ranks: the body of a message, which is also how every rank of a large job keeps it.
// Pure.
//
//   body   first rank, count; of each rank in turn: host's number, name and card, each in what it differs from the one
//          before it: bytes that are the same at the front, and at the back, and those between

constexpr uint32_t most_card_bytes = 16384;
constexpr uint32_t most_name_bytes = 255;

// A name as messages carry it: cut where it is too long, and what is not printable is '?'.
std::string name_of(std::string value, uint32_t most);

// node: the number of the rank's host. What it points to is there until the next one is read.
struct RosterEntry {
  uint32_t rank = 0, node = 0;
  std::string_view host = {};
  std::span<const std::byte> card = {};
};

// Reads a body that a peer has made, entry by entry.
class EntryReader {
 public:
  explicit EntryReader(std::span<const std::byte> body);
  // False: that was the last one, or something is wrong.
  bool next(RosterEntry &entry);
  // Empty: nothing is.
  const std::string &problem() const noexcept { return problem_; }

 private:
  struct PartSizes {
    uint16_t front, back, between;
  };
  template <class Numbers>
  Numbers numbers();
  std::span<const std::byte> take(size_t bytes);
  std::span<const std::byte> cut_off();
  // Returns what has been put in the place of the value's middle.
  std::span<const std::byte> follow(std::vector<std::byte> &value, uint32_t most);
  void wrong(std::string problem);

  std::span<const std::byte> rest_;
  size_t bytes_;
  uint32_t rank_ = 0, left_ = 0;
  std::vector<std::byte> host_, card_;
  std::string problem_;
};

class Entries {
 public:
  static constexpr uint32_t kind = 3;

  explicit Entries(uint32_t first_rank = 0);
  Entries(std::initializer_list<RosterEntry> list);
  // Nothing, with the problem set, if that is not what it is.
  static Entries parse(std::span<const std::byte> body, std::string &problem);

  const std::vector<std::byte> &body() const noexcept { return body_; }
  uint32_t first_rank() const noexcept;
  uint32_t size() const noexcept { return static_cast<uint32_t>(nodes_.size()); }
  const std::vector<uint32_t> &nodes() const noexcept { return nodes_; }  // of each of its ranks
  // Of the next rank, whatever the entry says of it.
  void add(const RosterEntry &entry);
  // Is there room for it in a body of at most so many bytes?
  bool takes(const RosterEntry &entry, size_t most_bytes) const;

 private:
  std::vector<std::byte> body_;
  std::vector<uint32_t> nodes_;
  std::vector<std::byte> host_, card_;  // of the last one that was added
};

constexpr uint32_t most_text_bytes = 480;
constexpr uint32_t longest = most_card_bytes + 2 * most_name_bytes + 64;  // body of any message
static_assert(sizeof(Report) <= longest && std::has_unique_object_representations_v<Report> &&
              std::has_unique_object_representations_v<Verdict>);

// The same in all versions of the library, and the first message: what follows may be of another form.
struct Hello {
  static constexpr uint32_t kind = 5;
  uint32_t wire_version = 0, rank = 0;
  std::string library;
};
struct Join {
  static constexpr uint32_t kind = 1;
  uint32_t rank = 0, world_size = 0, attempt = 0;
  std::string host_id, host;
  std::string listens = {};  // the address at which ranks of other hosts may come to it; empty: none
};
// From the rank at the other end of the connection.
struct Admitted {
  static constexpr uint32_t kind = 8;
  uint32_t rank = 0;
  std::string host;
  std::string address = {};  // to ranks of its own host: numeric, of the interface by which that reaches rank 0
};
// Go there: the sender has as many as it takes.
struct Redirect {
  static constexpr uint32_t kind = 9;
  uint32_t rank = 0;  // the rank that listens there
  std::string host, address;
};
// Making one takes a while: a rank that dies over it is known already.
struct Card {
  static constexpr uint32_t kind = 6;
  uint32_t rank = 0;
  std::vector<std::byte> bytes = {};
};
// The same in all versions of the library, as Hello is.
struct Refused {
  static constexpr uint32_t kind = 2;
  int32_t status = 0;  // FSDP_OK: come again
  int32_t rank = -1;   // to blame
  std::string text = {};
  int32_t to = -1;  // the rank that it is for, which has joined through another one; -1: the rank that reads it
};
struct Start {
  static constexpr uint32_t kind = 4;
  uint32_t world_size = 0;
  Nonce session{};  // names the meetings of each host
};

struct Formed {
  static constexpr uint32_t kind = 7;
};

using Message = std::variant<Join, Refused, Entries, Start, Hello, Card, Formed, Admitted, Redirect, Report, Verdict>;

// The whole frame, as a stream sends it. Texts that are too long are cut, what is not printable becomes '?'.
std::vector<std::byte> write(const Message &message);
SharedFrame share(const Message &message);

struct Parsed {
  std::variant<std::monostate, Join, Refused, Entries, Start, Hello, Card, Formed, Admitted, Redirect, Report, Verdict>
      message;
  std::string problem;  // of none
};
Parsed parse(uint32_t kind, std::span<const std::byte> body);

}  // namespace fsdp::membership::message
