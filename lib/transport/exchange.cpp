// SPDX-License-Identifier: Apache-2.0

#include "transport/exchange.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace fsdp::transport {

namespace {

uint64_t hash_text(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;  // FNV-1a
  return hash;
}

std::string_view text_of(const std::vector<std::byte> &bytes) {
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

// The text comes after the head and is not cut.
std::string write_error(const Error &error) {
  const WireErrorHead head(error);
  return std::string(reinterpret_cast<const char *>(&head), sizeof head) + error.message;
}

Error read_error(std::string_view told, uint32_t world_rank, const std::string &what) {
  WireErrorHead head;
  if (told.size() < sizeof head)
    return {FSDP_INTERNAL, format_text("{}: rank {} is in trouble and does not say why", what, world_rank)};
  std::memcpy(static_cast<void *>(&head), told.data(), sizeof head);
  const std::string_view text = told.substr(sizeof head);
  const bool names_another = head.rank >= 0 && head.rank != static_cast<int32_t>(world_rank);
  if (names_another) return head.to_error(std::string(text));  // the text already names that rank
  head.rank = static_cast<int32_t>(world_rank);
  return head.to_error(format_text("rank {}: {}", world_rank, text));
}

}  // namespace

Ballot Ballot::of(uint32_t rank, const Saying &saying) noexcept {
  Ballot ballot;
  ballot.same = saying.same;
  ballot.first = ballot.last = rank;
  if (saying.troubled) ballot.troubled = rank;
  ballot.least_waited_ns = ballot.max_waited_ns = saying.waited_ns;
  return ballot;
}

// The result does not depend on the order or the grouping of the ballots.
void Ballot::add(const Ballot &other) noexcept {
  const bool other_first = other.first < first;
  const Ballot &low = other_first ? other : *this, &high = other_first ? *this : other;
  const uint32_t differs = high.same == low.same ? high.odd : high.first;
  const bool other_last =
      other.least_waited_ns < least_waited_ns || (other.least_waited_ns == least_waited_ns && other.last < last);
  const uint64_t said = low.same;
  odd = std::min(low.odd, differs);
  first = low.first;
  same = said;
  troubled = std::min(troubled, other.troubled);
  if (other_last) last = other.last, least_waited_ns = other.least_waited_ns;
  max_waited_ns = std::max(max_waited_ns, other.max_waited_ns);
}

void throw_troubled(Exchange &ranks, const Ballot &told, const std::optional<Error> &mine, const std::string &what) {
  const std::string own = mine && told.troubled == ranks.rank() ? write_error(*mine) : std::string();
  const auto all = ranks.all_gather(std::as_bytes(std::span(own)), what);
  await_readers(ranks);
  throw read_error(text_of(all[told.troubled]), ranks.world_rank(told.troubled), what);
}

void share_error(Exchange &ranks, const std::optional<Error> &mine, const std::string &what) {
  const Ballot told = ranks.agree({.troubled = mine.has_value()}, what.c_str());
  if (told.troubled != Ballot::nobody) throw_troubled(ranks, told, mine, what);
}

void attempt_together(Exchange &ranks, const std::string &what, const std::function<void()> &step) {
  share_error(ranks, capture_error(step), what);
}

void agree_on(Exchange &ranks, const std::string &what, const std::string &said) {
  constexpr size_t most = 500;
  const std::string_view mine = std::string_view(said).substr(0, most);
  const Ballot told = ranks.agree({.same = hash_text(mine)}, what.c_str());
  if (told.odd == Ballot::nobody) return;
  const bool named = ranks.rank() == told.first || ranks.rank() == told.odd;
  const auto all = ranks.all_gather(std::as_bytes(std::span(named ? mine : std::string_view())), what);
  await_readers(ranks);
  const uint32_t rank = ranks.world_rank(told.odd);
  Error error(FSDP_MISMATCH,
              format_text("{} differs: rank {} says {}, and rank {} says {}", what, ranks.world_rank(told.first),
                          text_of(all[told.first]), rank, text_of(all[told.odd])));
  error.rank = static_cast<int32_t>(rank);
  throw error;
}

void await_readers(Exchange &ranks) noexcept {
  try {
    ranks.barrier("the end of what failed");
  } catch (...) {
  }
}

}  // namespace fsdp::transport
