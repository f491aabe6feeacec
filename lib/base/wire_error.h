// SPDX-License-Identifier: Apache-2.0
// Texts and errors of a fixed length, for messages between processes and for shared memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace fsdp {

// A text of at most N - 1 bytes, with zeros behind it. A peer may have written it, so readers do not trust its end.
template <size_t N>
struct WireText {
  char bytes[N] = {};

  WireText() noexcept = default;
  WireText(std::string_view text) noexcept { set(text); }
  // Cuts a longer text after the last character that fits.
  void set(std::string_view text) noexcept {
    const size_t length = cut_length(text, N - 1);
    std::memcpy(bytes, text.data(), length);
    std::memset(bytes + length, 0, N - length);
  }
  std::string_view view() const noexcept { return {bytes, ::strnlen(bytes, N)}; }
  std::string copy() const { return std::string(view()); }
};

// An error without its text.
struct WireErrorHead {
  int32_t code = 0;  // Error.origin_code: the codes of all origins are ints
  int32_t rank = -1;
  int16_t status = FSDP_OK;
  uint8_t origin = FSDP_ORIGIN_FSDP;
  uint8_t unused = 0;  // avoids padding, so that no uninitialized byte is sent

  WireErrorHead() noexcept = default;
  explicit WireErrorHead(const Error &error) noexcept
      : code(static_cast<int32_t>(error.origin_code)),
        rank(error.rank),
        status(static_cast<int16_t>(error.status)),
        origin(static_cast<uint8_t>(error.origin)) {}
  bool failed() const noexcept { return status != FSDP_OK; }
  Error to_error(std::string text) const { return {status, std::move(text), rank, origin, code}; }
};
static_assert(std::has_unique_object_representations_v<WireErrorHead>);

template <size_t N>
struct WireError : WireErrorHead {
  WireText<N> text;

  WireError() noexcept = default;
  explicit WireError(const Error &error) noexcept : WireErrorHead(error), text(error.message) {}
  Error to_error() const { return WireErrorHead::to_error(text.copy()); }
};

}  // namespace fsdp
