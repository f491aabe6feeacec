// SPDX-License-Identifier: Apache-2.0
#include "layout/flat_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/error.h"

namespace fsdp::layout {
namespace {

using Tensors = std::vector<TensorSpec>;

TensorSpec tensor(std::vector<uint64_t> shape, fsdp_granule granule = FSDP_GRANULE_ROW, uint64_t granule_rows = 0) {
  return {std::move(shape), granule, granule_rows};
}

void append(Tensors &to, const Tensors &more) { to.insert(to.end(), more.begin(), more.end()); }

Tensors deepseek_attention() {
  return {tensor({1536, 7168}), tensor({1536}),        tensor({24576, 1536}), tensor({576, 7168}), tensor({512}),
          tensor({32768, 512}), tensor({7168, 16384}), tensor({7168}),        tensor({7168})};
}

Tensors deepseek_dense_layer() {
  Tensors layer = deepseek_attention();
  append(layer, {tensor({18432, 7168}), tensor({18432, 7168}), tensor({7168, 18432})});
  return layer;
}

Tensors deepseek_experts() {
  Tensors layer{tensor({256, 7168}), tensor({256})};
  for (int expert = 0; expert < 257; ++expert)
    append(layer, {tensor({2048, 7168}), tensor({2048, 7168}), tensor({7168, 2048})});
  return layer;
}

Tensors deepseek_expert_layer() {
  Tensors layer = deepseek_attention();
  append(layer, deepseek_experts());
  return layer;
}

Tensors llama_layer(uint64_t hidden = 4096, uint64_t kv = 1024, uint64_t inner = 14336) {
  return {tensor({hidden, hidden}), tensor({kv, hidden}),    tensor({kv, hidden}),
          tensor({hidden, hidden}), tensor({inner, hidden}), tensor({inner, hidden}),
          tensor({hidden, inner}),  tensor({hidden}),        tensor({hidden})};
}

Tensors qwen_layer() {
  Tensors layer = llama_layer(3584, 512, 18944);
  append(layer, {tensor({3584}), tensor({512}), tensor({512})});
  return layer;
}

Tensors gpt2_layer() {
  return {tensor({768}), tensor({768}), tensor({2304, 768}), tensor({2304}), tensor({768, 768}),  tensor({768}),
          tensor({768}), tensor({768}), tensor({3072, 768}), tensor({3072}), tensor({768, 3072}), tensor({768})};
}

double padding_percent(const FlatLayout &layout) {
  return 100.0 * static_cast<double>(layout.full_count - layout.used_count) / static_cast<double>(layout.used_count);
}

double padding_percent(const Tensors &tensors, uint32_t ranks) {
  const FlatLayout layout = build_flat_layout(tensors, ranks);
  EXPECT_EQ(validate(layout, tensors), "");
  return padding_percent(layout);
}

// Every rank's slices, put one after the other, contain each tensor exactly once. The slices of one rank do not
// overlap.
void check_slices(const FlatLayout &layout) {
  std::vector<uint64_t> next(layout.tensors.size(), 0);
  for (uint32_t rank = 0; rank < layout.ranks; ++rank) {
    std::vector<std::pair<uint64_t, uint64_t>> in_shard;
    for (size_t t = 0; t < layout.tensors.size(); ++t) {
      const Slice slice = layout.slice(t, rank);
      if (slice.count == 0) continue;
      ASSERT_EQ(slice.tensor_offset, next[t]);
      ASSERT_EQ(slice.tensor_offset % layout.tensors[t].granule, 0u);
      ASSERT_EQ(slice.full_offset, layout.tensors[t].full_offset + slice.tensor_offset);
      const SubBucket &bucket = layout.sub_buckets[layout.tensors[t].sub_bucket];
      ASSERT_EQ(slice.full_offset - bucket.full_offset - rank * bucket.shard_count,
                slice.shard_offset - bucket.shard_offset);
      next[t] += slice.count;
      in_shard.emplace_back(slice.shard_offset, slice.shard_offset + slice.count);
    }
    std::ranges::sort(in_shard);
    for (size_t i = 1; i < in_shard.size(); ++i) ASSERT_LE(in_shard[i - 1].second, in_shard[i].first);
    if (!in_shard.empty()) {
      ASSERT_LE(in_shard.back().second, layout.shard_count);
    }
  }
  for (size_t t = 0; t < layout.tensors.size(); ++t) ASSERT_EQ(next[t], layout.tensors[t].count);
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  uint64_t below(uint64_t end) { return engine_() % end; }
  // Small numbers are as likely as large ones.
  uint64_t size(uint64_t most) { return 1 + below(std::max<uint64_t>(1, most >> below(8))); }

  TensorSpec tensor() {
    static constexpr fsdp_granule granules[] = {FSDP_GRANULE_ROW, FSDP_GRANULE_ROW, FSDP_GRANULE_BLOCK,
                                                FSDP_GRANULE_TENSOR};
    TensorSpec spec{{}, granules[below(4)], 1 + below(130)};
    const uint64_t round = below(2) ? 1 : 16;
    for (uint64_t d = below(4); d-- > 0;) spec.shape.push_back(size(500) * (below(2) ? 1 : round));
    if (spec.shape.size() == 3) spec.shape[2] = size(20);
    spec.row_dimensions = static_cast<uint32_t>(1 + below(std::max<uint64_t>(spec.shape.size(), 1)));
    return spec;
  }

 private:
  std::mt19937 engine_;
};

TEST(FlatLayout, KeepsItsPromisesOnRandomShapes) {
  for (uint32_t seed = 0; seed < 1500; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Tensors tensors;
    for (uint64_t n = random.below(30); n-- > 0;) tensors.push_back(random.tensor());
    const auto ranks = static_cast<uint32_t>(random.size(1024));
    const FlatLayout layout = build_flat_layout(tensors, ranks);
    ASSERT_EQ(validate(layout, tensors), "") << ranks << " ranks";
    if (seed % 5 == 0) check_slices(layout);
    const FlatLayout again = build_flat_layout(tensors, ranks);
    ASSERT_EQ(layout.hash, again.hash);
    ASSERT_EQ(layout.full_count, again.full_count);
    if (ranks == 1) {
      ASSERT_LE(layout.full_count, layout.used_count + alignment * (tensors.size() + 1));
    }
  }
}

// Computes the shortest slice with which the ranks can have all rows one after the other, if only the tensors are
// aligned.
uint64_t slice_of_rows(const Tensors &tensors, uint32_t ranks) {
  std::vector<uint64_t> rows;
  uint64_t total = 0, longest = 0;
  for (const TensorSpec &spec : tensors) {
    const uint64_t row = spec.shape.size() > 1 ? spec.shape[1] : 1;
    rows.insert(rows.end(), spec.shape[0], row);
    if (&spec != &tensors.back()) rows.push_back((alignment - spec.shape[0] * row % alignment) % alignment);
    longest = std::max(longest, row);
  }
  for (const uint64_t row : rows) total += row;
  const auto is_enough = [&](uint64_t slice) {
    uint64_t used = 0, full = 0;
    for (const uint64_t row : rows) {
      if (used + row > slice) used = 0, ++full;
      used += row;
    }
    return full < ranks;
  };
  uint64_t slice = std::max(longest, (total + ranks - 1) / ranks);
  while (!is_enough(slice)) ++slice;
  return slice;
}

double beside_rows(const Tensors &tensors, uint32_t ranks) {
  const FlatLayout layout = build_flat_layout(tensors, ranks);
  EXPECT_EQ(validate(layout, tensors), "");
  return static_cast<double>(layout.full_count) / static_cast<double>(slice_of_rows(tensors, ranks) * ranks);
}

TEST(FlatLayout, SmallTensorsPadLittleMoreThanTheirRowsDo) {
  EXPECT_LT(beside_rows(Tensors(6, tensor({128, 128})), 5), 1.01);  // 2.33 if slices cut rows
  Tensors adapters;
  for (int layer = 0; layer < 4; ++layer) {
    adapters.push_back(tensor({8, 4096}));
    adapters.push_back(tensor({4096, 8}));
  }
  EXPECT_LT(beside_rows(adapters, 7), 1.1);
  EXPECT_LT(beside_rows({tensor({166, 161}), tensor({99, 197})}, 13),
            1.2);  // 5.3 if slices keep sub-buckets aligned
  EXPECT_LT(beside_rows(Tensors(8, tensor({5, 201})), 14),
            1.8);  // 21.7 if rows of tensors longer than a slice are cut
}

// A tensor that crosses a boundary begins at a multiple of its row and of the alignment at once, which costs more than
// a tenth in one of 33 small cases.
TEST(FlatLayout, SmallTensorsPadLittleMoreThanTheirRowsDoInASweep) {
  Random random(5);
  int many = 0;
  double worst = 0;
  for (int i = 0; i < 4096; ++i) {
    const auto ranks = static_cast<uint32_t>(2 + random.below(15));
    const auto size = [&](uint64_t most) { return 8 * (1 + random.below(most / 8)); };
    Tensors tensors;
    for (uint64_t n = 1 + random.below(12); n > 0; --n)
      tensors.push_back(random.below(4) ? tensor({size(300), size(300)}) : tensor({size(1000)}));
    if (random.below(2)) tensors.assign(tensors.size(), tensors.front());
    const double ratio = beside_rows(tensors, ranks);
    many += ratio > 1.1;
    worst = std::max(worst, ratio);
  }
  EXPECT_LT(many, 4096 / 33);
  EXPECT_LT(worst, 2.1);
}

TensorSpec stack(std::vector<uint64_t> shape, uint32_t row_dimensions) {
  TensorSpec spec = tensor(std::move(shape));
  spec.row_dimensions = row_dimensions;
  return spec;
}

// 8 experts are on more ranks than experts, or on a number of ranks that does not divide them.
TEST(FlatLayout, StacksPadLittleWhereRanksDivideTheirMatrices) {
  const std::vector<uint64_t> experts{8, 2048, 7168};
  EXPECT_DOUBLE_EQ(padding_percent({stack(experts, 1)}, 16), 100);
  EXPECT_DOUBLE_EQ(padding_percent({stack(experts, 1)}, 24), 200);
  for (const uint32_t ranks : {3u, 16u, 24u, 100u, 256u}) EXPECT_LT(padding_percent({stack(experts, 2)}, ranks), 1);
  const std::vector<uint64_t> pair{2, uint64_t{64} << 20};
  EXPECT_DOUBLE_EQ(padding_percent({stack(pair, 1)}, 8), 300);
  EXPECT_LT(padding_percent({stack(pair, 2)}, 8), 0.01);
}

TEST(FlatLayout, KeepsItsPromisesForStacksOnAnyRanks) {
  const std::vector<std::vector<uint64_t>> shapes{{1},         {7},          {3, 5},          {5, 1, 3},
                                                  {4, 6, 10},  {8, 33, 64},  {2, 3, 5, 7},    {1, 300, 2},
                                                  {17, 1, 96}, {2, 2, 2, 8}, {1, 1, 129, 11}, {6, 128, 128}};
  for (uint32_t ranks = 1; ranks < 40; ranks += ranks < 9 ? 1 : 6) {
    Tensors all;
    for (const std::vector<uint64_t> &shape : shapes)
      for (uint32_t rows = 1; rows <= shape.size(); ++rows)
        for (const fsdp_granule granule : {FSDP_GRANULE_ROW, FSDP_GRANULE_BLOCK, FSDP_GRANULE_TENSOR}) {
          TensorSpec spec = stack(shape, rows);
          spec.granule = granule, spec.granule_rows = 3;
          const FlatLayout alone = build_flat_layout({&spec, 1}, ranks);
          ASSERT_EQ(validate(alone, {&spec, 1}), "") << ranks << " ranks";
          check_slices(alone);
          all.push_back(std::move(spec));
        }
    const FlatLayout layout = build_flat_layout(all, ranks);
    ASSERT_EQ(validate(layout, all), "") << ranks << " ranks";
    check_slices(layout);
  }
}

// The independent check notices a boundary inside a row, and rows of another kind.
TEST(FlatLayout, ChecksRowsOfStacks) {
  const Tensors tensors{stack({4, 6, 10}, 2)};
  const FlatLayout layout = build_flat_layout(tensors, 8);
  EXPECT_EQ(validate(layout, tensors), "");
  EXPECT_NE(validate(layout, Tensors{stack({4, 6, 10}, 1)}), "");
  EXPECT_NE(validate(layout, Tensors{stack({4, 6, 10}, 3)}), "");
}

TEST(FlatLayout, SlicesCoverRealisticLayers) {
  for (uint32_t ranks : {1u, 2u, 3u, 7u, 8u, 64u, 257u, 1024u}) {
    SCOPED_TRACE(ranks);
    for (const Tensors &layer : {deepseek_dense_layer(), llama_layer(), qwen_layer(), gpt2_layer()}) {
      const FlatLayout layout = build_flat_layout(layer, ranks);
      ASSERT_EQ(validate(layout, layer), "");
      check_slices(layout);
    }
  }
}

TEST(FlatLayout, HandlesManyRanks) {
  for (uint32_t ranks : {4096u, 16384u, 16385u, 100000u}) {
    EXPECT_EQ(validate(build_flat_layout(gpt2_layer(), ranks), gpt2_layer()), "");
    EXPECT_EQ(validate(build_flat_layout(llama_layer(), ranks), llama_layer()), "");
  }
}

TEST(FlatLayout, OfNothingIsEmpty) {
  const FlatLayout layout = build_flat_layout({}, 4);
  EXPECT_EQ(layout.full_count, 0u);
  EXPECT_EQ(layout.shard_count, 0u);
  EXPECT_TRUE(layout.sub_buckets.empty());
  EXPECT_EQ(validate(layout, {}), "");
}

TEST(FlatLayout, PlacesAScalarOnOneRank) {
  const Tensors tensors{tensor({})};
  const FlatLayout layout = build_flat_layout(tensors, 4);
  ASSERT_EQ(validate(layout, tensors), "");
  uint64_t total = 0;
  for (uint32_t rank = 0; rank < 4; ++rank) total += layout.slice(0, rank).count;
  EXPECT_EQ(total, 1u);
}

TEST(FlatLayout, KeepsBlocksAndTensorsWhole) {
  const Tensors tensors{tensor({1000, 64}, FSDP_GRANULE_BLOCK, 32), tensor({300, 64}, FSDP_GRANULE_TENSOR),
                        tensor({20, 64}, FSDP_GRANULE_BLOCK, 32)};
  const FlatLayout layout = build_flat_layout(tensors, 8);
  ASSERT_EQ(validate(layout, tensors), "");
  EXPECT_EQ(layout.tensors[0].granule, 32u * 64);
  EXPECT_EQ(layout.tensors[1].granule, 300u * 64);
  EXPECT_EQ(layout.tensors[2].granule, 20u * 64);
  int owners = 0;
  for (uint32_t rank = 0; rank < 8; ++rank) owners += layout.slice(1, rank).count != 0;
  EXPECT_EQ(owners, 1);
}

TEST(FlatLayout, PadsLittleOnDeepSeek) {
  for (uint32_t ranks : {1u, 8u, 64u, 256u}) {
    SCOPED_TRACE(ranks);
    EXPECT_LT(padding_percent(deepseek_dense_layer(), ranks), 0.5);
    EXPECT_LT(padding_percent(deepseek_expert_layer(), ranks), 0.5);
    EXPECT_LT(padding_percent(deepseek_experts(), ranks), 0.5);
  }
  EXPECT_LT(padding_percent(deepseek_dense_layer(), 1024), 1.0);
  EXPECT_LT(padding_percent(deepseek_expert_layer(), 1024), 1.0);
  // 2,112 rows of 7,168 elements lie on 256 ranks. The 9th row of each rank is a quarter full.
  EXPECT_LT(padding_percent(deepseek_attention(), 256), 0.6);
}

TEST(FlatLayout, PadsLittleOnDenseModels) {
  for (uint32_t ranks : {1u, 3u, 8u, 64u, 256u}) {
    SCOPED_TRACE(ranks);
    EXPECT_LT(padding_percent(llama_layer(), ranks), 0.1);
    EXPECT_LT(padding_percent(qwen_layer(), ranks), 0.1);
    EXPECT_LT(padding_percent(gpt2_layer(), ranks), 0.1);
  }
  EXPECT_LT(padding_percent(llama_layer(), 1024), 0.1);
  // 3,584 rows of 18,944 elements are 3.5 rows a rank; 768 rows of 3,072 are 0.75 a rank.
  EXPECT_LT(padding_percent(qwen_layer(), 1024), 4.2);
  EXPECT_LT(padding_percent(gpt2_layer(), 1024), 11.0);
}

TEST(FlatLayout, PrefersSlicesOfWholeCacheLines) {
  for (uint32_t ranks : {2u, 8u, 256u})
    for (const SubBucket &bucket : build_flat_layout(llama_layer(), ranks).sub_buckets)
      EXPECT_EQ(bucket.shard_count % 16, 0u);
}

TEST(FlatLayout, NeverPadsTinyModelsByMoreThanTheirAlignment) {
  const Tensors tensors{tensor({10, 4}), tensor({10}), tensor({})};
  const FlatLayout layout = build_flat_layout(tensors, 1);
  EXPECT_LE(layout.full_count, 3 * alignment);
}

// These numbers may change only with a new layout version: shards and checkpoints of running jobs depend on them.
TEST(FlatLayout, HashIsPinned) {
  EXPECT_EQ(build_flat_layout({}, 1).hash, 6371061477076718209u);
  EXPECT_EQ(build_flat_layout(gpt2_layer(), 8).hash, 9996869240691965938u);
  EXPECT_EQ(build_flat_layout(llama_layer(), 256).hash, 29457877314180110u);
  EXPECT_EQ(build_flat_layout(deepseek_expert_layer(), 256).hash, 10459853960841545661u);
  const Tensors mixed{tensor({1000, 33}), tensor({77, 5}, FSDP_GRANULE_TENSOR), tensor({}),
                      tensor({640, 48}, FSDP_GRANULE_BLOCK, 32)};
  EXPECT_EQ(build_flat_layout(mixed, 7).hash, 2929474216211553933u);
}

TEST(FlatLayout, HashDiffersWithEveryInput) {
  const Tensors base{tensor({64, 32}), tensor({128}), tensor({64, 16}, FSDP_GRANULE_BLOCK, 32)};
  std::vector<uint64_t> hashes{build_flat_layout(base, 4).hash, build_flat_layout(base, 5).hash};
  const auto changed = [&](auto change) {
    Tensors tensors = base;
    change(tensors);
    hashes.push_back(build_flat_layout(tensors, 4).hash);
  };
  changed([](Tensors &t) { t[0].shape = {32, 64}; });
  changed([](Tensors &t) { t[0].shape = {64, 2, 16}; });
  changed([](Tensors &t) { t[0].shape = {64, 33}; });
  changed([](Tensors &t) { t[0].row_dimensions = 2; });
  changed([](Tensors &t) { t[0].shape = {64, 1, 32}; });
  changed([](Tensors &t) { t[0].shape = {64, 1, 32}, t[0].row_dimensions = 2; });  // the same rows
  changed([](Tensors &t) { t[1].shape = {129}; });
  changed([](Tensors &t) { t[1].shape = {1, 128}; });
  changed([](Tensors &t) { t[2].granule_rows = 16; });
  changed([](Tensors &t) { t[2].granule_rows = 100; });
  changed([](Tensors &t) { t[2].granule = FSDP_GRANULE_TENSOR; });
  changed([](Tensors &t) { t[2].granule = FSDP_GRANULE_ROW; });
  changed([](Tensors &t) { std::swap(t[0], t[1]); });
  changed([](Tensors &t) { t.pop_back(); });
  std::ranges::sort(hashes);
  EXPECT_EQ(std::ranges::adjacent_find(hashes), hashes.end());
}

TEST(FlatLayout, HashIgnoresWhatDoesNotCount) {
  EXPECT_EQ(build_flat_layout(Tensors{tensor({8, 8}, FSDP_GRANULE_ROW, 5)}, 2).hash,
            build_flat_layout(Tensors{tensor({8, 8}, FSDP_GRANULE_ROW, 9)}, 2).hash);
}

fsdp_status status_of(const Tensors &tensors, uint32_t ranks) {
  try {
    build_flat_layout(tensors, ranks);
    return FSDP_OK;
  } catch (const Error &error) {
    return error.status;
  }
}

TEST(FlatLayout, RejectsInvalidInput) {
  EXPECT_EQ(status_of({tensor({4, 4})}, 0), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({4, 0})}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({0})}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({4, 4}, FSDP_GRANULE_BLOCK, 0)}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({4, 4}, 7)}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({4, 4}, 0)}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({stack({4, 4}, 0)}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({stack({4, 4}, 3)}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({stack({}, 2)}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({stack({}, 1), stack({4, 4}, 2)}, 2), FSDP_OK);
}

TEST(FlatLayout, RejectsSizesThatOverflow) {
  constexpr uint64_t huge = uint64_t{1} << 40;
  EXPECT_EQ(status_of({tensor({huge, huge})}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({2, huge, huge})}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({UINT64_MAX}), tensor({2})}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({UINT64_MAX})}, 2), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({UINT64_MAX - 100})}, 1000), FSDP_INVALID_ARGUMENT);
  // A single row cannot be cut, so each rank has a slice of the row's size.
  EXPECT_EQ(status_of({tensor({1, uint64_t{1} << 50})}, 1u << 20), FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(status_of({tensor({huge, 1024})}, 16384), FSDP_OK);
  EXPECT_EQ(status_of({tensor({8, 8}, FSDP_GRANULE_BLOCK, UINT64_MAX)}, 4), FSDP_OK);
}

// The layout refuses sizes near 2^64, or keeps its promises.
TEST(FlatLayout, NoSumWraps) {
  std::mt19937_64 random(11);
  int made = 0, refused = 0;
  for (int i = 0; i < 4000; ++i) {
    Tensors tensors(1 + random() % 5);
    for (TensorSpec &of : tensors) {
      const uint64_t rows = 1 + (random() >> (random() % 60 + 1)), row = 1 + (random() >> (40 + random() % 24));
      const fsdp_granule granules[] = {FSDP_GRANULE_ROW, FSDP_GRANULE_BLOCK, FSDP_GRANULE_TENSOR};
      of = tensor({rows, row}, granules[random() % 3], 1 + (random() >> (random() % 60)));
    }
    const auto ranks = static_cast<uint32_t>(1 + random() % 9);
    try {
      const FlatLayout layout = build_flat_layout(tensors, ranks);
      ++made;
      ASSERT_EQ(validate(layout, tensors), "") << i;
      ASSERT_GE(layout.full_count, layout.used_count);
    } catch (const Error &error) {
      ++refused;
      ASSERT_EQ(error.status, FSDP_INVALID_ARGUMENT) << error.message;
    }
  }
  EXPECT_GT(made, 500);
  EXPECT_GT(refused, 500);
}

// Makes a tensor as quantized parameters have it, with granules of `granule_rows` rows and `granule_scales` scales
// each.
TensorSpec scaled(std::vector<uint64_t> shape, uint64_t granule_rows, uint64_t granule_scales, uint64_t scale_count) {
  TensorSpec spec = tensor(std::move(shape), FSDP_GRANULE_BLOCK, granule_rows);
  spec.granule_scales = granule_scales;
  spec.scale_count = scale_count;
  return spec;
}

// Computed by hand: five granules of 128 x 300 with 3 scales, and two of 128 x 96 with 1. A tensor with fewer rows than
// a granule takes a whole granule, so that the next tensor starts where its scales do.
TEST(ScaleLayout, FollowsTheGranules) {
  const Tensors tensors = {scaled({300, 300}, 128, 3, 9), scaled({100, 96}, 128, 1, 1), scaled({256, 300}, 128, 3, 6),
                           scaled({128, 96}, 128, 1, 1)};
  const FlatLayout layout = build_flat_layout(tensors, 3);
  const FlatLayout scales = build_scale_layout(layout, tensors);
  EXPECT_EQ(validate(layout, tensors), "");
  EXPECT_EQ(validate_scales(layout, scales, tensors), "");
  ASSERT_EQ(layout.sub_buckets.size(), 2u);
  EXPECT_EQ(layout.sub_buckets[0].shard_count, 2u * 128 * 300);
  EXPECT_EQ(layout.sub_buckets[1].shard_count, 128u * 96);
  EXPECT_EQ(layout.tensors[2].full_offset, 3u * 128 * 300);
  EXPECT_EQ(layout.tensors[3].full_offset, 6u * 128 * 300 + 128 * 96);
  EXPECT_EQ(scales.sub_buckets[0].shard_count, 6u);
  EXPECT_EQ(scales.sub_buckets[1].full_offset, 18u);
  EXPECT_EQ(scales.sub_buckets[1].shard_offset, 6u);
  EXPECT_EQ(scales.full_count, 21u);
  EXPECT_EQ(scales.used_count, 17u);
  EXPECT_EQ(scales.tensors[2].full_offset, 9u);
  EXPECT_EQ(scales.tensors[3].full_offset, 19u);
  // Rank 1 has the last 44 rows of the first tensor, and the first 128 of the third.
  EXPECT_EQ(layout.slice(0, 1).count, 44u * 300);
  EXPECT_EQ(scales.slice(0, 1).tensor_offset, 6u);
  EXPECT_EQ(scales.slice(0, 1).count, 3u);
  EXPECT_EQ(layout.slice(2, 1).count, 128u * 300);
  EXPECT_EQ(scales.slice(2, 1).count, 3u);
}

TEST(ScaleLayout, AnySizesOnAnyRanks) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 300; ++i) {
    Tensors tensors(1 + random() % 6);
    for (TensorSpec &of : tensors) {
      const uint64_t rows = 1 + random() % 700, columns = 1 + random() % 300, across = (columns + 127) / 128;
      const uint64_t blocks = 1 + random() % 3;
      of = scaled({rows, columns}, 128 * blocks, across * blocks, (rows + 127) / 128 * across);
    }
    for (const uint32_t ranks : {1u, 2u, 3u, 7u, 16u}) {
      const FlatLayout layout = build_flat_layout(tensors, ranks);
      ASSERT_EQ(validate(layout, tensors), "") << i;
      ASSERT_EQ(validate_scales(layout, build_scale_layout(layout, tensors), tensors), "") << i << " on " << ranks;
    }
  }
}

// Each tensor has one scale, on one of the ranks. Each of three ranks has two of five scales: the last rank has one
// scale and room for another.
TEST(ScaleLayout, OfWholeTensors) {
  Tensors tensors;
  for (const uint64_t rows : {1, 7, 40, 3, 900}) tensors.push_back(tensor({rows, 24}));
  const FlatLayout layout = build_flat_layout(tensors, 3), scales = build_tensor_scale_layout(layout);
  EXPECT_EQ(validate_tensor_scales(layout, scales), "");
  EXPECT_EQ(scales.shard_count, 2u);
  EXPECT_EQ(scales.full_count, 6u);
  EXPECT_EQ(scales.used_count, 5u);
  for (uint64_t i = 0; i < 5; ++i)
    for (uint32_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(scales.slice(i, rank).count, rank == i / 2 ? 1u : 0u) << i;
      if (rank == i / 2) {
        EXPECT_EQ(scales.slice(i, rank).shard_offset, i % 2) << i;
      }
    }
  const auto broken = [&](auto change) {
    FlatLayout changed = scales;
    change(changed);
    return !validate_tensor_scales(layout, changed).empty();
  };
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[4].full_offset = 3; })) << "two at one place";
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[4].full_offset = 6; })) << "behind the end";
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[0].count = 2; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors.pop_back(); }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.sub_buckets[0].shard_offset = 1; }));
}

TEST(ScaleLayout, ValidateNoticesWhatIsBroken) {
  const Tensors tensors = {scaled({300, 300}, 128, 3, 9), scaled({256, 300}, 128, 3, 6)};
  const FlatLayout layout = build_flat_layout(tensors, 2), good = build_scale_layout(layout, tensors);
  const auto broken = [&](auto change) {
    FlatLayout scales = good;
    change(scales);
    return !validate_scales(layout, scales, tensors).empty();
  };
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[1].full_offset += 1; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[0].count -= 1; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors.pop_back(); }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.sub_buckets[0].shard_count += 3; }));
  FlatLayout late = layout;
  late.tensors[1].full_offset += 128;
  EXPECT_FALSE(validate(late, tensors).empty()) << "a quantized tensor between two granules";
}

TEST(FlatLayout, ValidateNoticesWhatIsBroken) {
  const Tensors tensors = gpt2_layer();
  const FlatLayout good = build_flat_layout(tensors, 8);
  const auto broken = [&](auto change) {
    FlatLayout layout = good;
    change(layout);
    return !validate(layout, tensors).empty();
  };
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[2].full_offset += 1; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[2].full_offset += 128; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[0].full_offset = l.tensors[2].full_offset; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[2].full_offset = l.full_count; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[2].granule = 1; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors[2].count -= 768; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.tensors.pop_back(); }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.sub_buckets[0].shard_count += 1; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.shard_count += 1; }));
  EXPECT_TRUE(broken([](FlatLayout &l) { l.used_count += 1; }));
}

}  // namespace
}  // namespace fsdp::layout
