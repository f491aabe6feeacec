// SPDX-License-Identifier: Apache-2.0
// Weights and states that take fewer bits than fp32, for tests of their kernels.
#pragma once

#include "adamw_reference.h"
#include "device/state_codes.h"

namespace fsdp::test {

enum class States { fp32, codes };

struct CompactForm {
  device::MainForm form;
  States states;
  fsdp_dtype compute = 0;  // dtype of the compute weights of fp32 main weights; 0: none exist

  fsdp_dtype weight() const { return form == device::MainForm::float32 ? FSDP_FLOAT32 : FSDP_BFLOAT16; }
};
constexpr CompactForm compact_forms[] = {
    {device::MainForm::float32, States::fp32},
    {device::MainForm::float32, States::fp32, FSDP_FLOAT32},
    {device::MainForm::float32, States::fp32, FSDP_BFLOAT16},
    {device::MainForm::float32, States::fp32, FSDP_FLOAT16},
    {device::MainForm::float32, States::codes},
    {device::MainForm::float32, States::codes, FSDP_FLOAT32},
    {device::MainForm::float32, States::codes, FSDP_BFLOAT16},
    {device::MainForm::float32, States::codes, FSDP_FLOAT16},
    {device::MainForm::split16, States::fp32},
    {device::MainForm::split16, States::codes},
    {device::MainForm::rounded, States::fp32},
    {device::MainForm::rounded, States::codes},
};

// Allocates bytes that begin `offset` bytes after an aligned address.
class Bytes {
 public:
  Bytes(size_t count, size_t offset, uint8_t filled = 0)
      : offset_(offset), count_(count), words_((count + offset) / 8 + 2) {
    std::memset(data(), filled, count);
  }
  std::byte *data() { return reinterpret_cast<std::byte *>(words_.data()) + offset_; }
  size_t count() const { return count_; }
  template <class T>
  T *as() {
    return reinterpret_cast<T *>(data());
  }

 private:
  size_t offset_, count_;
  std::vector<uint64_t> words_;
};

// Holds the arrays of one span, which begin `offset` elements after an aligned address. The states are those of a
// parameter before the first step.
struct CompactArrays {
  CompactForm form;
  size_t count, blocks;
  device::ElementNumbers numbers;
  uint32_t name = 0xA653D9E3;  // the low half of XXH64 of "w"
  Bytes grad, weight, rest, exp_avg, exp_avg_sq, exp_avg_scales, exp_avg_sq_scales, compute;

  CompactArrays(CompactForm of, size_t n, size_t offset = 0)
      : form(of),
        count(n),
        blocks(of.states == States::codes ? device::state_blocks(n) : 0),
        numbers{0, n ? n : 1, 0},
        grad(4 * n, 4 * offset),
        weight(dtype_size(of.weight()) * n, dtype_size(of.weight()) * offset),
        rest(of.form == device::MainForm::split16 ? 2 * n : 0, 2 * offset),
        exp_avg(state_bytes(), state_offset(offset), blocks ? device::signed_zero_code : 0),
        exp_avg_sq(state_bytes(), state_offset(offset), blocks ? device::unsigned_zero_code : 0),
        exp_avg_scales(4 * blocks, 4 * offset),
        exp_avg_sq_scales(4 * blocks, 4 * offset),
        compute(of.compute ? dtype_size(of.compute) * n : 0, of.compute ? dtype_size(of.compute) * offset : 0) {
    for (size_t b = 0; b < blocks; ++b) exp_avg_scales.as<float>()[b] = exp_avg_sq_scales.as<float>()[b] = 1e-12f;
  }

  std::vector<Bytes *> all() {
    return {&grad, &weight, &rest, &exp_avg, &exp_avg_sq, &exp_avg_scales, &exp_avg_sq_scales, &compute};
  }
  float weight_at(size_t i) {
    if (form.form != device::MainForm::split16) return read(weight.data(), form.weight(), i);
    return device::fp32_of(device::join_weight(weight.as<uint16_t>()[i], rest.as<int16_t>()[i]));
  }
  // A form in bf16 gets the nearest bf16 number. Two halves get the value itself.
  void set_weight(size_t i, float value) {
    if (form.form != device::MainForm::split16) return write(weight.data(), form.weight(), i, value);
    const device::SplitWeight split = device::split_weight(device::fp32_bits(value));
    weight.as<uint16_t>()[i] = split.upper, rest.as<int16_t>()[i] = split.rest;
  }
  // The second block has no gradients: its states stay 0.
  void fill(uint32_t seed, Values values) {
    std::mt19937 random(seed);
    for (size_t i = 0; i < count; ++i) {
      set_weight(i, random_value(random, values));
      const float drawn = random_value(random, values);
      grad.as<float>()[i] = i / device::state_block == 1 ? 0.0f : drawn;
    }
  }
  device::CompactSpan span() { return span_of(all()); }
  // Views the same span over copies of the arrays, which have the order of all().
  template <class Array>
  device::CompactSpan span_of(const std::vector<Array *> &a) {
    const auto at = [&](size_t i) { return reinterpret_cast<float *>(a[i]->data()); };
    return {at(1),
            form.form == device::MainForm::split16 ? reinterpret_cast<int16_t *>(at(2)) : nullptr,
            at(0),
            at(3),
            at(4),
            blocks ? at(5) : nullptr,
            blocks ? at(6) : nullptr,
            form.compute ? at(7) : nullptr,
            form.compute,
            form.form,
            name,
            numbers,
            count};
  }

 private:
  size_t state_bytes() const { return (form.states == States::codes ? 1 : 4) * count; }
  size_t state_offset(size_t offset) const { return (form.states == States::codes ? 1 : 4) * offset; }
};

}  // namespace fsdp::test
