// SPDX-License-Identifier: Apache-2.0
// UTF-8: what callers give and what messages hold.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fsdp {

bool is_utf8(std::string_view text);
// Not a control character. Bytes of characters beyond ASCII are printable.
inline bool is_printable(char c) noexcept { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; }
// Bytes that are none become '?': a binding that decodes a message must not fail at it.
std::string as_utf8(std::string_view text);
// At most so many bytes of a text in UTF-8, and no character in part.
size_t cut_length(std::string_view text, size_t most) noexcept;

// Text as a JSON string. UTF-8 passes as it is.

std::string quote_json(std::string_view text);

}  // namespace fsdp
