// SPDX-License-Identifier: Apache-2.0

#include "base/text.h"

#include <algorithm>
#include <cstdint>

#include "base/error.h"

namespace fsdp {

namespace {

// Length in bytes of the UTF-8 character at the start of the text; 0 if the text does not start with a valid character.
// Overlong encodings and surrogates are not valid.
size_t character_length(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const size_t length = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
  if (length == 0 || length > text.size()) return 0;
  uint32_t code = length == 1 ? lead : lead & (0x7Fu >> length);
  for (size_t k = 1; k < length; ++k) {
    const auto next = static_cast<unsigned char>(text[k]);
    if (next >> 6 != 2) return 0;
    code = code << 6 | (next & 0x3F);
  }
  constexpr uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  return code < least[length] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000) ? 0 : length;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = character_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string as_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t length = character_length(text);
    if (length)
      result += text.substr(0, length);
    else
      result += '?';
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return result;
}

size_t cut_length(std::string_view text, size_t most) noexcept {
  if (text.size() <= most) return text.size();
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return most;
}

std::string quote_json(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    if (static_cast<unsigned char>(c) < 0x20)
      quoted += format_text("\\u{:04x}", static_cast<unsigned>(c));
    else
      quoted.push_back(c);
  }
  return quoted + '"';
}

}  // namespace fsdp
