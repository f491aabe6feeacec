// SPDX-License-Identifier: Apache-2.0
// Misuse of fsdp_create_group: names, shapes, and every field of a parameter.
#include <limits>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

class MisusedGroup : public Declared {
 protected:
  template <class Value>
  fsdp_status add_param_with(Value fsdp_param::*field, Value value) {
    fsdp_param p = param();
    p.*field = value;
    return add_group("g", {param("before"), p});
  }
};

TEST_F(MisusedGroup, InvalidNamesAreRefused) {
  const std::string longest(255, 'x'), longer(256, 'x');
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group(nullptr, {}), "fsdp_create_group", "name is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("", {}), "name is empty");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group(longer.c_str(), {}), "name is longer than 255 bytes", "xxx");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("a\xFF", {}), "name is not UTF-8");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("a\xC0\x80", {}), "not UTF-8");      // overlong
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("a\xED\xA0\x80", {}), "not UTF-8");  // a surrogate
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("a\xE2\x82", {}), "not UTF-8");      // cut
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {param(nullptr)}), "params[0].name is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {param("a"), param("")}), "params[1].name is empty");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {param(longer.c_str())}), "params[0].name is longer than 255");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {param("\x80")}), "params[0].name is not UTF-8");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {param("twin"), param("twin")}), "'twin'", "'g'", "twice");
  EXPECT_WORKS(add_group("g", {param("w")}));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("h", {param("w")}), "'w'", "'h'", "declared twice");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {}), "a group named 'g' already");
  EXPECT_WORKS(add_group(longest.c_str(), {param("\xE2\x82\xAC")}));
}

TEST_F(MisusedGroup, InvalidParametersAreRefused) {
  using Param = fsdp_param;
  const auto field = [](const char *name) { return std::string("params[1] ('w').") + name; };
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::dtype, 4), field("dtype is 4"));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::flags, 4u), field("flags"), "0x4");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::granule, 4), field("granule is 4"));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::granule, FSDP_GRANULE_BLOCK + 0), field("granule_rows"),
               "FSDP_GRANULE_BLOCK");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::row_dimensions, 3u),
               field("row_dimensions is 3, but must be at most 2, the parameter's number of dimensions"));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::piece, 2u), field("piece is 2"), "it must be 0 or 1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::optimizer, FSDP_OPTIMIZER_ADAMW_8BIT + 0),
               field("optimizer is 3"), "[1, 2]");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::matrix, 2), field("matrix is 2"), "FSDP_MATRIX_LAST_TWO");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::matrix_split_count, uint64_t{1}),
               field("matrix_split_count is 1"), "no matrices");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::lr_scale, not_a_number), field("lr_scale is nan"));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::lr_scale, -0.5), field("lr_scale is -0.5"));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::lr_scale, infinity), field("lr_scale is inf"));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::lr_scale, 1e39), field("lr_scale is 1e+39"));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::dimension_count, 17u), field("dimension_count is 17"),
               "16");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with<const uint64_t *>(&Param::shape, nullptr), field("shape is NULL"));
  const uint64_t zero[] = {4, 0};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with<const uint64_t *>(&Param::shape, zero), field("shape[1] is 0"));
  const uint64_t huge[] = {uint64_t{1} << 63, 4};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with<const uint64_t *>(&Param::shape, huge), field("shape"), "64 bits");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_param_with(&Param::struct_size, uint64_t{16}), "params[1].struct_size is 16");
}

TEST_F(MisusedGroup, InvalidMatricesAreRefused) {
  const auto add_matrix = [&](std::vector<uint64_t> splits, uint32_t flags = 0, uint32_t dimensions = 2) {
    fsdp_param p = param();
    p.matrix = FSDP_MATRIX_LAST_TWO;
    p.matrix_splits = splits.empty() ? nullptr : splits.data();
    p.matrix_split_count = splits.size();
    p.flags = flags;
    p.dimension_count = dimensions;
    return add_group("g", {p});
  };
  const std::string field = "params[0] ('w').matrix";
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_matrix({}, 0, 1), field + " is", "has 1 dimensions");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_matrix({}, FSDP_PARAM_FROZEN), field + " is", "FROZEN");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_matrix({0, 4}), field + "_splits[0] is 0");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_matrix({1, 1}), field + "_splits add up to 2 rows");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_matrix({UINT64_MAX, UINT64_MAX}), field + "_splits", "64 bits");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_matrix({1, 1, 1, 1, 1}), field + "_split_count is 5", "has 4 rows");
  fsdp_param p = param();
  p.matrix = FSDP_MATRIX_LAST_TWO;
  p.matrix_split_count = 2;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {p}), field + "_split_count is 2", "matrix_splits is NULL");
  const uint64_t one_row = 1;
  p.matrix_splits = &one_row, p.matrix_split_count = UINT64_MAX / 8;  // cannot be copied
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {p}), field + "_split_count is", "has 4 rows");
  EXPECT_WORKS(add_matrix({1, 3}));
}

// A box needs its tensor's shape and a place inside it, in numbers that 64 bits can count.
TEST_F(MisusedGroup, BoxesOutsideOfTheirTensorAreRefused) {
  const auto add_box = [&](const std::vector<uint64_t> &global, const std::vector<uint64_t> &offset) {
    fsdp_param p = param();
    p.global_shape = global.empty() ? nullptr : global.data();
    p.global_offset = offset.empty() ? nullptr : offset.data();
    return add_group("g", {param("before"), p});
  };
  constexpr uint64_t most = UINT64_MAX;
  const std::string shape = "params[1] ('w').global_shape", offset = "params[1] ('w').global_offset";
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_box({8, 3}, {}), offset + " is NULL, but global_shape is given");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_box({}, {0, 0}), shape + " is NULL, but global_offset is given");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_box({8, 3}, {5, 0}),
               shape + "[0] is 8, which the box exceeds: its shape[0] is 4 and its global_offset[0] 5");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_box({8, 5}, {4, 3}), shape + "[1] is 5", "shape[1] is 3", "[1] 3");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_box({3, 3}, {0, 0}), shape + "[0] is 3");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_box({8, 3}, {most - 1, 0}), shape + "[0] is 8", "18446744073709551614");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_box({uint64_t{1} << 62, 8}, {0, 0}), shape, "64 bits");
  EXPECT_WORKS(add_box({8, 5}, {4, 2}));
  fsdp_group *group = nullptr;
  FSDP(fsdp_get_group(model, 0, &group));
  fsdp_param info = FSDP_PARAM_INIT;
  FSDP(fsdp_get_param_info(group, 0, &info));
  EXPECT_TRUE(!info.global_shape && !info.global_offset);
  FSDP(fsdp_get_param_info(group, 1, &info));
  EXPECT_TRUE(info.global_shape[0] == 8 && info.global_shape[1] == 5);
  EXPECT_TRUE(info.global_offset[0] == 4 && info.global_offset[1] == 2);
}

TEST_F(MisusedGroup, SizesThatOverflowLater) {
  const uint64_t huge[] = {uint64_t{1} << 62, 1};  // counts in 64 bits, its bytes do not
  fsdp_param p = param();
  p.shape = huge;
  EXPECT_WORKS(add_group("g", {p}));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "64 bits", "'g'", "'w'");
}

// The size of each plane fits into 64 bits, but their sum does not: no wrapped size may be reported.
TEST(MisusedPlan, OverflowingBytesOfARankAreRefused) {
  fsdp_context *context = nullptr;
  fsdp_model *model = nullptr;
  fsdp_group *group = nullptr;
  FSDP(fsdp_create_plan_context(1, 0, nullptr, &context));
  FSDP(fsdp_create_model(context, nullptr, &model));
  const uint64_t huge[] = {uint64_t{1} << 60};
  fsdp_param p = FSDP_PARAM_INIT;
  p.name = "w";
  p.shape = huge;
  p.dimension_count = 1;
  FSDP(fsdp_create_group(model, "g", &p, 1, sizeof p, nullptr, &group));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "a rank's bytes in all roles", "64 bits");
  uint64_t bytes = 7;
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_role_bytes(model, FSDP_ROLE_MAIN, 0, &bytes), "not sealed");
  EXPECT_EQ(bytes, 7u);
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
}

TEST_F(MisusedGroup, InvalidArraysAndOptionsAreRefused) {
  fsdp_group *group = nullptr;
  const fsdp_param params[2] = {param("a"), param("b")};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_group(model, "g", nullptr, 2, sizeof(fsdp_param), nullptr, &group),
               "params is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_group(model, "g", params, 2, 0, nullptr, &group), "param_stride is 0",
               "sizeof(fsdp_param)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_group(model, "g", params, 2, 16, nullptr, &group),
               "param_stride is 16");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_group(model, "g", params, 2, 2, nullptr, &group),
               "param_stride is 2");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_group(model, "g", params, 2, sizeof(fsdp_param), nullptr, nullptr),
               "group is NULL");
  fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
  options.flags = 2;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {}, &options), "fsdp_group_options.flags", "0x2");
  options = FSDP_GROUP_OPTIONS_INIT;
  options.strategy = 5;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {}, &options), "fsdp_group_options.strategy is 5");
  options = FSDP_GROUP_OPTIONS_INIT;
  options.grad_dtype = 4;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {}, &options), "fsdp_group_options.grad_dtype is 4");
  options = FSDP_GROUP_OPTIONS_INIT;
  options.reduce_dtype = -2;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {}, &options), "fsdp_group_options.reduce_dtype is -2");
  options = FSDP_GROUP_OPTIONS_INIT;
  options.struct_size = 0;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {}, &options), "fsdp_group_options.struct_size is 0");
  Newer<fsdp_group_options> newer(FSDP_GROUP_OPTIONS_INIT);
  EXPECT_FAILS(FSDP_UNSUPPORTED, add_group("g", {}, &newer.options), Newer<fsdp_group_options>::byte());
  Newer<fsdp_param> newer_param(param());
  EXPECT_FAILS(FSDP_UNSUPPORTED,
               fsdp_create_group(model, "g", &newer_param.options, 1, sizeof newer_param, nullptr, &group),
               Newer<fsdp_param>::byte(), "params[0]");
  // Nothing of all that is left: the model has no group yet.
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_seal_model(model), "no group", "fsdp_create_group");
}

}  // namespace
