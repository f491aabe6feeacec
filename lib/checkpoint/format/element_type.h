// SPDX-License-Identifier: Apache-2.0
// How an element is kept in a safetensors file: the names of the format, and which of them libfsdp computes with.
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
  fsdp_dtype dtype;  // of the model's that is kept so; 0: none is
};

// Of every release of the format so far. The rows never move.
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

// Any other name: of no size that is known, and never read.
inline constexpr ElementType unknown_element_type{"", 0, 0};
constexpr bool is_known(const ElementType &type) { return &type != &unknown_element_type; }

// NULL: there is none of that name.
constexpr const ElementType *find_element_type(std::string_view name) {
  for (const ElementType &type : element_types)
    if (type.name == name) return &type;
  return nullptr;
}

// F64 on its way to numbers of fewer bits than fp32 has: as fp32, toward zero, and odd where that is not exact. So the
// second rounding, to nearest even, gives what one rounding of the double would (Boldo and Melquiond, "When double
// rounding is odd", 2005). The rounding mode is to be the default.
inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value) return nearest;
  const auto bits = std::bit_cast<uint32_t>(nearest);
  const bool is_away = value > 0 ? static_cast<double>(nearest) > value : static_cast<double>(nearest) < value;
  return std::bit_cast<float>((is_away ? bits - 1 : bits) | 1);
}
// As fp32 that is rounded once more, to the type, if that is another one.
inline float narrow(double value, fsdp_dtype to) {
  return to == FSDP_FLOAT32 ? static_cast<float>(value) : round_to_odd(value);
}

// Into the numbers that a model computes with.
constexpr bool is_converted(const ElementType &type) { return is_number(type.dtype) || type.name == "F64"; }
// Can what is stored as `from` be loaded where `to` is kept? What is no number, codes and bytes, stays what it is.
// Scales of fp32 are numbers, and take those alone that they are exactly (KeptTensor::is_loaded_from).
constexpr bool is_loaded(const ElementType &from, const ElementType &to) {
  return is_converted(to) ? is_converted(from) : from.name == to.name;
}

constexpr const ElementType &element_type(fsdp_dtype dtype) {
  for (const ElementType &type : element_types)
    if (type.dtype == dtype) return type;
  return element_types[0];
}

// Of so many elements; nothing if that is no whole number of bytes or exceeds 64 bits.
constexpr std::optional<uint64_t> stored_bytes(const ElementType &type, uint64_t count) {
  uint64_t bits = 0;
  if (__builtin_mul_overflow(count, type.bits, &bits) || bits % 8) return std::nullopt;
  return bits / 8;
}

}  // namespace fsdp::checkpoint
