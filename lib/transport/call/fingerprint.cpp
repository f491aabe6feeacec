// SPDX-License-Identifier: Apache-2.0
#include "transport/call/fingerprint.h"

#include <cstring>

#include "base/dtype.h"

namespace fsdp::transport {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;  // of the golden ratio
  return hash ^ hash >> 29;
}

}  // namespace

const char *operation_name(Operation operation) noexcept {
  switch (operation) {
    case Operation::all_gather: return "all_gather";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::all_reduce: return "all_reduce";
    case Operation::broadcast: return "broadcast";
    case Operation::barrier: return "barrier";
  }
  return "an unknown operation";
}

void Fingerprint::start(Operation op, const Tag &tag) noexcept {
  if (tag.call) {
    *this = *tag.call;
    hash = mix(hash, static_cast<uint64_t>(op));
    return;
  }
  operation = op;
  call = 0;
  what = tag.what;
  elements = 0;
  dtype = 0;
  hash = mix(mix(1, static_cast<uint64_t>(op)), tag.what);
  for (const char *c = tag.name; *c; ++c) hash = mix(hash, static_cast<unsigned char>(*c));
  const size_t note = ::strnlen(tag.note, sizeof name - 1), length = ::strnlen(tag.name, sizeof name - 1 - note);
  std::memcpy(name, tag.name, length);
  std::memcpy(name + length, tag.note, note);
  name[length + note] = '\0';
}

void Fingerprint::add_span(fsdp_dtype of, fsdp_dtype wire_dtype, uint64_t count) noexcept {
  hash = mix(mix(hash, static_cast<uint64_t>(of) << 32 | static_cast<uint32_t>(wire_dtype)), count);
  if (call) return;
  dtype = of;
  elements += count;
}

void Fingerprint::number_call(uint64_t number) noexcept {
  call = number + 1;
  hash = mix(hash, call);
}

std::string Fingerprint::text(uint64_t number) const {
  const std::string object(name, ::strnlen(name, sizeof name));
  if (call) number = call - 1;
  if (operation == Operation::barrier) return format_text("barrier of '{}' (#{})", object, number);
  if (dtype == 0) return format_text("{} of '{}' (#{}, {} bytes)", operation_name(operation), object, number, elements);
  return format_text("{} of '{}' (#{}, {}, {} elements)", operation_name(operation), object, number, dtype_name(dtype),
                     elements);
}

}  // namespace fsdp::transport
