// SPDX-License-Identifier: Apache-2.0
// The random bits of device/main_weight.h for packs of elements.
#pragma once

#include "device/cuda/portable.h"
#include "device/main_weight.h"

namespace fsdp::device::cuda {

// Gives the numbers of consecutive elements, starting at element i. A division takes long, so the constructor divides
// only if element i is after the first row.
class NumberCounter {
 public:
  FSDP_DEVICE NumberCounter(const ElementNumbers &numbers, uint64_t i)
      : numbers_(numbers), at_(i), row_(numbers.first) {
    if (i < numbers.length) return;
    at_ = i % numbers.length;
    row_ += i / numbers.length * numbers.pitch;
  }
  FSDP_DEVICE uint64_t next() {
    const uint64_t number = row_ + at_;
    if (++at_ == numbers_.length) at_ = 0, row_ += numbers_.pitch;
    return number;
  }

 private:
  const ElementNumbers &numbers_;
  uint64_t at_, row_;  // the element's place in its row, and the number of the row's first element
};

// Gives the result of RandomWords::half(), but with constant indices, so that the words can stay in registers.
FSDP_DEVICE uint32_t half_of(const RandomWords &words, unsigned half) {
  const uint32_t low = half < 2 ? words.word[0] : words.word[1], high = half < 6 ? words.word[2] : words.word[3];
  return (half < 4 ? low : high) >> half % 2 * 16 & 0xffff;
}

// The random bits of n elements, starting at element i. Most packs are in one group of 8.
template <unsigned n>
FSDP_DEVICE Pack<uint32_t, n> random_bits(const RoundingKey &key, const ElementNumbers &numbers, uint64_t i) {
  NumberCounter counter(numbers, i);
  Pack<uint32_t, n> bits;
  RandomWords words{};
  uint64_t group = 0;
  for (unsigned j = 0; j < n; ++j) {
    const uint64_t number = counter.next();
    if (j == 0 || number / 8 != group) words = random_words(key, group = number / 8);
    bits.lane[j] = half_of(words, static_cast<unsigned>(number % 8));
  }
  return bits;
}

}  // namespace fsdp::device::cuda
