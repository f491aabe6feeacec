// SPDX-License-Identifier: Apache-2.0
// AdamW for weights and states that take fewer bits than fp32. The arithmetic is in adamw-inl.h. States in codes are
// decoded to fp32 one block at a time, so that the decoded states stay in the nearest cache.
#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"
#include "device/host/state_table.h"

namespace fsdp::device::kernels {

// Looks up one code at a time. It is compiled once, for the baseline processor, because for newer processors compilers
// use gather instructions, which are slower.
void look_up_states(const StateMap &map, const uint8_t *codes, size_t count, float *values);

}  // namespace fsdp::device::kernels

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/compact_adamw_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/adamw-inl.h"
#include "device/host/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

// A part of a span. Its states are in fp32, decoded if the span has codes.
struct CompactPart {
  const AdamW &step;
  const CompactSpan &span;
  size_t begin, count;
  float *exp_avg, *exp_avg_sq;  // states of element `begin` and of the next ones
};

// Each class below is the weights of a run of elements. load_weight() and store_weight() are for the elements from i
// on, counted from the run's start.

// Published is the type of the compute weights; void means that none are written.
template <class Published>
struct Float32Weights {
  float *weight;
  void *compute;

  Float32Weights(const CompactSpan &span, size_t begin)
      : weight(static_cast<float *>(span.weight) + begin), compute(nullptr) {
    if constexpr (!std::is_void_v<Published>) compute = static_cast<typename Published::Stored *>(span.compute) + begin;
  }
  template <class D>
  HWY_INLINE hn::Vec<D> load_weight(D d, size_t i) const {
    return load<F32>(d, weight, i);
  }
  template <class D>
  HWY_INLINE void store_weight(D d, hn::Vec<D> w, size_t i) const {
    store<F32>(d, w, weight, i);
    if constexpr (!std::is_void_v<Published>) store<Published>(d, w, compute, i);
  }
};

// See split_weight and join_weight in device/main_weight.h. The rest is the lower half of the bits.
struct SplitWeights {
  uint16_t *upper;
  int16_t *rest;

  SplitWeights(const CompactSpan &span, size_t begin)
      : upper(static_cast<uint16_t *>(span.weight) + begin), rest(span.rest + begin) {}

  template <class D>
  HWY_INLINE hn::Vec<D> load_weight(D d, size_t i) const {
    const hn::Rebind<uint16_t, D> d16;
    const hn::Rebind<int16_t, D> di16;
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto high = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, upper + i)));
    const auto low = hn::PromoteTo(di, hn::LoadU(di16, rest + i));
    return hn::BitCast(d, hn::Add(hn::BitCast(di, high), low));
  }
  template <class D>
  HWY_INLINE void store_weight(D, hn::Vec<D> w, size_t i) const {
    const hn::Rebind<uint16_t, D> d16;
    const hn::Rebind<int16_t, D> di16;
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, w);
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(w));
    const auto nan = hn::Or(hn::And(bits, hn::Set(du, 0x80000000)), hn::Set(du, 0x7fc00000));
    const auto exact = hn::IfThenElse(is_nan, nan, bits);
    const auto high = hn::ShiftRight<16>(hn::Add(exact, hn::Set(du, 0x8000)));
    hn::StoreU(hn::TruncateTo(d16, high), d16, upper + i);
    hn::StoreU(hn::BitCast(di16, hn::TruncateTo(d16, exact)), di16, rest + i);
  }
};

struct RoundedWeights {
  uint16_t *weight;
  const uint16_t *halves;

  RoundedWeights(const CompactSpan &span, size_t begin, const uint16_t *halves)
      : weight(static_cast<uint16_t *>(span.weight) + begin), halves(halves) {}

  template <class D>
  HWY_INLINE hn::Vec<D> load_weight(D d, size_t i) const {
    return load<BF16>(d, weight, i);
  }
  template <class D>
  HWY_INLINE void store_weight(D d, hn::Vec<D> w, size_t i) const {
    const hn::Rebind<uint16_t, D> d16;
    hn::StoreU(hn::TruncateTo(d16, randomly_rounded(d, w, halves + i)), d16, weight + i);
  }
};

template <class Weights>
struct CompactUpdate {
  AdamWFormula formula;
  Weights weights;
  const float *grad;
  float *exp_avg, *exp_avg_sq;

  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    auto m = load<F32>(d, exp_avg, i), v = load<F32>(d, exp_avg_sq, i), w = weights.load_weight(d, i);
    formula(d, load<F32>(d, grad, i), m, v, w);
    store<F32>(d, m, exp_avg, i);
    store<F32>(d, v, exp_avg_sq, i);
    weights.store_weight(d, w, i);
  }
};

// Updates a run of `count` elements, which begins `at` elements after the start of the part.
template <class Weights>
HWY_INLINE void update_run(const CompactPart &part, size_t at, size_t count, const Weights &weights) {
  const float *const grad = part.span.grad + part.begin + at;
  for_each_vector(
      0, count,
      CompactUpdate<Weights>{AdamWFormula(part.step), weights, grad, part.exp_avg + at, part.exp_avg_sq + at});
}

template <class Weights>
void update_part(const CompactPart &part) {
  update_run(part, 0, part.count, Weights(part.span, part.begin));
}

template <>
void update_part<RoundedWeights>(const CompactPart &part) {
  const auto visit = [&](size_t i, size_t n, const uint16_t *halves)
                         HWY_ATTR { update_run(part, i - part.begin, n, RoundedWeights(part.span, i, halves)); };
  RandomHalves({part.step.seed, part.span.name, part.step.number})
      .for_each_run(part.span.numbers, part.begin, part.begin + part.count, visit);
}

using UpdatePart = void (*)(const CompactPart &);

UpdatePart find_update(const CompactSpan &span) {
  if (span.form == MainForm::split16) return update_part<SplitWeights>;
  if (span.form == MainForm::rounded) return update_part<RoundedWeights>;
  if (!span.compute || span.compute == span.weight) return update_part<Float32Weights<void>>;
  if (span.compute_dtype == FSDP_BFLOAT16) return update_part<Float32Weights<BF16>>;
  if (span.compute_dtype == FSDP_FLOAT16) return update_part<Float32Weights<F16>>;
  return update_part<Float32Weights<F32>>;
}

// States in codes. A short block is decoded with zeros after its end.
using BlockTag = hn::CappedTag<float, 16>;

struct BlockStates {
  alignas(64) float values[state_block];

  HWY_INLINE void decode(const StateMap &map, const uint8_t *codes, float scale, size_t count) {
    const BlockTag d;
    look_up_states(map, codes, count, values);
    std::fill(values + count, values + state_block, 0.0f);
    for (size_t i = 0; i < count; i += hn::Lanes(d))
      hn::Store(hn::Mul(hn::Load(d, values + i), hn::Set(d, scale)), d, values + i);
  }

  HWY_INLINE float find_scale() const {
    const BlockTag d;
    const hn::RebindToSigned<BlockTag> di;
    auto largest = hn::Zero(di);
    for (size_t i = 0; i < state_block; i += hn::Lanes(d))
      largest =
          hn::Max(largest, hn::And(hn::BitCast(di, hn::Load(d, values + i)), hn::Set(di, int32_t{fp32_magnitude})));
    return state_scale(static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest))));
  }
};

// Encodes one number at a time. The scale may be Inf or NaN.
template <bool is_signed>
HWY_INLINE void encode_by_definition(const BlockStates &states, float scale, uint8_t *codes, size_t count) {
  const StateMap &map = is_signed ? signed_state_map : unsigned_state_map;
  for (size_t i = 0; i < count; ++i) {
    const uint8_t code = state_code(map.limit, states.values[i] / scale);
    codes[i] = !is_signed && code == 0 && states.values[i] > 0 ? 1 : code;
  }
}

// Finds the codes of a vector of ratios from -1 to 1 in a StateTable.
template <bool is_signed, class D>
HWY_INLINE Bits<D> find_codes(D, hn::Vec<D> ratio) {
  using Table = StateTable<is_signed>;
  const uint32_t *const entries = is_signed ? signed_state_table.entries() : unsigned_state_table.entries();
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, ratio);
  const auto lowest = hn::Set(di, int32_t{Table::lowest});
  const auto beyond = hn::Sub(hn::Max(hn::And(bits, hn::Set(di, int32_t{fp32_magnitude})), lowest), lowest);
  auto cell = hn::ShiftRight<Table::place_bits>(beyond);
  auto place = beyond;
  if constexpr (is_signed) {
    const auto is_negative = hn::BroadcastSignBit(bits);
    place = hn::Xor(place, is_negative);
    cell = hn::Add(cell, hn::And(is_negative, hn::Set(di, int32_t{Table::cells})));
  }
  const auto entry = hn::GatherIndex(du, entries, cell);
  return hn::ShiftRight<Table::place_bits>(hn::Add(entry, hn::And(hn::BitCast(du, place), hn::Set(du, Table::places))));
}

template <bool is_signed>
HWY_INLINE void encode(const BlockStates &states, float scale, uint8_t *codes, size_t count) {
  const BlockTag d;
  const hn::RebindToUnsigned<BlockTag> du;
  const hn::Rebind<uint8_t, BlockTag> d8;
  if (!(fp32_bits(scale) < fp32_infinity)) return encode_by_definition<is_signed>(states, scale, codes, count);
  alignas(64) uint8_t found[state_block];
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto value = hn::Load(d, states.values + i);
    auto code = find_codes<is_signed>(d, hn::Div(value, hn::Set(d, scale)));
    if constexpr (!is_signed) {
      const auto least = hn::IfThenElseZero(hn::RebindMask(du, hn::Gt(value, hn::Zero(d))), hn::Set(du, 1));
      code = hn::Max(code, least);
    }
    hn::StoreU(hn::TruncateTo(d8, code), d8, found + i);
  }
  std::memcpy(codes, found, count);
}

HWY_INLINE void update_block(const AdamW &step, const CompactSpan &span, uint64_t block, UpdatePart update) {
  const size_t begin = block * state_block, count = HWY_MIN(state_block, span.count - begin);
  uint8_t *const first_codes = static_cast<uint8_t *>(span.exp_avg) + begin;
  uint8_t *const second_codes = static_cast<uint8_t *>(span.exp_avg_sq) + begin;
  BlockStates first, second;
  first.decode(signed_state_map, first_codes, span.exp_avg_scales[block], count);
  second.decode(unsigned_state_map, second_codes, span.exp_avg_sq_scales[block], count);
  update({step, span, begin, count, first.values, second.values});
  span.exp_avg_scales[block] = first.find_scale();
  span.exp_avg_sq_scales[block] = second.find_scale();
  encode<true>(first, span.exp_avg_scales[block], first_codes, count);
  encode<false>(second, span.exp_avg_sq_scales[block], second_codes, count);
}

void update_compact(const AdamW &step, const CompactSpan &span) {
  const UpdatePart update = find_update(span);
  if (!span.exp_avg_scales)
    return update(
        {step, span, 0, span.count, static_cast<float *>(span.exp_avg), static_cast<float *>(span.exp_avg_sq)});
  for (uint64_t block = 0; block < state_blocks(span.count); ++block) update_block(step, span, block, update);
}

void update_all_compact(const AdamW &step, std::span<const CompactSpan> spans) {
  for (const CompactSpan &span : spans) update_compact(step, span);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

void look_up_states(const StateMap &map, const uint8_t *codes, size_t count, float *values) {
  for (size_t i = 0; i < count; ++i) values[i] = map.value[codes[i]];
}

HWY_EXPORT(update_all_compact);

void compact_adamw(const AdamW &step, std::span<const CompactSpan> spans) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(update_all_compact)(step, spans);
}

}  // namespace fsdp::device::kernels
#endif
