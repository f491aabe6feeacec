// SPDX-License-Identifier: Apache-2.0
// Helpers of the tests of misuse: a check of a failed call's status and message, and a world of one in a chosen state.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "harness.h"

namespace misuse {

// Errors of use leave the context as it was (docs/contracts/errors.md).
inline bool is_of_use(fsdp_status status) {
  return status == FSDP_INVALID_ARGUMENT || status == FSDP_INVALID_STATE || status == FSDP_UNSUPPORTED ||
         status == FSDP_BUSY;
}

// The call failed with this status, and this thread's message has all of the words.
inline testing::AssertionResult fails(fsdp_status status, fsdp_status expected,
                                      std::initializer_list<std::string> words) {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(nullptr, &error);
  const std::string found = std::string(fsdp_get_status_name(status)) + ": " + error.message;
  if (status != expected)
    return testing::AssertionFailure() << found << "; expected " << fsdp_get_status_name(expected);
  if (error.status != status) return testing::AssertionFailure() << "the last error is another one: " << found;
  for (const std::string &word : words)
    if (std::string(error.message).find(word) == std::string::npos)
      return testing::AssertionFailure() << "no '" << word << "' in: " << found;
  if (std::string(error.message) != fsdp_get_last_message())
    return testing::AssertionFailure() << "the last message is another one: " << fsdp_get_last_message();
  if (is_of_use(status) && (error.context_failed || (error.origin == FSDP_ORIGIN_FSDP) != (error.origin_code == 0)))
    return testing::AssertionFailure() << found << "; context_failed " << error.context_failed << ", origin "
                                       << error.origin << ", code " << error.origin_code;
  return testing::AssertionSuccess();
}

// One case of misuse: the status, the call, and what its message must name.
#define EXPECT_FAILS(expected, call, ...) EXPECT_TRUE(misuse::fails((call), (expected), {__VA_ARGS__})) << #call

// The rank that this thread's last error names.
inline int32_t blamed() {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(nullptr, &error);
  return error.rank;
}
#define EXPECT_BLAMES(expected) EXPECT_EQ(misuse::blamed(), (expected)) << harness::last_message()

inline testing::AssertionResult works(fsdp_status status) {
  if (status == FSDP_OK) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fsdp_get_status_name(status) << ": " << harness::last_message();
}
#define EXPECT_WORKS(call) EXPECT_TRUE(misuse::works((call))) << #call

// A struct of a newer client: one unknown byte behind the end is set. Its number is sizeof(T) + 3.
template <class T>
struct Newer {
  explicit Newer(T known) : options(known) {
    options.struct_size = sizeof *this;
    tail[3] = 1;
  }
  static std::string byte() { return "byte " + std::to_string(sizeof(T) + 3); }
  T options;
  unsigned char tail[8] = {};
};

inline harness::Scenario small_setup() {
  harness::Scenario setup;
  setup.ranks = 1;
  setup.groups = {
      {"alpha", {{"alpha.w", {8, 4}}, {"alpha.frozen", {4}, FSDP_FLOAT32, FSDP_PARAM_FROZEN}}},
      {"beta", {{"beta.w", {6, 4}}, {"beta.b", {6}}}},
      {"gamma", {{"gamma.w", {8, 4}}}},
  };
  return setup;
}

inline harness::Scenario small_setup_of(uint32_t ranks) {
  harness::Scenario setup = small_setup();
  setup.ranks = ranks;
  setup.context.timeout_ms = 60000;
  return setup;
}

inline fsdp_error last_error(const fsdp_context *context = nullptr) {
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_EQ(fsdp_get_last_error(context, &error), FSDP_OK);
  return error;
}

// Acquires a gradient and writes a value that no gradient of the harness has: if it is left anywhere, a step gives
// other weights.
inline fsdp_status acquire(fsdp_group *group, uint64_t param, fsdp_stream stream = nullptr) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 7;
  const fsdp_status status = fsdp_acquire_grad(group, param, 0, stream, &grad, &accumulate);
  EXPECT_EQ(accumulate == 7, status != FSDP_OK);
  if (status == FSDP_OK && !accumulate) std::fill_n(static_cast<float *>(grad.data), grad.element_count, 1000.0f);
  return status;
}

// Copied weights in a world of one: its pool holds what the schedule needs, which is two groups of three.
inline harness::Scenario copied_setup() {
  harness::Scenario setup;
  setup.ranks = 1;
  setup.groups = harness::equal_groups(4, 8, 4);
  setup.model.unshard_mode = FSDP_UNSHARD_COPIED;
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  return setup;
}

// Mapped weights that must be unsharded even in a world of one.
inline harness::Scenario gathering_setup() {
  harness::Scenario setup = small_setup();
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  return setup;
}

enum class State { declared, sealed, published };

// One step from the loaded weights, computed without the library: clean_step must give the same if the misuse has left
// nothing.
inline harness::Outcome one_step(harness::Scenario setup) {
  setup.steps = 1;
  setup.weight_decay = 0;
  return harness::reference(setup);
}

inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
inline constexpr double infinity = std::numeric_limits<double>::infinity();

// A world of one.
class Solo {
 public:
  explicit Solo(State state, harness::Scenario scenario = small_setup()) : setup(std::move(scenario)) {
    FSDP(fsdp_create_local_contexts(1, &setup.context, &context));
    rank = std::make_unique<harness::Rank>(context, setup, state != State::declared);
    model = rank->model;
    if (state == State::published) rank->load();
  }
  ~Solo() {
    rank.reset();
    fsdp_destroy_context(context);
  }
  Solo(const Solo &) = delete;
  Solo &operator=(const Solo &) = delete;
  fsdp_group *group(size_t index) const { return rank->groups[index]; }
  // A step up to its open update window.
  void finish_step() {
    harness::forward(*rank, nullptr);
    harness::backward(*rank, 0, 0, nullptr);
    FSDP(fsdp_finish_grads(model, 1, 0, nullptr));
  }
  // A whole step, which shows that the misuse before it did no harm: the first such step has the bits of the reference.
  void clean_step() {
    const bool first = rank->stats().step == 0;
    finish_step();
    FSDP(fsdp_step_adamw(model, 0.01, nullptr, nullptr));
    if (first) {
      EXPECT_TRUE(harness::same_bits(rank->read_all(), one_step(setup).weights)) << "something was left of the misuse";
    }
  }

  harness::Scenario setup;
  fsdp_context *context = nullptr;
  fsdp_model *model = nullptr;
  std::unique_ptr<harness::Rank> rank;
};

// A context with an empty model.
class Declared : public testing::Test {
 protected:
  Declared() {
    FSDP(fsdp_create_local_contexts(1, nullptr, &context));
    FSDP(fsdp_create_model(context, nullptr, &model));
  }
  ~Declared() override {
    fsdp_destroy_model(model);
    fsdp_destroy_context(context);
  }
  fsdp_status add_group(const char *name, std::vector<fsdp_param> params, const fsdp_group_options *options = nullptr) {
    fsdp_group *group = reinterpret_cast<fsdp_group *>(1);
    const fsdp_status status =
        fsdp_create_group(model, name, params.data(), params.size(), sizeof(fsdp_param), options, &group);
    EXPECT_EQ(group != nullptr, status == FSDP_OK);
    return status;
  }
  fsdp_param param(const char *name = "w") const {
    fsdp_param p = FSDP_PARAM_INIT;
    p.name = name;
    p.shape = shape;
    p.dimension_count = 2;
    return p;
  }
  static constexpr uint64_t shape[] = {4, 3};
  fsdp_context *context = nullptr;
  fsdp_model *model = nullptr;
};

// No stream of the host device.
inline fsdp_stream some_stream() { return reinterpret_cast<fsdp_stream>(uintptr_t{64}); }

}  // namespace misuse
