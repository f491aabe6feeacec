// SPDX-License-Identifier: Apache-2.0
// AdamW for weights and states that take fewer bits than fp32, and stochastic rounding without AdamW. The least traffic
// per element, read and written, is the sum of these:
//   gradient   4 bytes
//   weight     8 in fp32 or in two halves, 4 if it is rounded
//   states     16 in fp32, 4 in codes
//   copy       2 or 4, if there is one
#include "device/cuda/adamw.h"
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"
#include "device/cuda/random_bits.h"
#include "device/state_codes.h"

namespace fsdp::device::cuda {
namespace {

struct CompactUpdates {
  Batch<CompactSpan, 32> batch;
  AdamW step;
  const AdamW *step_in_memory;  // used in place of step, if not NULL

  FSDP_DEVICE AdamW get_step() const { return step_in_memory ? *step_in_memory : step; }
};

FSDP_BOTH bool publishes(const CompactSpan &span) {
  return span.form == MainForm::float32 && span.compute && span.compute != span.weight;
}

// The weights of a span, in any form. The form is the same for all threads of a block.
struct CompactWeights {
  const CompactSpan &span;
  RoundingKey key;

  FSDP_DEVICE CompactWeights(const AdamW &step, const CompactSpan &span)
      : span(span), key{step.seed, span.name, step.number} {}

  template <unsigned n>
  FSDP_DEVICE Pack<float, n> load(uint64_t i) const {
    if (span.form == MainForm::float32) return load_pack<n>(static_cast<const float *>(span.weight) + i);
    const Pack<uint16_t, n> upper = load_pack<n>(static_cast<const uint16_t *>(span.weight) + i);
    Pack<int16_t, n> rest{};
    if (span.form == MainForm::split16) rest = load_pack<n>(static_cast<const int16_t *>(span.rest) + i);
    Pack<float, n> values;
    for (unsigned j = 0; j < n; ++j) values.lane[j] = float_of(join_weight(upper.lane[j], rest.lane[j]));
    return values;
  }

  template <unsigned n>
  FSDP_DEVICE void store(uint64_t i, const Pack<float, n> &values) const {
    if (span.form == MainForm::split16) return split<n>(i, values);
    if (span.form == MainForm::rounded) return round<n>(i, values);
    store_pack<n>(static_cast<float *>(span.weight) + i, values);
    if (!publishes(span)) return;
    if (span.compute_dtype == FSDP_BFLOAT16) return cuda::store<BF16, n>(span.compute, i, values);
    if (span.compute_dtype == FSDP_FLOAT16) return cuda::store<F16, n>(span.compute, i, values);
    cuda::store<F32, n>(span.compute, i, values);
  }

 private:
  template <unsigned n>
  FSDP_DEVICE void split(uint64_t i, const Pack<float, n> &values) const {
    Pack<uint16_t, n> upper;
    Pack<int16_t, n> rest;
    for (unsigned j = 0; j < n; ++j) {
      const SplitWeight halves = split_weight(bits_of(values.lane[j]));
      upper.lane[j] = halves.upper;
      rest.lane[j] = halves.rest;
    }
    store_pack<n>(static_cast<uint16_t *>(span.weight) + i, upper);
    store_pack<n>(span.rest + i, rest);
  }
  template <unsigned n>
  FSDP_DEVICE void round(uint64_t i, const Pack<float, n> &values) const {
    const Pack<uint32_t, n> random = random_bits<n>(key, span.numbers, i);
    Pack<uint16_t, n> rounded;
    for (unsigned j = 0; j < n; ++j) rounded.lane[j] = round_randomly(bits_of(values.lane[j]), random.lane[j]);
    store_pack<n>(static_cast<uint16_t *>(span.weight) + i, rounded);
  }
};

// Do all arrays except the states have the misfit `at`?
FSDP_BOTH bool are_alike(const CompactSpan &span, unsigned at) {
  const unsigned weight_bytes = span.form == MainForm::float32 ? 4 : 2;
  bool alike = misfit(span.weight, weight_bytes) == at && misfit(span.grad, 4) == at;
  if (span.form == MainForm::split16) alike = alike && misfit(span.rest, 2) == at;
  if (publishes(span)) alike = alike && misfit(span.compute, span.compute_dtype == FSDP_FLOAT32 ? 4 : 2) == at;
  return alike;
}

// States in fp32.

// With two packs at a time the compiler would keep them in memory and not in registers, because rounding needs much
// code.
constexpr unsigned compact_packs_per_thread = 1;

FSDP_BOTH Division divide_compact(const CompactSpan &span) {
  if (span.exp_avg_scales) return {};  // spans with codes are the work of CodedUpdate
  const unsigned at = misfit(span.exp_avg, sizeof(float));
  return divide(span.count, at, are_alike(span, at) && misfit(span.exp_avg_sq, sizeof(float)) == at);
}

struct CompactUpdate {
  AdamWFormula formula;
  CompactWeights weights;

  FSDP_DEVICE CompactUpdate(const AdamW &step, const CompactSpan &span) : formula(step), weights(step, span) {}

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    const CompactSpan &span = weights.span;
    auto *const averages = static_cast<float *>(span.exp_avg), *const squares = static_cast<float *>(span.exp_avg_sq);
    Pack<float, n> weight[m], grad[m], average[m], square[m];
    for (unsigned k = 0; k < m; ++k) {
      const uint64_t i = first + k * step;
      grad[k] = load_pack<n>(span.grad + i);
      average[k] = load_pack<n>(static_cast<const float *>(averages) + i);
      square[k] = load_pack<n>(static_cast<const float *>(squares) + i);
      weight[k] = weights.load<n>(i);
    }
    for (unsigned k = 0; k < m; ++k) {
      const uint64_t i = first + k * step;
      for (unsigned j = 0; j < n; ++j)
        formula.update(weight[k].lane[j], grad[k].lane[j], average[k].lane[j], square[k].lane[j]);
      store_pack<n>(averages + i, average[k]);
      store_pack<n>(squares + i, square[k]);
      weights.store<n>(i, weight[k]);
    }
  }
};

__global__ void __launch_bounds__(threads) update_compact(const __grid_constant__ CompactUpdates updates) {
  const unsigned which = updates.batch.span_of(blockIdx.x);
  const CompactSpan span = updates.batch.spans[which];
  run_block<compact_packs_per_thread>(CompactUpdate(updates.get_step(), span), divide_compact(span),
                                      blockIdx.x - updates.batch.first_block[which], threadIdx.x);
}

// States in codes.

FSDP_TABLE StateMap signed_map = make_state_map(true);
FSDP_TABLE StateMap unsigned_map = make_state_map(false);

// The numbers of a map's codes, and its limits in the order of a binary search: first the limit in the middle, then the
// limits in the middle of each half, and so on. With this order the threads of a warp seldom read different limits from
// the same memory bank.
struct StateSearch {
  float value[256], limit[256];

  // Each of 256 threads writes one number and one limit.
  FSDP_DEVICE void make(const StateMap &map, unsigned thread) {
    value[thread] = map.value[thread];
    if (thread == 0) return;
    unsigned width = 256;  // one more than the number of limits between which the search decides at this node
    for (unsigned node = thread; node > 1; node /= 2) width /= 2;
    limit[thread] = map.limit[(thread - 256 / width) * width + width / 2 - 1];
  }
  // Gives the same result as state_code().
  FSDP_DEVICE uint8_t code(float ratio) const {
    unsigned node = 1;
    for (unsigned level = 0; level < 8; ++level) node = 2 * node + (ratio > limit[node]);
    return static_cast<uint8_t>(node - 256);
  }
};

// A warp updates one block of states. Each of its threads updates 8 elements of the block.
struct CodedUpdate : CompactUpdates {
  static constexpr unsigned threads = cuda::threads, lanes = 32, warps = threads / lanes;
  static constexpr unsigned per_thread = state_block / lanes;
  struct StatesOfWarps {
    StateSearch signed_search, unsigned_search;
    float first[warps * state_block], second[warps * state_block];
    uint32_t first_largest[threads], second_largest[threads];
  };

  using Shared = StatesOfWarps;

  // The block of states that a warp updates.
  struct WarpBlock {
    CompactSpan span;
    uint64_t block, count;  // count is 0 if the span does not have the block
    unsigned warp, lane;
    bool wide;

    FSDP_DEVICE uint64_t begin() const { return block * state_block; }
    // Calls visit.run<n>(i) for each pack of this thread: n elements, starting at element i of the block.
    template <class Visit>
    FSDP_DEVICE void each(const Visit &visit) const {
      if (wide) {
        for (unsigned k = 0; k < per_thread / pack; ++k) visit.template run<pack>((k * lanes + lane) * pack);
      } else {
        for (unsigned i = lane; i < count; i += lanes) visit.template run<1>(i);
      }
    }
  };

  FSDP_DEVICE WarpBlock place() const {
    const unsigned which = batch.span_of(blockIdx.x), warp = threadIdx.x / lanes;
    const CompactSpan span = batch.spans[which];
    const uint64_t block = uint64_t{blockIdx.x - batch.first_block[which]} * warps + warp, begin = block * state_block;
    const uint64_t left = begin < span.count ? span.count - begin : 0, count = left < state_block ? left : state_block;
    const bool aligned = are_alike(span, 0) && misfit(span.exp_avg, 1) == 0 && misfit(span.exp_avg_sq, 1) == 0;
    return {span, block, count, warp, threadIdx.x % lanes, aligned && count == state_block};
  }

  // Decodes the states, updates them and the weights, and leaves the new states in shared memory.
  struct CodedStep {
    const WarpBlock &place;
    Shared &shared;
    AdamWFormula formula;
    CompactWeights weights;
    float first_scale, second_scale;
    uint32_t &first_largest, &second_largest;

    template <unsigned n>
    FSDP_DEVICE void run(unsigned at) const {
      const CompactSpan &span = place.span;
      const uint64_t i = place.begin() + at;
      const Pack<float, n> grad = load_pack<n>(span.grad + i);
      const Pack<uint8_t, n> firsts = load_pack<n>(static_cast<const uint8_t *>(span.exp_avg) + i);
      const Pack<uint8_t, n> seconds = load_pack<n>(static_cast<const uint8_t *>(span.exp_avg_sq) + i);
      Pack<float, n> weight = weights.load<n>(i);
      for (unsigned j = 0; j < n; ++j) {
        float m = multiplied(shared.signed_search.value[firsts.lane[j]], first_scale);
        float v = multiplied(shared.unsigned_search.value[seconds.lane[j]], second_scale);
        formula.update(weight.lane[j], grad.lane[j], m, v);
        shared.first[place.warp * state_block + at + j] = m;
        shared.second[place.warp * state_block + at + j] = v;
        raise(first_largest, m), raise(second_largest, v);
      }
      weights.store<n>(i, weight);
    }
    FSDP_DEVICE static void raise(uint32_t &largest, float value) {
      const uint32_t magnitude = bits_of(value) & fp32_magnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
  };

  struct Encode {
    const WarpBlock &place;
    const Shared &shared;
    float first_scale, second_scale;

    template <unsigned n>
    FSDP_DEVICE void run(unsigned at) const {
      Pack<uint8_t, n> firsts, seconds;
      for (unsigned j = 0; j < n; ++j) {
        const float m = shared.first[place.warp * state_block + at + j];
        const float v = shared.second[place.warp * state_block + at + j];
        firsts.lane[j] = shared.signed_search.code(divided(m, first_scale));
        const uint8_t code = shared.unsigned_search.code(divided(v, second_scale));
        seconds.lane[j] = code == unsigned_zero_code && v > 0 ? 1 : code;
      }
      const uint64_t i = place.begin() + at;
      store_pack<n>(static_cast<uint8_t *>(place.span.exp_avg) + i, firsts);
      store_pack<n>(static_cast<uint8_t *>(place.span.exp_avg_sq) + i, seconds);
    }
  };

  FSDP_DEVICE void first(Shared &shared) const {
    shared.signed_search.make(signed_map, threadIdx.x);
    shared.unsigned_search.make(unsigned_map, threadIdx.x);
  }
  FSDP_DEVICE void second(Shared &shared) const {
    const WarpBlock at = place();
    uint32_t first_largest = 0, second_largest = 0;
    if (at.count > 0) {
      const AdamW step = get_step();
      at.each(CodedStep{at, shared, AdamWFormula(step), CompactWeights(step, at.span), at.span.exp_avg_scales[at.block],
                     at.span.exp_avg_sq_scales[at.block], first_largest, second_largest});
    }
    shared.first_largest[threadIdx.x] = first_largest;
    shared.second_largest[threadIdx.x] = second_largest;
  }
  FSDP_DEVICE void third(Shared &shared) const {
    const WarpBlock at = place();
    if (at.count == 0) return;
    const float first_scale = scale_of(shared.first_largest + at.warp * lanes);
    const float second_scale = scale_of(shared.second_largest + at.warp * lanes);
    if (at.lane == 0) {
      at.span.exp_avg_scales[at.block] = first_scale;
      at.span.exp_avg_sq_scales[at.block] = second_scale;
    }
    at.each(Encode{at, shared, first_scale, second_scale});
  }
  FSDP_DEVICE static float scale_of(const uint32_t *largest_of_lanes) {
    uint32_t largest = 0;
    for (unsigned i = 0; i < lanes; ++i) largest = largest_of_lanes[i] > largest ? largest_of_lanes[i] : largest;
    return state_scale(largest);
  }
};
static_assert(sizeof(CodedUpdate) <= max_argument_bytes);

uint64_t coded_blocks(const CompactSpan &span) {
  if (!span.exp_avg_scales) return 0;
  return (state_blocks(span.count) + CodedUpdate::warps - 1) / CodedUpdate::warps;
}

int update_all_compact(kernels::Stream stream, const AdamW &step, const AdamW *step_in_memory,
                       std::span<const CompactSpan> spans) {
  CodedUpdate updates{};
  updates.step = step;
  updates.step_in_memory = step_in_memory;
  const auto blocks = [](const CompactSpan &span) {
    return blocks_of<compact_packs_per_thread>(divide_compact(span));
  };
  if (const int error = launch_all(updates.batch, spans, blocks, [&](unsigned count) {
        const CompactUpdates &compact = updates;
        return FSDP_LAUNCH(update_compact, count, threads, stream, compact);
      }))
    return error;
  return launch_all(updates.batch, spans, coded_blocks, [&](unsigned count) {
    return FSDP_LAUNCH_PHASED(updates, count, updates.threads, stream);
  });
}

// Stochastic rounding without AdamW.

struct RoundRandomly {
  static constexpr unsigned batch = 2;
  RandomRounding work;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<float, n> values[m];
    for (unsigned k = 0; k < m; ++k) values[k] = load_pack<n>(work.from + first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      const uint64_t i = first + k * step;
      const Pack<uint32_t, n> random = random_bits<n>(work.key, work.numbers, i);
      Pack<uint16_t, n> rounded;
      for (unsigned j = 0; j < n; ++j) rounded.lane[j] = round_randomly(bits_of(values[k].lane[j]), random.lane[j]);
      store_pack<n>(work.to + i, rounded);
    }
  }
};

}  // namespace

namespace kernels {

int compact_adamw(Stream stream, const AdamW &step, std::span<const CompactSpan> spans) {
  return update_all_compact(stream, step, nullptr, spans);
}

int compact_adamw_from(Stream stream, const AdamW *step, std::span<const CompactSpan> spans) {
  return update_all_compact(stream, AdamW{}, step, spans);
}

int round_randomly(Stream stream, const RandomRounding &work) {
  const unsigned at = misfit(work.from, sizeof(float));
  return for_each(RoundRandomly{work}, divide(work.count, at, misfit(work.to, sizeof(uint16_t)) == at), stream);
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
