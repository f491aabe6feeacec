// SPDX-License-Identifier: Apache-2.0
// The messages between rank 0 and the others at a TCP rendezvous, after both have proven the job secret. Pure functions
// of bytes: the body of a frame is exactly one message, or parse says why it is not.
//
//   rank r -> 0   Hello, Join and, when it has one, its Card
//   0 -> r        Refused, Redirect or Admitted; when all have joined: an entry for each rank, in order, in one or more
//                 Entries; then Start
//
// and from then on, until all have met:
//
//   r -> 0           Report: why the job cannot form, as far as rank r knows
//   0 -> r           Verdict: what rank 0 concludes from all reports
//   r -> 0, 0 -> r   Formed: the sender needs nothing more of this connection
//
// Other ranks may be between r and 0. They send Admitted and Formed themselves, pass on everything else unchanged, and
// report which ranks below them died.
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

// A section of the roster: the body of a message, which each rank also stores in this form. Pure.
//
//   body   first rank, count; then for each rank: its host's number, name and card. Name and card are coded by their
//          difference from those of the rank before: how many bytes at the front and at the back are the same, how
//          many are between, and the bytes between

constexpr uint32_t max_card_bytes = 16384;
constexpr uint32_t max_name_bytes = 255;

// A name in the form for messages: cut at the end if it is too long, with '?' for unprintable characters.
std::string name_of(std::string value, uint32_t most);

// `node`: the number of the rank's host. `host` and `card` are valid until the reader reads the next entry.
struct RosterEntry {
  uint32_t rank = 0, node = 0;
  std::string_view host = {};
  std::span<const std::byte> card = {};
};

// Reads, entry by entry, a body that a peer has sent.
class EntryReader {
 public:
  explicit EntryReader(std::span<const std::byte> body);
  // Returns false if there is no further entry, or something is wrong.
  bool next(RosterEntry &entry);
  // Empty if nothing is wrong.
  const std::string &problem() const noexcept { return problem_; }

 private:
  struct PartSizes {
    uint16_t front, back, between;
  };
  template <class Numbers>
  Numbers numbers();
  std::span<const std::byte> take(size_t bytes);
  std::span<const std::byte> cut_off();
  // Reads a difference and applies it to `value`. Returns the bytes between, which the message has in full.
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
  // Returns nothing, and sets `problem`, if the body is not correct.
  static Entries parse(std::span<const std::byte> body, std::string &problem);

  const std::vector<std::byte> &body() const noexcept { return body_; }
  uint32_t first_rank() const noexcept;
  uint32_t size() const noexcept { return static_cast<uint32_t>(nodes_.size()); }
  const std::vector<uint32_t> &nodes() const noexcept { return nodes_; }  // number of the host, by rank
  // Adds an entry for the next rank; entry.rank is ignored.
  void add(const RosterEntry &entry);
  // Is there room for the entry in a body of at most max_bytes bytes?
  bool takes(const RosterEntry &entry, size_t max_bytes) const;

 private:
  std::vector<std::byte> body_;
  std::vector<uint32_t> nodes_;
  std::vector<std::byte> host_, card_;  // host and card of the last entry that was added
};

constexpr uint32_t max_text_bytes = 480;
constexpr uint32_t longest = max_card_bytes + 2 * max_name_bytes + 64;  // maximum body of any message
static_assert(sizeof(Report) <= longest && std::has_unique_object_representations_v<Report> &&
              std::has_unique_object_representations_v<Verdict>);

// The first message, with the same form in all versions of the library. Later messages may differ between versions.
struct Hello {
  static constexpr uint32_t kind = 5;
  uint32_t wire_version = 0, rank = 0;
  std::string library;
};
struct Join {
  static constexpr uint32_t kind = 1;
  uint32_t rank = 0, world_size = 0, attempt = 0;
  std::string host_id, host;
  std::string listens = {};  // the address at which this rank accepts ranks of other hosts; empty: it accepts none
};
// Sent by the rank at the other end of the connection.
struct Admitted {
  static constexpr uint32_t kind = 8;
  uint32_t rank = 0;
  std::string host;
  // Sent only to ranks of the same host: the numeric address of the interface through which this host reaches rank 0.
  std::string address = {};
};
// Tells the reader to join at another rank, because the sender already has its maximum number of ranks.
struct Redirect {
  static constexpr uint32_t kind = 9;
  uint32_t rank = 0;  // the rank that listens there
  std::string host, address;
};
// Sent after Join, because making a card takes time: if a rank dies while it makes its card, the others know which rank
// died.
struct Card {
  static constexpr uint32_t kind = 6;
  uint32_t rank = 0;
  std::vector<std::byte> bytes = {};
};
// Has the same form in all versions of the library, as Hello does.
struct Refused {
  static constexpr uint32_t kind = 2;
  int32_t status = 0;  // FSDP_OK: the rank should come again
  int32_t rank = -1;   // the rank to blame; -1: none
  std::string text = {};
  int32_t to = -1;  // the refused rank, if it joined through another rank; -1: the rank that reads this
};
struct Start {
  static constexpr uint32_t kind = 4;
  uint32_t world_size = 0;
  Nonce session{};  // a part of the name under which the ranks of each host meet
};

struct Formed {
  static constexpr uint32_t kind = 7;
};

using Message = std::variant<Join, Refused, Entries, Start, Hello, Card, Formed, Admitted, Redirect, Report, Verdict>;

// Returns the whole frame, as a stream sends it. Texts that are too long are cut, and unprintable characters become
// '?'.
std::vector<std::byte> write(const Message &message);
SharedFrame share(const Message &message);

struct Parsed {
  std::variant<std::monostate, Join, Refused, Entries, Start, Hello, Card, Formed, Admitted, Redirect, Report, Verdict>
      message;
  std::string problem;  // says why there is no message
};
Parsed parse(uint32_t kind, std::span<const std::byte> body);

}  // namespace fsdp::membership::message
