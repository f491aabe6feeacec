// SPDX-License-Identifier: Apache-2.0
// What the roster says of some ranks: the body of a message, which is also how every rank of a large job keeps it.
// Pure.
//
//   body   first rank, count; of each rank in turn: host's number, name and card, each in what it differs from the one
//          before it: bytes that are the same at the front, and at the back, and those between
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::membership::message {

constexpr uint32_t most_card_bytes = 16384;
constexpr uint32_t most_name_bytes = 255;

// A name as messages carry it: cut where it is too long, and what is not printable is '?'.
std::string name_of(std::string value, uint32_t most);
bool printable(char c);

// node: the number of the rank's host. Whoever reads one has it until the next one is read.
struct Entry {
  uint32_t rank = 0, node = 0;
  std::string_view host = {};
  std::span<const std::byte> card = {};
};

// Reads a body, whoever has made it, entry by entry.
class EntryReader {
 public:
  explicit EntryReader(std::span<const std::byte> body);
  // False: that was the last one, or something is wrong.
  bool next(Entry &entry);
  // Empty: nothing is.
  const std::string &problem() const noexcept { return problem_; }

 private:
  struct Sizes {
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
  Entries(std::initializer_list<Entry> list);
  // Nothing, with the problem set, if that is not what it is.
  static Entries parse(std::span<const std::byte> body, std::string &problem);

  const std::vector<std::byte> &body() const noexcept { return body_; }
  uint32_t first_rank() const noexcept;
  uint32_t size() const noexcept { return static_cast<uint32_t>(nodes_.size()); }
  const std::vector<uint32_t> &nodes() const noexcept { return nodes_; }  // of each of its ranks
  // Of the next rank, whatever the entry says of it.
  void add(const Entry &entry);
  // Is there room for it in a body of at most so many bytes?
  bool takes(const Entry &entry, size_t most_bytes) const;

 private:
  std::vector<std::byte> body_;
  std::vector<uint32_t> nodes_;
  std::vector<std::byte> host_, card_;  // of the last one that was added
};

}  // namespace fsdp::membership::message
