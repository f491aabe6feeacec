// SPDX-License-Identifier: Apache-2.0
// How far a rank is with its part of a save, as it shows that to others while all of them train on.
//
//   a rank     writing -> written | failed -> (the first has said how it ended) heard, or left without that
//   the first  writing -> (written by all) committing -> committed | failed
//              writing -> (a rank has failed) giving_up -> failed: by then all have let go of the folder
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/plan/model_shards.h"
#include "comm/team.h"

namespace fsdp::checkpoint {

enum class SaveState : uint32_t { none, writing, written, giving_up, committing, committed, failed, heard, left };

// Of a rank that is not the first.
constexpr bool has_failed(SaveState state) { return state == SaveState::failed || state == SaveState::left; }

// A file that is on the disk; of no bytes: the rank has none of the kind.
struct ReportedFile {
  uint64_t bytes = 0;
  std::array<char, 32> header_sum{};
};

struct SaveReport {
  uint64_t save = 0;  // which one: what lies there of an earlier one is none of this
  SaveState state = SaveState::none;
  fsdp_status status = FSDP_OK;  // of giving_up and failed: why
  int32_t rank = -1;             // ... whose fault it was
  fsdp_origin origin = FSDP_ORIGIN_FSDP;
  int64_t code = 0;
  std::array<ReportedFile, shard_kinds> files{};
  std::array<char, 320> text{};

  void set(const Error &error) noexcept {
    status = error.status, rank = error.rank, origin = error.origin, code = error.origin_code;
    const std::string_view message = error.what();
    text = {};
    std::memcpy(text.data(), message.data(), cut_length(message, text.size() - 1));
  }
  // Of another process: its end is not trusted.
  Error error() const {
    Error told(status, std::string(text.data(), ::strnlen(text.data(), text.size())), rank, origin, code);
    told.ends_context = false;  // that a save has failed is the end of that save alone
    return told;
  }
};
static_assert(sizeof(SaveReport) <= comm::World::post_bytes);

}  // namespace fsdp::checkpoint
