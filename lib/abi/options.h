// SPDX-License-Identifier: Apache-2.0
// The rules for structs that grow: a caller's struct may be shorter than ours (older caller: the rest is zero), or longer
// (newer caller: what we do not know must be zero).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.h"
#include "fsdp.h"

namespace fsdp::abi {

// The size of each struct when it first appeared: what an older client may be built with. Never changes.
template <class T> inline constexpr uint64_t first_size = sizeof(T);
template <> inline constexpr uint64_t first_size<fsdp_context_options> = offsetof(fsdp_context_options, debug_delay_us);
template <> inline constexpr uint64_t first_size<fsdp_mesh_options> = offsetof(fsdp_mesh_options, ranks);
template <> inline constexpr uint64_t first_size<fsdp_model_options> = offsetof(fsdp_model_options, prefetch_bytes);
template <> inline constexpr uint64_t first_size<fsdp_stats> = offsetof(fsdp_stats, gather_wait_ns);
template <> inline constexpr uint64_t first_size<fsdp_error> = 40;  // the message may be cut short

// A struct_size beyond this was never set: the bytes behind the struct are not ours to read.
constexpr uint64_t most_size = 4096;

template <class T>
T read_options(const T *given, const char *call, const char *name) {
  T options{};
  options.struct_size = sizeof(T);
  if (!given) return options;
  const uint64_t size = given->struct_size;
  if (size < first_size<T>)
    fail(FSDP_INVALID_ARGUMENT, "{}: {}.struct_size is {}, at least {} is needed; set it to sizeof({})", call, name, size,
         first_size<T>, name);
  if (size > most_size)
    fail(FSDP_INVALID_ARGUMENT, "{}: {}.struct_size is {}, more than any release has; set it to sizeof({})", call, name, size, name);
  const auto *bytes = reinterpret_cast<const unsigned char *>(given);
  for (uint64_t i = sizeof(T); i < size; ++i)
    if (bytes[i])
      fail(FSDP_UNSUPPORTED, "{}: byte {} of {} is {:#x}, but this release knows only the first {} bytes; it must be zero", call,
           i, name, bytes[i], sizeof(T));
  std::memcpy(&options, given, std::min<uint64_t>(size, sizeof(T)));
  options.struct_size = sizeof(T);
  return options;
}

template <class T>
void check_output(const T *out, const char *call, const char *name) {
  if (!out) fail(FSDP_INVALID_ARGUMENT, "{}: the {} is NULL", call, name);
  if (out->struct_size < first_size<T>)
    fail(FSDP_INVALID_ARGUMENT, "{}: {}.struct_size is {}, at least {} is needed; set it to sizeof({}) before the call", call,
         name, out->struct_size, first_size<T>, name);
}

// Writes what the caller has room for; its struct_size stays.
template <class T>
void write_output(T *out, T value) {
  value.struct_size = out->struct_size;
  std::memcpy(static_cast<void *>(out), &value, std::min<uint64_t>(out->struct_size, sizeof(T)));
}

// A text into a caller's buffer, as fsdp_describe_model documents it.
void write_text(const std::string &text, char *buffer, uint64_t *size_bytes, const char *call);

// A name: UTF-8 of 1 to `most` bytes.
std::string read_name(const char *name, size_t most, const char *call, const char *field);
bool is_utf8(std::string_view text);

// An enum field: 0 is the default, else it must be in [1, last].
template <class E>
E read_enum(E value, E fallback, E last, const char *call, const char *field) {
  if (value == 0) return fallback;
  if (value < 1 || value > last)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be 0 (default) or in [1, {}]", call, field, value, last);
  return value;
}

inline void check_flags(uint32_t flags, uint32_t known, const char *call, const char *field) {
  if (flags & ~known) fail(FSDP_INVALID_ARGUMENT, "{}: {} has unknown bits {:#x}", call, field, flags & ~known);
}

inline void check_phase(fsdp_phase phase, const char *call) {
  if (phase < FSDP_FORWARD || phase > FSDP_EVAL)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a phase (FSDP_FORWARD .. FSDP_EVAL)", call, phase);
}

}  // namespace fsdp::abi
