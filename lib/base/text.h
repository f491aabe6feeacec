// SPDX-License-Identifier: Apache-2.0
// UTF-8, the encoding of callers' texts and of messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fsdp {

bool is_utf8(std::string_view text);
// Not a control character. Bytes of characters beyond ASCII are printable.
inline bool is_printable(char c) noexcept { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; }
// Replaces each byte that is not part of valid UTF-8 by '?', because a binding that decodes a message must not fail.
std::string as_utf8(std::string_view text);
// The length of the longest prefix that has at most `most` bytes and cuts no character. The text must be UTF-8.
size_t cut_length(std::string_view text, size_t most) noexcept;

// The text as a JSON string. UTF-8 is copied as it is.

std::string quote_json(std::string_view text);

}  // namespace fsdp
