// SPDX-License-Identifier: Apache-2.0
// How far a rank is with its part of a save, as it shows that to others while all of them train on.
//
//   a rank     writing -> written | failed -> (the first has said how it ended) heard, or left without that
//   the first  writing -> (written by all) committing -> committed | failed
//              writing -> (a rank has failed) giving_up -> failed: by then all have let go of the folder
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/plan/model_shards.h"
#include "transport/team.h"

namespace fsdp::checkpoint {

enum class SaveState : uint8_t { none, writing, written, giving_up, committing, committed, failed, heard, left };

// Of a rank that is not the first.
constexpr bool has_failed(SaveState state) { return state == SaveState::failed || state == SaveState::left; }

// A file that is on the disk; of no bytes: the rank has none of the kind.
struct ReportedFile {
  uint64_t bytes = 0;
  std::array<uint8_t, 16> header_sum{};

  // From 32 hexadecimal digits, and to them.
  void set_header_sum(std::string_view digits) noexcept {
    for (size_t i = 0; i < header_sum.size() && 2 * i + 2 <= digits.size(); ++i)
      (void)std::from_chars(digits.data() + 2 * i, digits.data() + 2 * i + 2, header_sum[i], 16);
  }
  std::string header_sum_text() const {
    std::string digits;
    for (const uint8_t byte : header_sum) digits += format_text("{:02x}", byte);
    return digits;
  }
};

// What a rank says that gave up because of another one.
inline constexpr std::string_view failed_elsewhere = "another rank's part of this save has failed";

// What a rank posts in any case.
struct SaveWord {
  uint64_t save = 0;  // which one: what lies there of an earlier one is none of this
  SaveState state = SaveState::none;
  uint8_t origin = FSDP_ORIGIN_FSDP;
  int16_t status = FSDP_OK;  // of giving_up and failed: why
  int32_t rank = -1;         // ... and which rank's fault it was
  int64_t code = 0;
  std::array<ReportedFile, shard_kinds> files{};
};
static_assert(sizeof(SaveWord) <= membership::post_bytes);

// ... and with the text of its failure, if it has one.
struct SaveReport : SaveWord {
  std::array<char, membership::post_text_bytes> text{};

  void set(const Error &error) noexcept {
    status = static_cast<int16_t>(error.status), rank = error.rank;
    origin = static_cast<uint8_t>(error.origin), code = error.origin_code;
    const std::string_view message = error.what();
    text = {};
    std::memcpy(text.data(), message.data(), cut_length(message, text.size() - 1));
  }
  // There are few places for texts: those are for ranks that have one of their own.
  std::string_view posted() const noexcept { return told() == failed_elsewhere ? std::string_view() : told(); }
  // Of another process: its end is not trusted.
  std::string_view told() const noexcept { return {text.data(), ::strnlen(text.data(), text.size())}; }
  Error error() const {
    std::string why(told());
    if (why.empty() && status == FSDP_ABORTED) why = failed_elsewhere;
    if (why.empty()) why = "its part of the save has failed, as those of many ranks";
    Error failure(status, why, rank, static_cast<fsdp_origin>(origin), code);
    failure.ends_context = false;  // that a save has failed is the end of that save alone
    return failure;
  }
};

}  // namespace fsdp::checkpoint
