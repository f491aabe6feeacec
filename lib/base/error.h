// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library, with the contents of fsdp_error. No exception crosses the C boundary.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text.h"
#include "fsdp.h"

namespace fsdp {

// Like fmt::format, but compiled once, in error.cpp, and not in every file that formats.
std::string vformat_text(fmt::string_view format, fmt::format_args args);

template <class... Args>
std::string format_text(fmt::format_string<Args...> format, Args &&...args) {
  return vformat_text(format, fmt::make_format_args(args...));
}

class Error : public std::exception {
 public:
  Error(fsdp_status status, std::string message, int32_t rank = -1, fsdp_origin origin = FSDP_ORIGIN_FSDP,
        int64_t origin_code = 0)
      : status(status), origin(origin), origin_code(origin_code), rank(rank), message(std::move(message)) {}

  const char *what() const noexcept override { return message.c_str(); }

  fsdp_status status;
  fsdp_origin origin;
  int64_t origin_code;
  int32_t rank;                 // the rank to blame, -1 if none
  bool ends_context = true;     // false: it ended only its call, although its status usually ends the context
  std::vector<uint32_t> ranks;  // all ranks to blame if there are several, ascending; empty: `rank` alone
  std::string message;
};

template <class... Args>
[[noreturn]] void fail(fsdp_status status, fmt::format_string<Args...> format, Args &&...args) {
  throw Error(status, format_text(format, std::forward<Args>(args)...));
}

// Throws an Error that blames a rank.
template <class... Args>
[[noreturn]] void fail_rank(fsdp_status status, int32_t rank, fmt::format_string<Args...> format, Args &&...args) {
  throw Error(status, format_text(format, std::forward<Args>(args)...), rank);
}

// Converts the exception that is being handled to an Error. Must be called in a catch block.
Error current_error();
// Runs the body. If it throws, returns the exception as an Error; else returns nothing.
template <class Body>
std::optional<Error> capture_error(Body &&body) {
  try {
    body();
    return {};
  } catch (...) {
    return current_error();
  }
}

// Throws for a system call that failed with errno `code`. `what` names the attempted action; the text of `code` is
// added.
[[noreturn]] void fail_errno(int code, const std::string &what);

// Texts and errors of a fixed length, for messages between processes and for shared memory.

// A text of at most N - 1 bytes, followed by zeros. A peer may have written it, so readers do not rely on its end.
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
  uint8_t unused = 0;  // fills the padding, so that no uninitialized byte is sent

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
