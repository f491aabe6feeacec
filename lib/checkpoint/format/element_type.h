// SPDX-License-Identifier: Apache-2.0
// The types of elements in a safetensors file: the names in the format, and the types with which libfsdp computes.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/dtype.h"
#include "fsdp.h"

namespace fsdp::checkpoint {

struct ElementType {
  std::string_view name;
  uint32_t bits;
  fsdp_dtype dtype;  // the dtype of a model's tensors that are stored in this type; 0: none
};
// The types of every release of the format so far. The rows never move.
inline constexpr ElementType element_types[] = {{"F32", 32, FSDP_FLOAT32},
                                                {"BF16", 16, FSDP_BFLOAT16},
                                                {"F16", 16, FSDP_FLOAT16},
                                                {"F64", 64, 0},
                                                {"BOOL", 8, 0},
                                                {"U8", 8, FSDP_UINT8},
                                                {"I8", 8, 0},
                                                {"U16", 16, 0},
                                                {"I16", 16, 0},
                                                {"U32", 32, 0},
                                                {"I32", 32, 0},
                                                {"U64", 64, 0},
                                                {"I64", 64, 0},
                                                {"C64", 64, 0},
                                                {"F8_E4M3", 8, FSDP_FLOAT8_E4M3},
                                                {"F8_E5M2", 8, 0},
                                                {"F8_E4M3FNUZ", 8, 0},
                                                {"F8_E5M2FNUZ", 8, 0},
                                                {"F8_E8M0", 8, FSDP_E8M0},
                                                {"F6_E2M3", 6, 0},
                                                {"F6_E3M2", 6, 0},
                                                {"F4", 4, 0}};

// The type for any other name. Its size is not known, and its elements are never read.
inline constexpr ElementType unknown_element_type{"", 0, 0};
constexpr bool is_known(const ElementType &type) { return &type != &unknown_element_type; }

// Returns NULL if no type has that name.
constexpr const ElementType *find_element_type(std::string_view name) {
  for (const ElementType &type : element_types)
    if (type.name == name) return &type;
  return nullptr;
}

// Rounds F64 to fp32 before it is rounded to a smaller type: toward zero, and to an odd number if that is not exact. So
// the second rounding, to nearest even, gives the result of a single rounding of the double (Boldo and Melquiond, "When
// double rounding is odd", 2005). The rounding mode must be the default.
inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value) return nearest;
  const auto bits = std::bit_cast<uint32_t>(nearest);
  const bool is_away = value > 0 ? static_cast<double>(nearest) > value : static_cast<double>(nearest) < value;
  return std::bit_cast<float>((is_away ? bits - 1 : bits) | 1);
}
// Converts to fp32 in such a way that rounding the result once more, to `to`, is correct.
inline float narrow(double value, fsdp_dtype to) {
  return to == FSDP_FLOAT32 ? static_cast<float>(value) : round_to_odd(value);
}

// Can the type be converted to the numbers that a model computes with?
constexpr bool is_converted(const ElementType &type) { return is_number(type.dtype) || type.name == "F64"; }
// Can a tensor stored as `from` be loaded into one of type `to`? Codes and bytes are not numbers and are not converted.
// Scales of fp32 are numbers, but they are loaded only if fp32 holds their values exactly (KeptTensor::is_loaded_from).
constexpr bool is_loaded(const ElementType &from, const ElementType &to) {
  return is_converted(to) ? is_converted(from) : from.name == to.name;
}

constexpr const ElementType &element_type(fsdp_dtype dtype) {
  for (const ElementType &type : element_types)
    if (type.dtype == dtype) return type;
  return element_types[0];
}

// The bytes of `count` elements; nothing if that is not a whole number of bytes or exceeds 64 bits.
constexpr std::optional<uint64_t> stored_bytes(const ElementType &type, uint64_t count) {
  uint64_t bits = 0;
  if (__builtin_mul_overflow(count, type.bits, &bits) || bits % 8) return std::nullopt;
  return bits / 8;
}

}  // namespace fsdp::checkpoint
