// SPDX-License-Identifier: Apache-2.0
// A table that finds the codes of device/state_codes.h with one look-up. The leading bits of fp32 divide the magnitudes
// from 0 to 1 into cells. Cells are so small that each has at most one limit. Each cell has an entry. The upper bits of
// the entry are the code of the cell's lowest number. Its lower bits have a purpose: if a number's place in the cell is
// added, the sum carries into the code if and only if the number is above the limit.
#pragma once

#include <cstdint>

#include "device/state_codes.h"

namespace fsdp::device {

template <bool is_signed>
class StateTable {
 public:
  static constexpr int place_bits = is_signed ? 17 : 16;  // the last bits of a number: its place in its cell
  static constexpr uint32_t places = (1u << place_bits) - 1;
  static constexpr uint32_t lowest = 104u << 23;  // 2^-23: smaller magnitudes have the code of 0
  static constexpr uint32_t cells = ((fp32_bits(1.0f) - lowest) >> place_bits) + 1;

  constexpr StateTable() {
    for (uint32_t cell = 0; cell < cells; ++cell) {
      const uint32_t first = lowest + (cell << place_bits), last = first + places;
      entries_[cell] = entry(first, last, 0);
      if (is_signed) entries_[cells + cell] = entry(fp32_sign | last, fp32_sign | first, places);
    }
  }

  // The entries of negative numbers come after all others.
  constexpr const uint32_t *entries() const { return entries_; }

  // Gives the same result as state_code() for numbers from -1 to 1. The unsigned table is for numbers from 0 to 1, and
  // for -0.
  constexpr uint8_t code(float ratio) const {
    const uint32_t bits = fp32_bits(ratio), magnitude = bits & fp32_magnitude;
    const uint32_t beyond = (magnitude > lowest ? magnitude : lowest) - lowest;
    const bool is_negative = is_signed && (bits & fp32_sign);
    const uint32_t place = (beyond ^ (is_negative ? places : 0)) & places;
    const uint32_t cell = (beyond >> place_bits) + (is_negative ? cells : 0);
    return static_cast<uint8_t>((entries_[cell] + place) >> place_bits);
  }

 private:
  static constexpr uint32_t fp32_sign = 0x80000000;

  // The last bits of a number, combined with `flip` by exclusive or, are the number's place among the ascending numbers
  // of the cell.
  static constexpr uint32_t entry(uint32_t first, uint32_t last, uint32_t flip) {
    const float *const limits = is_signed ? signed_state_map.limit : unsigned_state_map.limit;
    const uint32_t code = state_code(limits, fp32_of(first)), code_of_last = state_code(limits, fp32_of(last));
    if (code == code_of_last) return code << place_bits;
    if (code_of_last != code + 1) throw "a cell has two limits";
    return code << place_bits | (places - ((fp32_bits(limits[code]) ^ flip) & places));
  }

  uint32_t entries_[is_signed ? 2 * cells : cells] = {};
};

inline constexpr StateTable<true> signed_state_table;
inline constexpr StateTable<false> unsigned_state_table;

}  // namespace fsdp::device
