// SPDX-License-Identifier: Apache-2.0
// Scales in a GEMM's order, against the order as the header says it, tile by tile.
#include "device.h"
#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

// More than a tile down and across in either form, a tile that is not full, several matrices.
Scenario matrices(uint32_t ranks, fsdp_unshard_mode mode) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
  setup.groups = {{"g",
                   {quantized({"wide", {160, 288}}, FSDP_QUANTIZE_MXFP8),
                    quantized({"stack", {3, 32, 160}}, FSDP_QUANTIZE_MXFP8),
                    {"plain", {32, 32}},
                    quantized({"block", {64, 64}}, FSDP_QUANTIZE_FP8_BLOCK)}}};
  return setup;
}

uint64_t up(uint64_t count, uint64_t unit) { return (count + unit - 1) / unit * unit; }

// Row by row of the tiles, 16 bytes of which are four rows, 32 apart.
std::vector<uint8_t> in_gemm_order(const std::vector<uint8_t> &scales, uint64_t rows, uint64_t columns) {
  std::vector<uint8_t> found;
  for (uint64_t top = 0; top < up(rows, 128); top += 128)
    for (uint64_t left = 0; left < up(columns, 4); left += 4)
      for (uint64_t row = 0; row < 32; ++row)
        for (uint64_t quarter = 0; quarter < 4; ++quarter)
          for (uint64_t column = left; column < left + 4; ++column) {
            const uint64_t r = top + 32 * quarter + row;
            found.push_back(r < rows && column < columns ? scales[r * columns + column] : 0);
          }
  return found;
}

std::vector<uint8_t> transposed(const std::vector<uint8_t> &scales, uint64_t rows, uint64_t columns) {
  std::vector<uint8_t> found;
  for (uint64_t c = 0; c < columns; ++c)
    for (uint64_t r = 0; r < rows; ++r) found.push_back(scales[r * columns + c]);
  return found;
}

// The swizzled scales of all matrices of a view.
std::vector<uint8_t> expected(const fsdp_tensor &view, bool columns) {
  std::vector<uint8_t> all(view.element_count), found;
  copy_out(all.data(), view.data, all.size());
  const uint64_t r = view.shape[view.dimension_count - 2], c = view.shape[view.dimension_count - 1];
  for (uint64_t first = 0; first < all.size(); first += r * c) {
    const std::vector<uint8_t> one(all.begin() + static_cast<std::ptrdiff_t>(first),
                                   all.begin() + static_cast<std::ptrdiff_t>(first + r * c));
    const std::vector<uint8_t> next = columns ? in_gemm_order(transposed(one, r, c), c, r) : in_gemm_order(one, r, c);
    found.insert(found.end(), next.begin(), next.end());
  }
  return found;
}

// Where the library can write.
std::vector<uint8_t> swizzled(fsdp_group *group, uint64_t param, fsdp_phase phase, fsdp_plane plane, uint64_t bytes) {
  const std::vector<float> junk(bytes / 4, -1.0F);
  const Placed room(junk);
  uint64_t size = bytes;
  FSDP(fsdp_swizzle_scales(group, param, phase, plane, const_cast<void *>(room.data()), &size, stream()));
  std::vector<uint8_t> found(bytes);
  copy_out(found.data(), room.data(), bytes);
  return found;
}

void look(Rank &rank, fsdp_phase phase, fsdp_plane plane) {
  fsdp_group *const group = rank.groups[0];
  for (const uint64_t param : {0u, 1u}) {
    fsdp_tensor view = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_plane(group, param, phase, plane, &view));
    const std::vector<uint8_t> wanted = expected(view, plane == FSDP_PLANE_COLUMN_SCALE);
    uint64_t size = 0;
    FSDP(fsdp_swizzle_scales(group, param, phase, plane, nullptr, &size, stream()));
    REQUIRE(size == wanted.size());
    REQUIRE(swizzled(group, param, phase, plane, size) == wanted);
  }
}

TEST(Swizzle, IsTheOrderOfTheHeader) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const uint32_t ranks : {1u, 3u}) {
      const Scenario setup = matrices(ranks, mode);
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
        look(rank, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE);
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
        FSDP(fsdp_unshard(rank.groups[0], FSDP_BACKWARD, 0, stream()));
        look(rank, FSDP_BACKWARD, FSDP_PLANE_COLUMN_SCALE);
        FSDP(fsdp_reshard(rank.groups[0], FSDP_BACKWARD, 0, stream()));
      });
    }
}

TEST(Swizzle, SizesOfSwizzledScalesAreRight) {
  Solo solo(State::published, matrices(1, FSDP_UNSHARD_COPIED));
  const auto size_of = [&](uint64_t param, fsdp_plane plane) {
    uint64_t size = 0;
    FSDP(fsdp_swizzle_scales(solo.group(0), param, FSDP_FORWARD, plane, nullptr, &size, stream()));
    return size;
  };
  EXPECT_EQ(size_of(0, FSDP_PLANE_ROW_SCALE), 256u * 12);     // 160 x 9
  EXPECT_EQ(size_of(0, FSDP_PLANE_COLUMN_SCALE), 384u * 8);   // 288 x 5
  EXPECT_EQ(size_of(1, FSDP_PLANE_ROW_SCALE), 3 * 128u * 8);  // 3 of 32 x 5
  EXPECT_EQ(size_of(1, FSDP_PLANE_COLUMN_SCALE), 3 * 256u * 4);
}

TEST(Swizzle, InvalidCallsAreRefused) {
  Scenario setup = matrices(1, FSDP_UNSHARD_COPIED);
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;  // else one rank has all, unsharded or not
  Solo solo(State::published, setup);
  fsdp_group *const group = solo.group(0);
  std::vector<uint8_t> room(256 * 12, 7);
  uint64_t size = room.size() + 9;
  const auto call = [&](uint64_t param, fsdp_phase phase, int plane) {
    return fsdp_swizzle_scales(group, param, phase, plane, room.data(), &size, nullptr);
  };
  EXPECT_FAILS(FSDP_INVALID_STATE, call(0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE), "fsdp_swizzle_scales: group 'g'",
               "call fsdp_unshard first");
  FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, call(1, FSDP_BACKWARD, FSDP_PLANE_ROW_SCALE), "gathers COLUMN planes", "'stack'");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, call(0, FSDP_FORWARD, FSDP_PLANE_ROW), "codes", "'wide'");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, call(3, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE), "'block'", "FSDP_QUANTIZE_MXFP8");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, call(2, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE), "'plain'", "is not quantized");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, call(9, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE), "param_index 9");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, call(0, FSDP_FORWARD, 5), "5 is not a plane");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
               fsdp_swizzle_scales(group, 0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE, room.data(), nullptr, nullptr),
               "size_bytes is NULL");
  EXPECT_EQ(size, room.size() + 9) << "a refused call writes nothing";
  size = room.size() - 1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, call(0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE), "*size_bytes is 3071", "'wide'",
               "3072");
  EXPECT_EQ(size, room.size());
  EXPECT_EQ(room, std::vector<uint8_t>(room.size(), 7));
  EXPECT_WORKS(call(0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE));
  FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
}

}  // namespace
