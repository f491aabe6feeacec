// SPDX-License-Identifier: Apache-2.0
// Tests that a model's plan keeps the promises of its layouts and pools. The check that debug mode makes at the seal
// finds which promise is broken.
#include "memory/model_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "base/error.h"

namespace fsdp::memory {
namespace {

ParamSpec param(const std::string &name, std::vector<uint64_t> shape, fsdp_dtype dtype = FSDP_FLOAT32) {
  ParamSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  spec.dtype = dtype;
  return spec;
}

ModelSpec copied_model() {
  ModelSpec spec;
  spec.mesh() = layout::one_axis(3);
  spec.unshard_mode = FSDP_UNSHARD_COPIED;
  for (const std::string name : {"a", "b", "c", "d"}) {
    GroupSpec group;
    group.name = name;
    group.params = {param(name + ".w", {37, 24}), param(name + ".half", {51, 3}, FSDP_BFLOAT16),
                    param(name + ".b", {24})};
    spec.groups.push_back(group);
  }
  return spec;
}

uint64_t round_up_to(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool contains(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

// Returns the bytes by role in a plan with all groups on one mesh.
RoleBytes role_bytes(const ModelPlan &plan, uint32_t rank, uint32_t ranks) {
  const InnerPlace place{rank, ranks};
  return plan.role_bytes({&place, 1});
}

TEST(ModelPlan, KeepsItsPromises) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_COPIED, FSDP_UNSHARD_MAPPED})
    for (const fsdp_schedule_kind schedule : {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED}) {
      ModelSpec spec = copied_model();
      spec.unshard_mode = mode;
      spec.schedule = schedule;
      EXPECT_EQ(validate(plan_model(spec), spec), "");
    }
}

TEST(ModelPlan, TheCheckNamesWhatIsBroken) {
  const ModelSpec spec = copied_model();
  const ModelPlan good = plan_model(spec);
  ASSERT_GT(good.gather_pool.size_bytes, 0u);
  ASSERT_GT(good.grad_pool.size_bytes, 0u);

  ModelPlan bad = good;
  bad.buckets[2].layout.tensors[0].full_offset += 1;
  EXPECT_TRUE(contains(validate(bad, spec), "a bucket of group 'b': tensor 0 ")) << validate(bad, spec);
  bad = good;
  bad.gather_pool.offsets[1] = bad.gather_pool.offsets[0];  // gathered ahead while 'a' is in use
  EXPECT_TRUE(contains(validate(bad, spec), "the pool of gathered weights: requests 0 and 1 ")) << validate(bad, spec);
  bad = good;
  bad.grad_pool.size_bytes = 0;
  EXPECT_TRUE(contains(validate(bad, spec), "the pool of full gradients: request ")) << validate(bad, spec);
  bad = good;
  bad.region(RegionId::grad).bytes -= 4;
  EXPECT_TRUE(contains(validate(bad, spec), "a plane of group 'd' ends at byte ")) << validate(bad, spec);
  bad = good;
  for (PlanePlan &plane : bad.buckets[2].planes)
    if (plane.kind == PlaneKind::grad) plane.offset = 0;
  EXPECT_TRUE(contains(validate(bad, spec), "planes of the groups 'a' and 'b' share bytes of main grads"))
      << validate(bad, spec);
}

ParamSpec counted(const std::string &name, std::vector<uint64_t> shape, fsdp_dtype dtype = FSDP_FLOAT32) {
  ParamSpec spec = param(name, std::move(shape), dtype);
  for (const uint64_t size : spec.shape) spec.element_count *= size;
  return spec;
}

// Makes a layer of a usual transformer, in bf16 except for its norms.
ModelSpec layered_model(uint64_t width, uint32_t ranks) {
  ModelSpec spec;
  spec.mesh() = layout::one_axis(ranks);
  for (const std::string name : {"a", "b", "c"}) {
    GroupSpec group;
    group.name = name;
    group.params = {counted(name + ".norm", {width}), counted(name + ".qkv", {3 * width, width}, FSDP_BFLOAT16),
                    counted(name + ".proj", {width, width}, FSDP_BFLOAT16),
                    counted(name + ".up", {4 * width, width}, FSDP_BFLOAT16),
                    counted(name + ".down", {width, 4 * width}, FSDP_BFLOAT16)};
    spec.groups.push_back(group);
  }
  return spec;
}

// Each trainable parameter is in one part, in the order of declaration, and no part is empty.
void expect_cut(const ModelPlan &plan, const ModelSpec &spec) {
  for (const GroupPlan &group : plan.groups) {
    std::vector<uint32_t> params;
    for (const PartPlan &part : plan.parts_of(group)) {
      EXPECT_FALSE(part.params.empty());
      params.insert(params.end(), part.params.begin(), part.params.end());
      std::vector<uint32_t> of_buckets;
      for (const uint32_t b : part.buckets)
        of_buckets.insert(of_buckets.end(), plan.buckets[b].params.begin(), plan.buckets[b].params.end());
      std::ranges::sort(of_buckets);
      EXPECT_EQ(of_buckets, part.params);
    }
    std::vector<uint32_t> all(spec.groups[&group - plan.groups.data()].params.size());
    std::iota(all.begin(), all.end(), 0u);
    EXPECT_EQ(params, all);
  }
}

// The memory that a root group holds leaves others less than a layer. Then a layer is cut in two or three, and not into
// its parameters.
TEST(ModelPlan, PartsAreAsLargeAsRootGroupsLeave) {
  ModelSpec spec = layered_model(256, 2);
  GroupSpec embedding;
  embedding.name = "embedding";
  embedding.params = {counted("embedding.w", {4000, 256})};
  embedding.root = true;
  spec.groups.insert(spec.groups.begin(), embedding);
  spec.max_pending_bytes = 4000 * 256 * 4 + 1'200'000;  // a layer has 1.4 million
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(validate(plan, spec), "");
  expect_cut(plan, spec);
  EXPECT_LE(plan.region(RegionId::lent_grads).bytes, spec.max_pending_bytes);
  EXPECT_LE(plan.parts.size(), 1u + 3 * 3);
}

TEST(ModelPlan, PartsFitWhatTheyAreGiven) {
  for (const uint64_t width : {24u, 64u, 256u, 1024u})
    for (const uint32_t ranks : {1u, 2u, 3u, 8u, 64u}) {
      SCOPED_TRACE(testing::Message() << "width " << width << ", ranks " << ranks);
      ModelSpec spec = layered_model(width, ranks);
      const ModelPlan whole = plan_model(spec);
      EXPECT_EQ(whole.parts.size(), 3u);
      for (const uint64_t share : {1u, 2u, 3u, 4u, 5u}) {
        spec.max_pending_bytes = round_up_to(whole.grad_pool.size_bytes / share, page_bytes);
        ModelPlan plan;
        try {
          plan = plan_model(spec);
        } catch (const Error &error) {
          EXPECT_GT(share, 3u) << error.message;  // the largest parameter is a third of a layer
          continue;
        }
        EXPECT_EQ(validate(plan, spec), "");
        expect_cut(plan, spec);
        EXPECT_LE(plan.region(RegionId::lent_grads).bytes, spec.max_pending_bytes);
        EXPECT_EQ(plan.parts.size() > 3, share > 1);
        if (share == 1) {
          EXPECT_EQ(plan.layout_hash, whole.layout_hash);
        }
      }
    }
}

// A run that pads by half is replaced by a shorter one.
TEST(ModelPlan, PartsPadLittle) {
  ModelSpec spec = layered_model(256, 2);
  for (GroupSpec &group : spec.groups) {
    const std::string name = group.name;
    group.params = {counted(name + ".norm", {256}),     counted(name + ".q", {256, 256}),
                    counted(name + ".k", {256, 256}),   counted(name + ".v", {256, 256}),
                    counted(name + ".o", {256, 256}),   counted(name + ".norm2", {256}),
                    counted(name + ".up", {1024, 256}), counted(name + ".down", {256, 1024})};
  }
  spec.max_pending_bytes = plan_model(spec).grad_pool.size_bytes / 2;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(plan.pending_grads, 2u);
  EXPECT_LT(plan.padding_count, plan.element_count / 100);
}

// A parameter that is much larger than all others does not divide the other groups.
TEST(ModelPlan, ALargeVocabularyDividesNoLayer) {
  ModelSpec spec = layered_model(64, 4);
  GroupSpec embedding;
  embedding.name = "embedding";
  embedding.params = {counted("words", {5000, 64}), counted("places", {3000, 64})};
  spec.groups.push_front(embedding);
  spec.max_pending_bytes = (5000 + 3100) * 64 * 4;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(plan.pending_grads, 2u);
  EXPECT_EQ(plan.groups[0].part_count, 2u);
  for (size_t g = 1; g < 4; ++g) EXPECT_EQ(plan.groups[g].part_count, 1u);
  EXPECT_LE(plan.grad_pool.size_bytes, spec.max_pending_bytes);
}

// While the outer axis reads the sums of one turn, the inner one writes those of the next.
TEST(ModelPlan, TurnsOfPartialSumsLieApart) {
  ModelSpec spec = copied_model();
  spec.mesh() = layout::arrange_mesh({.ranks = {0, 1, 2, 3}, .hosts = {0, 0, 1, 1}});
  ASSERT_EQ(spec.mesh().outer, layout::OuterAxis::shard);
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(validate(plan, spec), "");
  const uint64_t turn = plan.region(RegionId::partial).bytes / 2;
  for (const BucketPlan &bucket : plan.buckets) {
    const uint64_t first = bucket.plane(PlaneKind::partial, 0).offset;
    EXPECT_LE(first + bucket.count(bucket.plane(PlaneKind::partial)) * 4, turn);
    EXPECT_EQ(bucket.plane(PlaneKind::partial, 1).offset, first + turn);
  }
  ModelPlan bad = plan;
  for (PlanePlan &plane : bad.buckets[2].planes)
    if (plane.kind == PlaneKind::partial) plane.offset = 0;
  EXPECT_TRUE(contains(validate(bad, spec), "sums in turn 1 of group 'b'")) << validate(bad, spec);
  bad = plan;
  for (PlanePlan &plane : bad.buckets[2].planes)
    if (plane.kind == PlaneKind::partial && plane.index == 1) plane.offset = turn - buffer_alignment;
  EXPECT_TRUE(contains(validate(bad, spec), "sums in turn 1 of group 'b'")) << validate(bad, spec);
}

// Full gradients that are reduced once a step in fp32 are themselves the main grads, and need no sums of turns. In
// debug mode on the host they do need them, because it takes the caller's view away.
TEST(ModelPlan, SumsStayWhereTheyAreIfNothingElseIsWrittenThere) {
  for (const bool debug : {false, true})
    for (const bool host : {false, true})
      for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST}) {
        ModelSpec spec = copied_model();
        spec.mesh() = layout::arrange_mesh({.ranks = {0, 1, 2, 3}, .hosts = {0, 0, 1, 1}});
        spec.debug = debug;
        spec.host_memory = host;
        for (GroupSpec &group : spec.groups) {
          group.reduce_policy = policy;
          group.params.push_back(param(group.name + ".frozen", {64}, FSDP_FLOAT16));
          group.params.back().flags = FSDP_PARAM_FROZEN;
        }
        const ModelPlan plan = plan_model(spec);
        EXPECT_EQ(validate(plan, spec), "");
        for (const BucketPlan &bucket : plan.buckets) {
          const bool stay = policy == FSDP_REDUCE_POLICY_LAST && bucket.dtype == FSDP_FLOAT32 && !(debug && host);
          EXPECT_EQ(bucket.find(PlaneKind::partial) != nullptr, !bucket.frozen && !stay);
          if (bucket.frozen) continue;
          EXPECT_EQ(bucket.plane(PlaneKind::grad).again, stay);
          EXPECT_EQ(std::ranges::count(bucket.planes, PlaneKind::grad, &PlanePlan::kind), 1);
        }
      }
}

using Shapes = std::vector<std::vector<uint64_t>>;

ParamSpec quantized(const std::string &name, std::vector<uint64_t> shape,
                    fsdp_quantization quantization = FSDP_QUANTIZE_FP8_BLOCK) {
  ParamSpec spec = param(name, std::move(shape), FSDP_BFLOAT16);
  spec.quantization = quantization;
  return spec;
}

// ROW planes are in one buffer and COLUMN planes in the other if a phase reads only one form. Otherwise each buffer has
// both.
TEST(ModelPlan, FormsAreGatheredByPhase) {
  for (const fsdp_plane_policy policy : {FSDP_PLANES_BY_PHASE, FSDP_PLANES_BY_PHASE_AND_RECOMPUTE, FSDP_PLANES_BOTH})
    for (const bool resident : {false, true})
      for (const fsdp_schedule_kind schedule : {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED}) {
        ModelSpec spec = copied_model();
        spec.plane_policy = policy;
        spec.schedule = schedule;
        for (GroupSpec &group : spec.groups) {
          group.params = {quantized(group.name, {64, 96}, FSDP_QUANTIZE_MXFP8)};
          group.resident = resident;
        }
        const bool interleaved = schedule == FSDP_SCHEDULE_INTERLEAVED;
        const auto violations = find_violations(spec).size();
        EXPECT_EQ(violations, interleaved ? 4 * ((policy == FSDP_PLANES_BY_PHASE_AND_RECOMPUTE) + resident) : 0);
        if (violations) continue;
        const ModelPlan plan = plan_model(spec);
        EXPECT_EQ(validate(plan, spec), "");
        const bool by_phase = policy != FSDP_PLANES_BOTH && !resident;
        const GroupPlan &group = plan.groups[0];
        EXPECT_EQ(group.by_phase, by_phase);
        EXPECT_EQ(group.slots, by_phase || interleaved ? 2u : 1u);
        // On 3 ranks, 64 x 96 has 3 granules of 32 rows, and a scale for 32 codes. Planes begin at multiples of 512.
        EXPECT_EQ(group.gathered_bytes(), by_phase ? 9216u + 288 : 9216u + 512 + 9216 + 288);
        const BucketPlan &bucket = plan.buckets[0];
        EXPECT_EQ(bucket.forms(), 2u);
        EXPECT_EQ(std::ranges::count(bucket.planes, PlaneKind::gathered, &PlanePlan::kind), by_phase      ? 2
                                                                                            : interleaved ? 4
                                                                                                          : 2);
        EXPECT_EQ(group.scale_shapes.at(0), (Shapes{{64, 3}, {2, 96}}));
      }
}

// Codes and scales lie beside the weights of others, in every form that a model has.
TEST(ModelPlan, QuantizedPlanesKeepThePromises) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_COPIED, FSDP_UNSHARD_MAPPED})
    for (const fsdp_schedule_kind schedule : {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED})
      for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
        for (const bool host : {false, true}) {
          ModelSpec spec = copied_model();
          spec.unshard_mode = mode;
          spec.schedule = schedule;
          spec.host_memory = host;
          for (GroupSpec &group : spec.groups) {
            group.strategy = strategy;
            group.params.push_back(quantized(group.name + ".quantized", {300, 70}));
            group.params.push_back(quantized(group.name + ".stack", {3, 128, 20}));
          }
          const ModelPlan plan = plan_model(spec);
          EXPECT_EQ(validate(plan, spec), "");
          uint32_t found = 0;
          for (const BucketPlan &bucket : plan.buckets) {
            if (!bucket.quantization) continue;
            ++found;
            EXPECT_EQ(bucket.params.size(), 2u);
            EXPECT_EQ(bucket.plane(PlaneKind::compute).dtype, FSDP_FLOAT8_E4M3);
            EXPECT_EQ(bucket.plane(PlaneKind::compute_scales).dtype, FSDP_FLOAT32);
            EXPECT_FALSE(bucket.plane(PlaneKind::main).again);
            const bool gathers = plan.groups[bucket.group].copies;
            EXPECT_EQ(std::ranges::count(bucket.planes, PlaneKind::gathered_scales, &PlanePlan::kind),
                      !gathers                                ? 0
                      : schedule == FSDP_SCHEDULE_INTERLEAVED ? 2
                                                              : 1);
          }
          EXPECT_EQ(found, spec.groups.size());
          EXPECT_EQ(plan.groups[0].scale_shapes.at(3), (Shapes{{3, 1}}));
          EXPECT_EQ(plan.groups[0].scale_shapes.at(4), (Shapes{{3, 1, 1}}));
          EXPECT_TRUE(plan.groups[0].scale_shapes.at(0).empty());
        }
}

// Elements lie as if they were not quantized, and each parameter has a scale on some rank.
TEST(ModelPlan, ScalesOfWholeParameters) {
  for (const bool host : {false, true}) {
    ModelSpec spec = copied_model();
    spec.host_memory = host;
    spec.groups[1].params.push_back(quantized("p", {300, 70}, FSDP_QUANTIZE_FP8));
    spec.groups[1].params.push_back(quantized("q", {7}, FSDP_QUANTIZE_FP8));
    spec.groups[2].params.push_back(quantized("r", {}, FSDP_QUANTIZE_FP8));
    spec.groups[3].params.push_back(quantized("s", {300, 70}));
    EXPECT_TRUE(find_violations(spec).empty());
    ModelPlan plan = plan_model(spec);
    EXPECT_EQ(validate(plan, spec), "");
    EXPECT_EQ(plan.amax_count, 3u);
    EXPECT_EQ(plan.region(RegionId::amaxes).bytes, host ? 4u * (3 + 3 * 3 + 3 + 3) : page_bytes);
    EXPECT_EQ(plan.groups[1].scale_shapes.at(3), (Shapes{{1, 1}}));
    EXPECT_EQ(plan.groups[1].scale_shapes.at(4), (Shapes{{1}}));
    EXPECT_EQ(plan.groups[2].scale_shapes.at(3), (Shapes{{}}));
    for (BucketPlan &bucket : plan.buckets)
      if (bucket.quantization == FSDP_QUANTIZE_FP8) {
        layout::FlatLayout odd = *bucket.scale_layout;
        odd.tensors[0].full_offset += 3;
        bucket.scale_layout = std::make_shared<const layout::FlatLayout>(std::move(odd));
      }
    EXPECT_TRUE(contains(validate(plan, spec), "a bucket of group 'b': tensor 0: 1 scales at 3 of 3"))
        << validate(plan, spec);
  }
}

TEST(ModelPlan, TheCheckSeesScalesThatDoNotFollow) {
  ModelSpec spec = copied_model();
  spec.groups[1].params = {quantized("q", {300, 70})};
  ModelPlan bad = plan_model(spec);
  for (BucketPlan &bucket : bad.buckets)
    if (bucket.quantization) {
      layout::FlatLayout odd = *bucket.scale_layout;
      odd.tensors[0].full_offset += 1;
      bucket.scale_layout = std::make_shared<const layout::FlatLayout>(std::move(odd));
    }
  EXPECT_TRUE(contains(validate(bad, spec), "a bucket of group 'b': ")) << validate(bad, spec);
}

// Peers cannot read the memory. A rank keeps only its slices, and gathers fill pool buffers even if mapping was
// requested.
TEST(ModelPlan, DevicesKeepTheirOwnSlicesAlone) {
  ModelSpec spec = copied_model();
  const ModelPlan host = plan_model(spec);
  spec.unshard_mode = FSDP_UNSHARD_MAPPED;
  spec.host_memory = false;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(validate(plan, spec), "");
  EXPECT_EQ(plan.layout_hash, host.layout_hash);
  EXPECT_EQ(plan.gather_pool.size_bytes, host.gather_pool.size_bytes);
  EXPECT_EQ(plan.gather_pool.offsets, host.gather_pool.offsets);
  EXPECT_EQ(plan.region(RegionId::mapped_compute).bytes, 0u);
  uint64_t end = 0;
  for (const BucketPlan &bucket : plan.buckets) {
    const PlanePlan &compute = bucket.plane(PlaneKind::compute);
    EXPECT_EQ(compute.region, RegionId::sharded_compute);
    EXPECT_GE(compute.offset, end);  // of the memory before it
    end = compute.offset + bucket.count(compute) * (bucket.dtype == FSDP_FLOAT32 ? 4 : 2);
  }
  EXPECT_LE(end, plan.region(RegionId::sharded_compute).bytes);
  EXPECT_EQ(role_bytes(plan, 0, 3)[FSDP_ROLE_COMPUTE], plan.region(RegionId::sharded_compute).bytes);
  EXPECT_EQ(role_bytes(plan, 0, 3), role_bytes(plan, 2, 3));
}

TEST(ModelPlan, ARankOfADeviceThatHasAllKeepsItInPlace) {
  ModelSpec spec = copied_model();
  spec.mesh() = layout::one_axis(1);
  spec.host_memory = false;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(plan.groups[0].pieces.front().compute.region, RegionId::local_compute);
  EXPECT_EQ(plan.region(RegionId::gathered).bytes, 0u);
  spec.force_communication = true;
  EXPECT_EQ(plan_model(spec).groups[0].pieces.front().compute.region, RegionId::sharded_compute);
}

// Two layers have attention (4 matrices of 4096 x 4096) and a feed-forward layer (3 of 4096 x 11008) in bf16.
ModelSpec layers_of_pieces(bool pieces, bool visited) {
  ModelSpec spec;
  spec.mesh() = layout::one_axis(8);
  spec.unshard_mode = FSDP_UNSHARD_COPIED;
  for (const std::string name : {"a", "b"}) {
    GroupSpec group;
    group.name = name;
    for (uint32_t m = 0; m < 7; ++m) {
      group.params.push_back(param(name + std::to_string(m), {4096, m < 4 ? 4096u : 11008u}, FSDP_BFLOAT16));
      group.params.back().piece = pieces && m >= 4 ? 1 : 0;
    }
    spec.groups.push_back(group);
  }
  spec.schedule = FSDP_SCHEDULE_VISITS;
  for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD})
    for (const uint32_t g : {0u, 1u})
      for (const uint32_t p : {0u, 1u})
        if (visited || p == 0) spec.visits.push_back({g, phase, visited ? FSDP_PIECE(p) : 0});
  return spec;
}

TEST(ModelPlan, PiecesThatVisitsNameNeedRoomForTwoOfThem) {
  constexpr uint64_t attention = 4 * 4096 * 4096 * 2, feed_forward = 3 * 4096 * 11008 * 2;
  for (const bool pieces : {false, true}) {
    const ModelSpec whole = layers_of_pieces(pieces, false);
    const uint64_t bytes = plan_model(whole).gather_pool.size_bytes, least = 2 * (attention + feed_forward);
    EXPECT_GE(bytes, least);
    EXPECT_LE(bytes, least + least / 1000);  // a whole group has some padding
    EXPECT_EQ(validate(plan_model(whole), whole), "");
  }
  const ModelSpec spec = layers_of_pieces(true, true);
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(plan.gather_pool.size_bytes, attention + feed_forward);
  EXPECT_EQ(plan.gather_pool.size_bytes, 404'750'336u);
  EXPECT_EQ(plan.padding_count, 0u);
  EXPECT_EQ(plan.groups[1].pieces[0].gathered_bytes, attention);
  EXPECT_EQ(plan.groups[1].pieces[1].gathered_bytes, feed_forward);
  EXPECT_EQ(validate(plan, spec), "");
}

// There is one buffer for all groups, as large as the largest needs, and no buffer if nothing is rounded or the
// transport rounds.
TEST(ModelPlan, GradientsAreRoundedInABufferOfTheLargestGroup) {
  ModelSpec spec = copied_model();
  spec.host_memory = false;
  spec.rounds_gradients_before_sending = true;
  const uint64_t without = role_bytes(plan_model(spec), 0, 3)[FSDP_ROLE_REDUCE];
  EXPECT_EQ(plan_model(spec).region(RegionId::rounded).bytes, 0u);
  for (GroupSpec &group : spec.groups) group.reduce_dtype = FSDP_BFLOAT16;
  const ModelPlan plan = plan_model(spec);
  uint64_t most = 0;
  for (const GroupPlan &group : plan.groups) {
    uint64_t bytes = 0;
    for (const uint32_t b : group.buckets)
      if (plan.buckets[b].grad_dtype == FSDP_FLOAT32) bytes += plan.buckets[b].layout.full_count * 2;
    most = std::max(most, bytes);
  }
  EXPECT_GE(plan.region(RegionId::rounded).bytes, most);
  EXPECT_LT(plan.region(RegionId::rounded).bytes, most + 2 * buffer_alignment);
  EXPECT_EQ(role_bytes(plan, 0, 3)[FSDP_ROLE_REDUCE], without + plan.region(RegionId::rounded).bytes);
  spec.rounds_gradients_before_sending = false;
  EXPECT_EQ(plan_model(spec).region(RegionId::rounded).bytes, 0u);
}

// One more buffer receives bytes from peers. Its size fits the largest group's gradients that are sent in 16 bits from
// where they lie. Rounded gradients leave room in the gradient, unless the sums are made there.
TEST(ModelPlan, SlicesOfPeersAreReceivedInABufferOfTheLargestGroup) {
  ModelSpec spec = copied_model();
  spec.host_memory = false;
  spec.rounds_gradients_before_sending = spec.receives_slices = true;
  for (GroupSpec &group : spec.groups) group.grad_dtype = FSDP_FLOAT32;
  const auto received = [&] { return plan_model(spec).region(RegionId::received).bytes; };
  EXPECT_EQ(received(), 0u);
  for (GroupSpec &group : spec.groups) group.reduce_dtype = FSDP_BFLOAT16;
  EXPECT_EQ(received(), 0u);
  for (GroupSpec &group : spec.groups) group.reduce_policy = FSDP_REDUCE_POLICY_LAST;
  const ModelPlan in_place = plan_model(spec);
  EXPECT_EQ(in_place.region(RegionId::received).bytes, in_place.region(RegionId::rounded).bytes);
  EXPECT_EQ(validate(in_place, spec), "");
  for (GroupSpec &group : spec.groups) group.reduce_policy = FSDP_REDUCE_POLICY_EACH, group.grad_dtype = FSDP_BFLOAT16;
  EXPECT_EQ(received(), in_place.region(RegionId::received).bytes);
  ModelPlan plan = plan_model(spec);
  EXPECT_EQ(plan.region(RegionId::rounded).bytes, 0u);
  const uint64_t with = role_bytes(plan, 0, 3)[FSDP_ROLE_REDUCE], bytes = received();
  drop_received(plan);
  EXPECT_EQ(role_bytes(plan, 0, 3)[FSDP_ROLE_REDUCE], with - bytes);
  EXPECT_EQ(plan.buckets[0].find(PlaneKind::received), nullptr);
  spec.mesh() = layout::one_axis(1);
  spec.force_communication = true;
  EXPECT_EQ(received(), 0u);
  spec.mesh() = layout::one_axis(3);
  spec.receives_slices = false;
  EXPECT_EQ(received(), 0u);
}

// Returns the error of planning, or an empty text if it succeeds.
std::string overflow_of(const ModelSpec &spec) {
  try {
    plan_model(spec);
    return {};
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT);
    return error.message;
  }
}

ModelSpec huge_model(std::vector<uint64_t> element_counts, fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS) {
  ModelSpec spec;
  spec.mesh() = layout::one_axis(1);
  spec.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_FLOAT32}};
  for (size_t g = 0; g < element_counts.size(); ++g) {
    GroupSpec group;
    group.name = "g" + std::to_string(g);
    group.strategy = strategy;
    group.params = {param(group.name + ".w", {element_counts[g]})};
    group.params[0].element_count = element_counts[g];
    spec.groups.push_back(group);
  }
  return spec;
}

TEST(ModelPlan, SizesThatOverflowNameWhatIsTooLarge) {
  const auto expect_named = [](const ModelSpec &spec, const std::vector<std::string> &words) {
    const std::string message = overflow_of(spec);
    for (const std::string &word : words) EXPECT_TRUE(contains(message, word)) << word << " is not in: " << message;
  };
  // The limits are for the bytes of one parameter, of one plane of all groups (at the group that exceeds it), and of
  // all planes of a rank.
  expect_named(huge_model({8, 1ull << 62}), {"'g1'", "'g1.w'", "64 bits"});
  expect_named(huge_model({1ull << 60, 1ull << 60, 1ull << 60, 1ull << 60}), {"'g3'", "64 bits"});
  expect_named(huge_model({1ull << 60, 1ull << 60}), {"optimizer state", "'g1'", "64 bits"});
  expect_named(huge_model({1ull << 60}), {"a rank's bytes in all roles", "64 bits"});
  EXPECT_EQ(overflow_of(huge_model({1ull << 59})), "");
}

// A plan has at least the weights and states, which no alignment makes smaller. A sum that wraps would have less.
TEST(ModelPlan, NoSumWraps) {
  std::mt19937_64 random(5);
  int planned = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<uint64_t> counts(1 + random() % 6);
    long double least = 0;
    for (uint64_t &count : counts) {
      count = 1 + (random() >> (random() % 24 + 1));
      least += static_cast<long double>(count) * 16;  // weight, gradient, two states
    }
    const ModelSpec spec = huge_model(counts, random() % 2 ? FSDP_STRATEGY_NO_SHARD : FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
    try {
      const ModelPlan plan = plan_model(spec);
      const auto bytes = role_bytes(plan, 0, 1);
      ++planned;
      ASSERT_GE(static_cast<long double>(bytes[0]), least);
      for (int role = 1; role < 8; ++role) ASSERT_LE(bytes[role], bytes[0]);
    } catch (const Error &error) {
      ++refused;
      ASSERT_TRUE(contains(error.message, "64 bits")) << error.message;
      ASSERT_GT(least, 0x1p58L) << error.message;
    }
  }
  EXPECT_GT(planned, 500);
  EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace fsdp::memory
