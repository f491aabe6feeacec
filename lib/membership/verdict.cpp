// SPDX-License-Identifier: Apache-2.0
#include "membership/verdict.h"

#include <algorithm>
#include <string_view>

#include "base/text.h"

namespace fsdp::membership {
namespace {

fsdp_status status_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::mismatch: return FSDP_MISMATCH;
    case FailureKind::timeout: return FSDP_TIMEOUT;
    default: return FSDP_PEER_FAILED;
  }
}

// The text for a verdict that has none, because a rank may die between its decision and the write of the text.
std::string short_text(FailureKind kind, int32_t rank) {
  switch (kind) {
    case FailureKind::died: return format_text("rank {} died", rank);
    case FailureKind::left: return format_text("rank {} left the job", rank);
    case FailureKind::aborted: return format_text("rank {} aborted", rank);
    case FailureKind::destroyed: return format_text("rank {} destroyed its context", rank);
    case FailureKind::mismatch: return format_text("rank {} called something else than its peers", rank);
    case FailureKind::timeout: return format_text("rank {} has not come in time", rank);
    case FailureKind::stopped: return format_text("rank {} does not respond", rank);
    case FailureKind::cut: return "the network between nodes is cut";
    default: return format_text("rank {} failed", rank);
  }
}

}  // namespace

std::vector<uint32_t> RankSet::list() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < most; ++rank)
    if (contains(rank)) ranks.push_back(rank);
  return ranks;
}

std::string Accusation::where() const { return std::string(text.view().substr(0, where_bytes)); }

std::string Accusation::what() const {
  const std::string_view all = text.view();
  return std::string(all.substr(std::min<size_t>(where_bytes, all.size())));
}

std::string rank_list(std::span<const uint32_t> ranks) {
  return format_text("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

Accusation accuse_rank(FailureKind kind, uint32_t rank, const std::string &text) noexcept {
  Accusation accusation;
  accusation.kind = kind;
  accusation.rank = static_cast<int32_t>(rank);
  accusation.ranks.add(rank);
  accusation.text.set(text);
  return accusation;
}

Accusation accuse_ranks(FailureKind kind, std::span<const uint32_t> ranks, const std::string &text) noexcept {
  Accusation accusation = accuse_rank(kind, ranks.front(), text);
  for (const uint32_t rank : ranks) accusation.ranks.add(rank);
  return accusation;
}

std::string death_text(const RankSet &ranks) { return rank_list(ranks.list()) + " died"; }

Accusation accuse_death(uint32_t rank) {
  return accuse_rank(FailureKind::died, rank, format_text("rank {} died", rank));
}

Accusation accuse_dead(const std::string &where, const RankSet &ranks, const std::string &what) {
  Accusation accusation =
      accuse_rank(FailureKind::died, ranks.list().front(), where + (what.empty() ? death_text(ranks) : what));
  accusation.ranks = ranks;
  accusation.where_bytes = static_cast<uint32_t>(where.size());
  return accusation;
}

bool is_own(const Error &error, uint32_t self) {
  if (error.rank >= 0) return error.rank == static_cast<int32_t>(self);
  return error.status != FSDP_PEER_FAILED && error.status != FSDP_TIMEOUT;
}

namespace {

FailureKind kind_of(fsdp_status status) {
  switch (status) {
    case FSDP_MISMATCH: return FailureKind::mismatch;
    case FSDP_TIMEOUT: return FailureKind::timeout;
    default: return FailureKind::failed;
  }
}

}  // namespace

Accusation accuse_for(const Error &error, uint32_t self, const std::string &host) {
  std::string text = error.message;
  std::ranges::replace_if(
      text, [](char c) { return !is_printable(c); }, '?');
  if (is_own(error, self))
    return accuse_rank(FailureKind::failed, self,
                       format_text("rank {} on {} gave up before the job had formed: {}", self, host, text));
  Accusation accusation;
  accusation.kind = kind_of(error.status);
  accusation.rank = error.rank;
  for (const uint32_t blamed : error.ranks) accusation.ranks.add(blamed);
  if (error.rank >= 0) accusation.ranks.add(static_cast<uint32_t>(error.rank));
  accusation.text.set(text);
  return accusation;
}

bool is_believable(const Accusation &accusation, uint32_t world_size) {
  return accusation.kind > FailureKind::none && accusation.kind <= FailureKind::destroyed && accusation.rank >= -1 &&
         accusation.rank < static_cast<int32_t>(world_size) && accusation.ranks.within(world_size);
}

Error error_of(const Accusation &accusation, uint32_t self) {
  const bool own_abort = accusation.kind == FailureKind::aborted && accusation.rank == static_cast<int32_t>(self);
  // A peer may have written any other number.
  const bool known = accusation.origin == FSDP_ORIGIN_UCX || accusation.origin == FSDP_ORIGIN_OS;
  std::string text = accusation.text.copy();
  if (text.empty()) text = short_text(accusation.kind, accusation.rank);
  Error error(own_abort ? FSDP_ABORTED : status_of(accusation.kind), std::move(text), accusation.rank,
              known ? accusation.origin : FSDP_ORIGIN_FSDP, known ? accusation.origin_code : 0);
  if (accusation.rank >= 0) error.ranks = accusation.ranks.list();  // a cut link blames no rank
  return error;
}

}  // namespace fsdp::membership
