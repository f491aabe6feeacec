// SPDX-License-Identifier: Apache-2.0
// Which rank or link is to blame for the end of a job, and why. A rank reports its findings, and the reports become one
// verdict, which all ranks return. Rank 0 decides while the job forms, and the coordinator while it runs. Reports and
// verdicts have the same layout in shared memory, on the unix socket of a host, and between hosts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace fsdp::membership {

// destroyed: a rank has destroyed its context without closing it; this concerns only ranks that wait for that rank.
enum class FailureKind : uint32_t { none, died, left, aborted, failed, mismatch, timeout, stopped, cut, destroyed };

// A set of ranks. `most`: the maximum number of ranks in a job (max_ranks in job.h).
class RankSet {
 public:
  static constexpr uint32_t most = 16384;
  void add(uint32_t rank) noexcept {
    if (rank < most) words_[rank / 64] |= uint64_t{1} << rank % 64;
  }
  void add(const RankSet &others) noexcept {
    for (uint32_t i = 0; i < most / 64; ++i) words_[i] |= others.words_[i];
  }
  bool contains(uint32_t rank) const noexcept { return rank < most && words_[rank / 64] >> rank % 64 & 1; }
  bool contains(const RankSet &others) const noexcept {
    uint64_t missing = 0;
    for (uint32_t i = 0; i < most / 64; ++i) missing |= others.words_[i] & ~words_[i];
    return missing == 0;
  }
  bool empty() const noexcept {
    uint64_t any = 0;
    for (const uint64_t word : words_) any |= word;
    return any == 0;
  }
  // True if all ranks of the set are below `count`.
  bool within(uint32_t count) const noexcept {
    uint64_t beyond = count < most && count % 64 ? words_[count / 64] >> count % 64 : 0;
    for (uint32_t i = (count + 63) / 64; i < most / 64; ++i) beyond |= words_[i];
    return beyond == 0;
  }
  std::vector<uint32_t> list() const;

 private:
  uint64_t words_[most / 64] = {};
};

// Two nodes that do not reach each other, first < second.
struct CutLink {
  uint16_t first, second;
  bool operator==(const CutLink &) const = default;
};

// An accused rank or link, and the reason. A peer may have written it, so readers do not trust its counts.
struct Accusation {
  static constexpr uint32_t max_links = 64;

  FailureKind kind = FailureKind::none;
  int32_t rank = -1;         // becomes Error.rank: the first of the ranks to blame; -1: a link is to blame
  uint32_t where_bytes = 0;  // length of the text's prefix that names the place: "reduce_scatter of 'layer.3' (#17): "
  uint32_t link_count = 0;   // number of links, for FailureKind::cut
  fsdp_origin origin = FSDP_ORIGIN_FSDP;  // the library or system that origin_code belongs to
  int32_t origin_code = 0;
  CutLink links[max_links] = {};
  RankSet ranks;  // all ranks to blame, including `rank`; not used if `rank` is -1
  WireText<944> text;

  std::string where() const;
  std::string what() const;  // the text after where()
};

// Sent up, to the rank that decides.
struct Report {
  static constexpr uint32_t kind = 103;
  Accusation accusation;
  int32_t last_of = -1;  // while the job forms: the rank that gives up with this report; -1: the sender goes on
  uint32_t unused = 0;   // fills the padding, so that no uninitialized byte is sent
};
// Sent down, to all ranks.
struct Verdict {
  static constexpr uint32_t kind = 104;
  Accusation accusation;
};

Accusation accuse_rank(FailureKind kind, uint32_t rank, const std::string &text) noexcept;
// The first rank becomes Error.rank.
Accusation accuse_ranks(FailureKind kind, std::span<const uint32_t> ranks, const std::string &text) noexcept;
Accusation accuse_death(uint32_t rank);
// `where`: the operation in which the deaths were found, for messages; may be empty. `what`: a text about the ranks if
// more is known than their death; else empty.
Accusation accuse_dead(const std::string &where, const RankSet &ranks, const std::string &what = {});
std::string death_text(const RankSet &ranks);
// True if no peer has caused the error. In that case rank `self` returns the error unchanged, whatever the verdict is.
bool is_own(const Error &error, uint32_t self);
// The accusation with which rank `self` of that host reports an error while the job forms. An error of its own (is_own)
// becomes the failure of this rank. Unprintable characters of the text are replaced.
Accusation accuse_for(const Error &error, uint32_t self, const std::string &host);
// The error that rank `self` returns for the accusation.
Error error_of(const Accusation &accusation, uint32_t self);
// Are the kind and the ranks of the accusation, which a peer wrote, possible in a job of world_size ranks?
bool is_believable(const Accusation &accusation, uint32_t world_size);
// "rank 3", "ranks 3, 5"
std::string rank_list(std::span<const uint32_t> ranks);

}  // namespace fsdp::membership
