// SPDX-License-Identifier: Apache-2.0
#include "compact_spans.h"
#include "device/host/state_table.h"

namespace fsdp::test {
namespace {

using namespace device;

void update(const AdamW &step, CompactArrays &arrays) {
  const CompactSpan span = arrays.span();
  kernels::compact_adamw(step, {&span, 1});
}

// Computes the definition, one element and one block at a time.
class CompactReference {
 public:
  explicit CompactReference(CompactArrays &arrays) : a_(arrays) {}

  void update(const AdamW &step) {
    const std::vector<float> firsts = decode(a_.exp_avg, a_.exp_avg_scales, signed_state_map);
    const std::vector<float> seconds = decode(a_.exp_avg_sq, a_.exp_avg_sq_scales, unsigned_state_map);
    std::vector<float> m = firsts, v = seconds;
    for (size_t i = 0; i < a_.count; ++i) {
      float weight = a_.weight_at(i);
      update_one(step, a_.grad.as<float>()[i], weight, m[i], v[i]);
      put_weight(step, i, weight);
    }
    encode(m, a_.exp_avg, a_.exp_avg_scales, true);
    encode(v, a_.exp_avg_sq, a_.exp_avg_sq_scales, false);
  }

 private:
  std::vector<float> decode(Bytes &states, Bytes &scales, const StateMap &map) const {
    std::vector<float> values(a_.count);
    for (size_t i = 0; i < a_.count; ++i)
      values[i] = a_.blocks ? map.value[states.as<uint8_t>()[i]] * scales.as<float>()[i / 256] : states.as<float>()[i];
    return values;
  }

  void put_weight(const AdamW &step, size_t i, float weight) {
    const uint64_t element = a_.numbers.at(i);
    const RandomWords words = random_words({step.seed, a_.name, step.number}, element / 8);
    if (a_.form.form == MainForm::rounded)
      a_.weight.as<uint16_t>()[i] = round_randomly(fp32_bits(weight), words.half(element % 8));
    else
      a_.set_weight(i, weight);
    if (a_.form.compute) write(a_.compute.data(), a_.form.compute, i, weight);
  }

  // Finds the nearest code by comparing distances in double. A tie gets the lower code.
  static uint8_t nearest(const StateMap &map, float ratio) {
    int code = 0;
    for (int c = 1; c < 256; ++c)
      if (std::abs(double{map.value[c]} - ratio) < std::abs(double{map.value[code]} - ratio)) code = c;
    return static_cast<uint8_t>(code);
  }

  void encode(const std::vector<float> &values, Bytes &states, Bytes &scales, bool is_signed) {
    if (!a_.blocks) return std::copy(values.begin(), values.end(), states.as<float>()), void();
    const StateMap &map = is_signed ? signed_state_map : unsigned_state_map;
    for (size_t begin = 0; begin < a_.count; begin += 256) {
      const size_t end = std::min(begin + 256, a_.count);
      float scale = 1e-12f;
      for (size_t i = begin; i < end; ++i)
        if (!(std::abs(values[i]) <= scale) && !std::isnan(scale)) scale = std::abs(values[i]);
      scales.as<float>()[begin / 256] = scale;
      for (size_t i = begin; i < end; ++i) {
        const uint8_t code = nearest(map, values[i] / scale);
        states.as<uint8_t>()[i] = !is_signed && code == 0 && values[i] > 0 ? 1 : code;
      }
    }
  }

  CompactArrays &a_;
};

void expect_same(CompactArrays &actual, CompactArrays &expected) {
  const auto same_at = [](Bytes &a, Bytes &e, fsdp_dtype dtype, const char *what) {
    for (size_t i = 0; i < a.count() / dtype_size(dtype); ++i)
      ASSERT_TRUE(same(read(a.data(), dtype, i), read(e.data(), dtype, i)))
          << what << " " << i << ": " << read(a.data(), dtype, i) << ", expected " << read(e.data(), dtype, i);
  };
  const auto equal = [](Bytes &a, Bytes &e, const char *what) {
    for (size_t i = 0; i < a.count(); ++i) ASSERT_EQ(a.data()[i], e.data()[i]) << what << " byte " << i;
  };
  same_at(actual.weight, expected.weight, actual.form.weight(), "weight");
  equal(actual.rest, expected.rest, "rest");
  if (actual.form.compute) same_at(actual.compute, expected.compute, actual.form.compute, "compute");
  if (!actual.blocks) {
    same_at(actual.exp_avg, expected.exp_avg, FSDP_FLOAT32, "exp_avg");
    same_at(actual.exp_avg_sq, expected.exp_avg_sq, FSDP_FLOAT32, "exp_avg_sq");
    return;
  }
  equal(actual.exp_avg, expected.exp_avg, "code of exp_avg,");
  equal(actual.exp_avg_sq, expected.exp_avg_sq, "code of exp_avg_sq,");
  same_at(actual.exp_avg_scales, expected.exp_avg_scales, FSDP_FLOAT32, "scale of exp_avg");
  same_at(actual.exp_avg_sq_scales, expected.exp_avg_sq_scales, FSDP_FLOAT32, "scale of exp_avg_sq");
}

AdamW seeded_step(int number, float weight_decay = 0.1f) {
  AdamW step = make_step(number, weight_decay);
  step.seed = 0xfedcba9876543210;
  return step;
}

void check(CompactForm form, size_t count, size_t offset, ElementNumbers numbers, Values values) {
  SCOPED_TRACE(::testing::Message() << "form " << int(form.form) << ", codes " << int(form.states) << ", compute "
                                    << form.compute << ", " << count << " elements");
  CompactArrays actual(form, count, offset), expected(form, count);
  actual.numbers = expected.numbers = numbers;
  actual.fill(static_cast<uint32_t>(count), values), expected.fill(static_cast<uint32_t>(count), values);
  CompactReference reference(expected);
  for (int number = 1; number <= 3; ++number) {
    update(seeded_step(number), actual);
    reference.update(seeded_step(number));
    ASSERT_NO_FATAL_FAILURE(expect_same(actual, expected)) << "step " << number;
  }
}

TEST(KernelCompactAdamW, SameBitsAsTheDefinition) {
  on_every_target([] {
    for (const CompactForm &form : compact_forms)
      for (const Values values : {Values::ordinary, Values::awkward})
        for (const size_t count : {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 255, 256, 257, 511, 512, 1000, 2601})
          if (count % sampled(3) == 0) check(form, count, count % 4, {count % 7, count ? count : 1, 0}, values);
  });
}

// Most rows begin or end within groups of random bits and within blocks of states.
TEST(KernelCompactAdamW, ElementsOfABoxHaveTheirNumbersInTheTensor) {
  on_every_target([] {
    for (const States states : {States::fp32, States::codes})
      for (const ElementNumbers numbers :
           {ElementNumbers{3, 1, 7}, {6, 13, 100}, {1000, 48, 64}, {9, 700, 5001}, {(uint64_t{1} << 35) - 70, 96, 96}})
        check({MainForm::rounded, states}, 1500, 1, numbers, Values::ordinary);
  });
}

TEST(KernelCompactAdamW, ManySpansAreUpdatedAtOnce) {
  std::vector<CompactArrays> at_once, alone;
  std::vector<CompactSpan> spans;
  for (const CompactForm &form : compact_forms)
    for (const size_t count : {0, 300})
      for (auto *const arrays : {&at_once, &alone}) arrays->emplace_back(form, count).fill(3, Values::ordinary);
  for (CompactArrays &arrays : at_once) spans.push_back(arrays.span());
  kernels::compact_adamw(make_step(1), spans);
  for (size_t i = 0; i < alone.size(); ++i) {
    update(make_step(1), alone[i]);
    expect_same(at_once[i], alone[i]);
  }
}

TEST(KernelCompactAdamW, WeightsThatAreTheirOwnCopyAreUpdatedAlike) {
  CompactArrays none({MainForm::float32, States::codes}, 300), itself({MainForm::float32, States::codes}, 300);
  none.fill(1, Values::ordinary), itself.fill(1, Values::ordinary);
  CompactSpan span = itself.span();
  span.compute = span.weight, span.compute_dtype = FSDP_FLOAT32;
  kernels::compact_adamw(make_step(1), {&span, 1});
  update(make_step(1), none);
  expect_same(itself, none);
}

// The numbers just below, at and just above each limit are checked too.
TEST(KernelCompactAdamW, TheTableFindsTheCodesOfTheDefinition) {
  const auto check_code = [](float ratio) {
    ASSERT_EQ(signed_state_table.code(ratio), state_code(signed_state_map.limit, ratio)) << ratio;
    if (ratio < 0) return;
    ASSERT_EQ(unsigned_state_table.code(ratio), state_code(unsigned_state_map.limit, ratio)) << ratio;
  };
  for (const StateMap &map : {signed_state_map, unsigned_state_map})
    for (const float limit : map.limit)
      for (const int by : {-1, 0, 1}) {
        const float ratio = fp32_of(fp32_bits(limit) + static_cast<uint32_t>(by));
        check_code(ratio), check_code(-ratio);
      }
  const uint32_t last = fp32_bits(1.0f);
  for (uint32_t cell = 0; cell < last; cell += 1u << 16)
    for (const uint32_t place : {0u, 1u, 0x7fffu, 0xfffeu, 0xffffu})
      if (cell + place <= last) check_code(fp32_of(cell + place)), check_code(-fp32_of(cell + place));
  std::mt19937 random(11);
  for (int i = 0; i < 200'000; ++i) {
    const float ratio = fp32_of(static_cast<uint32_t>(random() % (last + 1)));
    check_code(ratio), check_code(-ratio);
  }
}

// The known results are those of the parameter "w". Its gradients repeat after 23 elements, and its weights after 17.

constexpr int known_steps = 10;

float known_weight(size_t i) { return static_cast<float>(static_cast<int>(3 * i % 17) - 8) / 8; }
float known_grad(size_t i, int s) {
  return static_cast<float>(static_cast<int>((7 * i + static_cast<size_t>(s)) % 23) - 11) / 32;
}

// Step s + 1 uses the gradients number `first_grads` + s.
void train(CompactArrays &arrays, uint64_t seed, float weight_decay, int first_grads) {
  for (size_t i = 0; i < arrays.count; ++i) arrays.set_weight(i, known_weight(i));
  for (int s = 0; s < known_steps; ++s) {
    for (size_t i = 0; i < arrays.count; ++i) arrays.grad.as<float>()[i] = known_grad(i, s + first_grads);
    AdamW step = make_step(s + 1, weight_decay);
    step.seed = seed;
    update(step, arrays);
  }
}

uint32_t sum_of(Bytes &bytes) { return crc32(bytes.data(), bytes.count()); }

TEST(KernelCompactAdamW, TrainingInFp32HasItsKnownBits) {
  on_every_target([] {
    CompactArrays arrays({MainForm::float32, States::fp32}, 5000);
    train(arrays, 0, 0.1f, 0);
    EXPECT_EQ(sum_of(arrays.weight), 0xEE967E8Cu);
    EXPECT_EQ(sum_of(arrays.exp_avg), 0x35E4969Fu);
    EXPECT_EQ(sum_of(arrays.exp_avg_sq), 0xDA2E3CF1u);
  });
}

TEST(KernelCompactAdamW, TrainingWithSplitWeightsIsExact) {
  on_every_target([] {
    CompactArrays arrays({MainForm::split16, States::fp32}, 5000);
    train(arrays, 0, 0.1f, 0);
    std::vector<float> joined(5000);
    for (size_t i = 0; i < joined.size(); ++i) joined[i] = arrays.weight_at(i);
    EXPECT_EQ(crc32(joined.data(), joined.size() * 4), 0xEE967E8Cu);
    EXPECT_EQ(sum_of(arrays.weight), 0x20EA7628u);
    EXPECT_EQ(sum_of(arrays.rest), 0xD1EE242Au);
    EXPECT_EQ(sum_of(arrays.exp_avg), 0x35E4969Fu);
    EXPECT_EQ(sum_of(arrays.exp_avg_sq), 0xDA2E3CF1u);
  });
}

TEST(KernelCompactAdamW, TrainingOfRoundedWeightsHasItsKnownBits) {
  constexpr uint16_t first[] = {0xBF7F, 0xBF1F, 0xBE83, 0x3E04, 0x3F02, 0x3F5E};
  on_every_target([&] {
    CompactArrays arrays({MainForm::rounded, States::fp32}, 5000);
    train(arrays, 1234, 0, 1);
    EXPECT_EQ(sum_of(arrays.weight), 0xDC685EE3u);
    for (size_t i = 0; i < std::size(first); ++i) EXPECT_EQ(arrays.weight.as<uint16_t>()[i], first[i]) << i;
  });
}

TEST(KernelCompactAdamW, TrainingWithCodesHasItsKnownBits) {
  on_every_target([] {
    CompactArrays arrays({MainForm::float32, States::codes}, 5120);
    train(arrays, 0, 0, 1);
    EXPECT_EQ(sum_of(arrays.weight), 0x6B4369FAu);
    EXPECT_EQ(sum_of(arrays.exp_avg), 0xB5B37C59u);
    EXPECT_EQ(sum_of(arrays.exp_avg_scales), 0xE94C2C04u);
    EXPECT_EQ(sum_of(arrays.exp_avg_sq), 0x0236E592u);
    EXPECT_EQ(sum_of(arrays.exp_avg_sq_scales), 0xDB5DEF39u);
  });
}

TEST(KernelCompactAdamW, SplitWeightsWithCodesAreExactToo) {
  on_every_target([] {
    CompactArrays whole({MainForm::float32, States::codes}, 5120), split({MainForm::split16, States::codes}, 5120);
    train(whole, 0, 0.1f, 1), train(split, 0, 0.1f, 1);
    for (size_t i = 0; i < whole.count; ++i) ASSERT_EQ(split.weight_at(i), whole.weight_at(i)) << i;
    EXPECT_EQ(sum_of(split.exp_avg), sum_of(whole.exp_avg));
  });
}

TEST(KernelCompactAdamW, AKnownMatrixIsSplitIntoItsKnownHalves) {
  const std::vector<float> x = matrix();
  on_every_target([&] {
    CompactArrays arrays({MainForm::split16, States::fp32}, x.size());
    // Without gradients and weight decay, a step joins the halves and splits the result into the same halves.
    for (size_t i = 0; i < x.size(); ++i) arrays.set_weight(i, x[i] * (1.0f / 3));
    for (int again = 0; again < 2; ++again) {
      EXPECT_EQ(sum_of(arrays.weight), 0x1808DCCEu);
      EXPECT_EQ(sum_of(arrays.rest), 0x884AAE13u);
      update(make_step(1, 0), arrays);
    }
  });
  const SplitWeight tie = split_weight(fp32_bits(1.00390625f));
  EXPECT_EQ(tie.upper, 0x3F81);
  EXPECT_EQ(tie.rest, -32768);
}

// If the upper half is rounded up to Inf, the rest still gives the number again. The rest of a NaN is 0.
TEST(KernelCompactAdamW, SplitWeightsKeepTheLargestNumbersAndSignsOfNan) {
  constexpr uint32_t given[] = {0x7f7fffff, 0xff7fffff, 0x7f7f8000, 0x3f808000, 0x00000001, 0x7fc12345, 0xffc12345};
  on_every_target([&] {
    for (const uint32_t bits : given) {
      CompactArrays arrays({MainForm::split16, States::fp32}, 19);
      for (size_t i = 0; i < arrays.count; ++i) {
        arrays.weight.as<uint16_t>()[i] = static_cast<uint16_t>((bits + 0x8000) >> 16);
        arrays.rest.as<int16_t>()[i] = static_cast<int16_t>(bits);
      }
      update(make_step(1, 0), arrays);
      const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
      for (size_t i = 0; i < arrays.count; ++i) {
        const uint32_t upper = is_nan ? (bits >> 16 & 0x8000) | 0x7fc0 : (bits + 0x8000) >> 16;
        ASSERT_EQ(arrays.weight.as<uint16_t>()[i], upper) << std::hex << bits;
        ASSERT_EQ(arrays.rest.as<int16_t>()[i], is_nan ? 0 : static_cast<int16_t>(bits)) << std::hex << bits;
      }
    }
  });
}

TEST(KernelCompactAdamW, TheFirstBlockOfCodesIsKnown) {
  on_every_target([] {
    CompactArrays arrays({MainForm::float32, States::codes}, 4);
    const float grads[] = {0.5f, -0.25f, 0.001f, 0};
    std::copy(std::begin(grads), std::end(grads), arrays.grad.as<float>());
    update(make_step(1, 0), arrays);
    const uint8_t firsts[] = {255, 35, 144, 127}, seconds[] = {255, 148, 4, 0};
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(arrays.exp_avg.as<uint8_t>()[i], firsts[i]) << i;
      EXPECT_EQ(arrays.exp_avg_sq.as<uint8_t>()[i], seconds[i]) << i;
    }
    EXPECT_EQ(arrays.exp_avg_scales.as<uint32_t>()[0], 0x3D4CCCCDu);
    EXPECT_EQ(arrays.exp_avg_sq_scales.as<uint32_t>()[0], 0x3983126Fu);
  });
}

// The largest state of a block is encoded without an error, so equal states are exact.
TEST(KernelCompactAdamW, EqualGradientsTrainAsWithFp32States) {
  on_every_target([] {
    CompactArrays codes({MainForm::float32, States::codes}, 1000), exact({MainForm::float32, States::fp32}, 1000);
    for (CompactArrays *const arrays : {&codes, &exact})
      for (size_t i = 0; i < arrays->count; ++i) {
        arrays->set_weight(i, known_weight(i));
        arrays->grad.as<float>()[i] = 0.5f;
      }
    for (int number = 1; number <= 10; ++number) {
      update(make_step(number), codes), update(make_step(number), exact);
      ASSERT_EQ(sum_of(codes.weight), sum_of(exact.weight)) << "step " << number;
    }
  });
}

TEST(KernelCompactAdamW, ABlockOfZerosHasTheLeastScale) {
  on_every_target([] {
    CompactArrays arrays({MainForm::float32, States::codes}, 300);
    arrays.grad.as<float>()[299] = 1e-13f;  // also below the least scale
    update(make_step(1, 0), arrays);
    for (size_t block = 0; block < 2; ++block) {
      EXPECT_EQ(arrays.exp_avg_scales.as<float>()[block], 1e-12f);
      EXPECT_EQ(arrays.exp_avg_sq_scales.as<float>()[block], 1e-12f);
    }
    for (size_t i = 0; i < 299; ++i) {
      ASSERT_EQ(arrays.exp_avg.as<uint8_t>()[i], signed_zero_code) << i;
      ASSERT_EQ(arrays.exp_avg_sq.as<uint8_t>()[i], unsigned_zero_code) << i;
    }
    EXPECT_GT(arrays.exp_avg.as<uint8_t>()[299], signed_zero_code);
    EXPECT_EQ(arrays.exp_avg_sq.as<uint8_t>()[299], 1);
  });
}

// If its code were that of 0, the next step would divide by epsilon alone.
TEST(KernelCompactAdamW, ASmallSecondMomentIsNotForgotten) {
  on_every_target([] {
    CompactArrays arrays({MainForm::float32, States::codes}, 256);
    for (size_t i = 0; i < arrays.count; ++i) arrays.grad.as<float>()[i] = i == 0 ? 1.0f : i == 1 ? 0.0f : 1e-6f;
    update(make_step(1, 0), arrays);
    EXPECT_EQ(arrays.exp_avg_sq.as<uint8_t>()[0], 255);
    EXPECT_EQ(arrays.exp_avg_sq.as<uint8_t>()[1], 0);
    for (size_t i = 2; i < arrays.count; ++i) ASSERT_EQ(arrays.exp_avg_sq.as<uint8_t>()[i], 1) << i;
  });
}

TEST(KernelCompactAdamW, WhatIsNotFiniteStaysInItsBlock) {
  on_every_target([] {
    CompactArrays arrays({MainForm::float32, States::codes}, 768);
    for (size_t i = 0; i < arrays.count; ++i) arrays.grad.as<float>()[i] = 0.25f;
    arrays.grad.as<float>()[7] = std::nanf(""), arrays.grad.as<float>()[300] = -HUGE_VALF;
    update(make_step(1, 0), arrays);
    EXPECT_TRUE(std::isnan(arrays.exp_avg_scales.as<float>()[0]));
    EXPECT_TRUE(std::isnan(arrays.exp_avg_sq_scales.as<float>()[0]));
    EXPECT_EQ(arrays.exp_avg_scales.as<float>()[1], HUGE_VALF);
    EXPECT_EQ(arrays.exp_avg_sq_scales.as<float>()[1], HUGE_VALF);
    EXPECT_EQ(arrays.exp_avg_scales.as<float>()[2], 0.1f * 0.25f);
    EXPECT_EQ(arrays.exp_avg.as<uint8_t>()[767], 255);
  });
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelCompactAdamW, DoesNotDependOnTheCallersModes) {
  on_every_target([] {
    for (const CompactForm &form : compact_forms) {
      CompactArrays usual(form, 257, 1), odd(form, 257, 1);
      usual.fill(1, Values::awkward), odd.fill(1, Values::awkward);
      const AdamW step = seeded_step(1);  // in the standard modes
      for ([[maybe_unused]] const auto modes : odd_modes) update(step, usual);
      with_odd_modes([&] { update(step, odd); });
      expect_same(odd, usual);
    }
  });
}
#endif

}  // namespace
}  // namespace fsdp::test
