// SPDX-License-Identifier: Apache-2.0
// The random bits of device/main_weight.h, for many counters at a time. The kernels that round stochastically include
// this file once per SIMD target.
#include "device/host/simd-inl.h"
// (The guard below flips with each target; see hwy/foreach_target.h.)
#if defined(FSDP_DEVICE_HOST_RANDOM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FSDP_DEVICE_HOST_RANDOM_INL_H
#undef FSDP_DEVICE_HOST_RANDOM_INL_H
#else
#define FSDP_DEVICE_HOST_RANDOM_INL_H
#endif

#include <cstring>

#include "device/main_weight.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

constexpr size_t random_group = 8;  // elements that share a counter

#if HWY_TARGET == HWY_SCALAR

struct RandomLanes {
  RoundingKey key;

  static size_t groups() { return 1; }
  void write(uint64_t group, uint16_t *to) const {
    const RandomWords words = random_words(key, group);
    std::memcpy(to, words.word, sizeof words.word);
  }
};

#else

// Each lane of 64 bits belongs to one counter, and the lower half of the lane has one of the counter's four words. The
// upper half is undefined until joined() replaces it.
class RandomLanes {
 public:
  HWY_INLINE explicit RandomLanes(const RoundingKey &key) : key_(key) {
    for (unsigned round = 0; round < rounds; ++round) {
      low_[round] = static_cast<uint32_t>(key.seed) + round * 0x9E3779B9u;
      high_[round] = static_cast<uint32_t>(key.seed >> 32) + round * 0xBB67AE85u;
    }
  }

  // The number of groups that write() writes.
  static HWY_INLINE size_t groups() { return hn::Lanes(D()); }

  HWY_INLINE void write(uint64_t group, uint16_t *to) const {
    const D d;
    auto x0 = hn::Iota(d, group), x1 = hn::ShiftRight<32>(x0);
    auto x2 = hn::Set(d, uint64_t{key_.name}), x3 = hn::Set(d, uint64_t{key_.step});
    for (unsigned round = 0; round < rounds; ++round) {
      const auto a = product(x0, 0xD2511F53), b = product(x2, 0xCD9E8D57);
      x0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(b), x1), hn::Set(d, low_[round]));
      x2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(a), x3), hn::Set(d, high_[round]));
      x1 = b, x3 = a;
    }
    hn::StoreInterleaved2(joined(x0, x1), joined(x2, x3), d, reinterpret_cast<uint64_t *>(to));
  }

 private:
  static constexpr unsigned rounds = 10;
  using D = hn::CappedTag<uint64_t, 8>;
  using V = hn::Vec<D>;

  static HWY_INLINE V product(V x, uint64_t factor) {
    const hn::Repartition<uint32_t, D> d32;
    return hn::MulEven(hn::BitCast(d32, x), hn::BitCast(d32, hn::Set(D(), factor)));
  }
  static HWY_INLINE V joined(V low, V high) {
    return hn::Or(hn::And(low, hn::Set(D(), 0xffffffff)), hn::ShiftLeft<32>(high));
  }

  RoundingKey key_;
  uint64_t low_[rounds], high_[rounds];
};

#endif

// Makes the random bits of elements, one run of consecutive numbers at a time.
class RandomHalves {
 public:
  explicit HWY_INLINE RandomHalves(const RoundingKey &key) : lanes_(key) {}

  // Divides the elements from `begin` to `end` into runs and calls visit(i, n, halves) for each run of n elements from
  // i on. halves[k] belongs to element i + k.
  template <class Visit>
  HWY_INLINE void for_each_run(const ElementNumbers &numbers, size_t begin, size_t end, const Visit &visit) {
    for (size_t i = begin; i < end;) {
      const uint64_t number = numbers.at(i), at = number % random_group, left = numbers.length - i % numbers.length;
      const size_t n = HWY_MIN(HWY_MIN(end - i, left), most);
      fill(number / random_group, (at + n + random_group - 1) / random_group);
      visit(i, n, halves_ + at);
      i += n;
    }
  }

 private:
  static constexpr size_t most = 1024;

  HWY_INLINE void fill(uint64_t group, size_t groups) {
    for (size_t g = 0; g < groups; g += RandomLanes::groups()) lanes_.write(group + g, halves_ + g * random_group);
  }

  RandomLanes lanes_;
  // The first and the last group may be used only in part, and RandomLanes::write() may write some groups after the
  // last.
  alignas(64) uint16_t halves_[most + 8 * random_group];
};

// See round_randomly in device/main_weight.h. The result is in the lower half of each lane; the upper half is 0.
template <class D>
HWY_INLINE Bits<D> randomly_rounded(D, hn::Vec<D> value, const uint16_t *halves) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  const auto exponent = hn::Set(du, fp32_infinity);
  const auto bits = hn::BitCast(du, value);
  const auto sum = hn::Add(bits, hn::PromoteTo(du, hn::LoadU(d16, halves)));
  const auto is_infinite = [&](Bits<D> of) HWY_ATTR { return hn::Eq(hn::And(of, exponent), exponent); };
  const auto finite = hn::IfThenElse(is_infinite(sum), bits, sum);
  const auto quiet = hn::IfThenElseZero(hn::RebindMask(du, hn::IsNaN(value)), hn::Set(du, 0x0040u << 16));
  return hn::ShiftRight<16>(hn::IfThenElse(is_infinite(bits), hn::Or(bits, quiet), finite));
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
