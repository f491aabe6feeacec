// SPDX-License-Identifier: Apache-2.0
// The progress of a rank's part of a save, which the rank posts to the others while all of them train on.
//
//   a rank     writing -> written | failed -> heard (the first rank has said how the save ended), or left without that
//   the first  writing -> (all have written) [collecting ->] committing -> committed | failed
//              writing -> (a rank has failed) giving_up -> failed: by then no rank uses the folder any more
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "checkpoint/plan/model_shards.h"
#include "transport/team.h"

namespace fsdp::checkpoint {

// A report has room for one file of each kind. If ranks have more files, the first rank collects the others before it
// commits: it posts the number of the files that it wants, and every rank posts its files with that number.
enum class SaveState : uint8_t {
  none,
  writing,
  written,
  giving_up,
  committing,
  committed,
  failed,
  heard,
  left,
  collecting
};

// Has a rank other than the first failed?
constexpr bool has_failed(SaveState state) { return state == SaveState::failed || state == SaveState::left; }

// A file that is on the disk; with 0 bytes, the rank has no file of the kind.
struct ReportedFile {
  uint64_t bytes = 0;
  std::array<uint8_t, 16> header_sum{};

  // These functions convert the checksum from and to 32 hexadecimal digits.
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

// The error text of a rank that gave up because another rank failed.
inline constexpr std::string_view failed_elsewhere = "another rank's part of this save has failed";
// The fixed part of a report, which a rank always posts.
struct SaveWord {
  uint64_t save = 0;              // number of the save: posts of an earlier save are ignored
  WireErrorHead error;            // used with giving_up and failed
  uint32_t file_number : 24 = 0;  // number of the reported files (written) or of the requested ones (collecting)
  SaveState state : 8 = SaveState::none;
  std::array<ReportedFile, shard_kinds> files{};
};
static_assert(sizeof(SaveWord) <= membership::post_bytes);

// Does the report have the rank's files of this number?
constexpr bool has_reported(const SaveWord &report, uint32_t number) {
  return report.state == SaveState::written && report.file_number == number;
}

// A report with the text of the rank's failure, if the rank has failed.
struct SaveReport : SaveWord {
  WireText<membership::post_text_bytes> text;

  void set(const Error &failure) noexcept { error = WireErrorHead(failure), text.set(failure.message); }
  // The text to post. There are few places for texts, so ranks that only repeat another rank's failure post no text.
  std::string_view posted() const noexcept {
    return text.view() == failed_elsewhere ? std::string_view() : text.view();
  }
  Error to_error() const {
    std::string why = text.copy();
    if (why.empty() && error.status == FSDP_ABORTED) why = failed_elsewhere;
    if (why.empty()) why = "its part of the save has failed, as those of many ranks";
    Error failure = error.to_error(std::move(why));
    failure.ends_context = false;  // a failed save ends only that save
    return failure;
  }
};

}  // namespace fsdp::checkpoint
