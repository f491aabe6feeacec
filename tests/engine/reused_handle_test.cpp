// SPDX-License-Identifier: Apache-2.0
// A destroyed handle is refused for ever, however many handles were made after it. Values that never were handles are
// refused without being read. Every create call that fails leaves NULL.
#include <malloc.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>
#include <unordered_set>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

// Under sanitizers an error takes a hundred times as long, so only the plain build tries all of them.
const size_t most = is_sanitized() ? 5'000 : 100'000;

fsdp_context *make_plan_context() {
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(2, 0, nullptr, &context));
  return context;
}

fsdp_group *make_group(fsdp_model *model) {
  fsdp_group *group = nullptr;
  FSDP(fsdp_create_group(model, "g", nullptr, 0, sizeof(fsdp_param), nullptr, &group));
  return group;
}

bool refused(fsdp_status status) { return status == FSDP_INVALID_HANDLE; }

template <class Handle>
struct Kind {
  std::function<Handle *()> make;
  std::function<void(Handle *)> destroy;
  std::function<fsdp_status(Handle *)> use;
};

// All handles differ, all are refused once they are destroyed, and their memory is given back.
template <class Handle>
void expect_dead_for_ever(const Kind<Handle> &kind) {
  std::vector<Handle *> old;
  std::unordered_set<Handle *> seen;
  old.reserve(most);
  seen.reserve(most);
  size_t used = 0;
  for (size_t i = 0; i < most; ++i) {
    Handle *const handle = kind.make();
    ASSERT_TRUE(seen.insert(handle).second) << "handle " << i << " has the value of an earlier one";
    ASSERT_FALSE(refused(kind.use(handle)));
    kind.destroy(handle);
    old.push_back(handle);
    if (i == most / 2) used = ::mallinfo2().uordblks;
  }
  // Nodes of `seen` count too: 16 bytes each, and malloc's.
  EXPECT_LT(::mallinfo2().uordblks, used + most / 2 * 40 + (1 << 20));
  Handle *const alive = kind.make();
  for (Handle *handle : old) ASSERT_TRUE(refused(kind.use(handle)));
  for (Handle *handle : old) kind.destroy(handle);  // which does nothing
  EXPECT_FALSE(refused(kind.use(alive)));
  kind.destroy(alive);
}

TEST(ReusedHandle, AContextsHandleIsNeverUsedAgain) {
  uint32_t rank = 0;
  expect_dead_for_ever<fsdp_context>(
      {make_plan_context, fsdp_destroy_context, [&](fsdp_context *context) { return fsdp_get_rank(context, &rank); }});
}

TEST(ReusedHandle, AMeshsHandleIsNeverUsedAgain) {
  fsdp_context *context = make_plan_context();
  const auto make = [&] {
    fsdp_mesh *mesh = nullptr;
    FSDP(fsdp_create_mesh(context, nullptr, &mesh));
    return mesh;
  };
  const auto use = [&](fsdp_mesh *mesh) {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.mesh = mesh;
    fsdp_model *model = nullptr;
    const fsdp_status status = fsdp_create_model(context, &options, &model);
    fsdp_destroy_model(model);
    return status;
  };
  expect_dead_for_ever<fsdp_mesh>({make, fsdp_destroy_mesh, use});
  fsdp_destroy_context(context);
}

TEST(ReusedHandle, AModelsHandleIsNeverUsedAgain) {
  fsdp_context *context = make_plan_context();
  const auto make = [&] {
    fsdp_model *model = nullptr;
    FSDP(fsdp_create_model(context, nullptr, &model));
    return model;
  };
  const auto use = [](fsdp_model *model) { return fsdp_set_schedule(model, FSDP_SCHEDULE_SEQUENTIAL, nullptr); };
  expect_dead_for_ever<fsdp_model>({make, fsdp_destroy_model, use});
  fsdp_destroy_context(context);
}

// Groups end with their model. The getters that look at no context too.
TEST(ReusedHandle, AGroupsHandleIsNeverUsedAgain) {
  fsdp_context *context = make_plan_context();
  fsdp_model *model = nullptr;
  fsdp_group *last = nullptr;
  const auto make = [&] {
    FSDP(fsdp_create_model(context, nullptr, &model));
    return last = make_group(model);
  };
  const auto destroy = [&](fsdp_group *group) {
    if (group == last) fsdp_destroy_model(model);
  };
  const auto use = [](fsdp_group *group) {
    fsdp_param param = FSDP_PARAM_INIT;
    fsdp_chunk chunk = FSDP_CHUNK_INIT;
    const fsdp_status status = fsdp_get_param_info(group, 0, &param);
    EXPECT_EQ(refused(fsdp_get_chunk(group, 0, 0, &chunk)), refused(status));
    return status;
  };
  expect_dead_for_ever<fsdp_group>({make, destroy, use});
  fsdp_destroy_context(context);
}

// Any value at all: NULL's neighbours, addresses that are not mapped, neighbours of handles, memory of the program.
TEST(ReusedHandle, ValuesThatNeverWereHandlesAreRefused) {
  Solo solo(State::published);
  static uint64_t zeros[64] = {};
  std::vector<uintptr_t> values = {1, 2, 3, 16, 17, 4096, ~uintptr_t{0}, ~uintptr_t{0} - 15, uintptr_t{1} << 63};
  for (const void *near : {static_cast<const void *>(solo.context), static_cast<const void *>(solo.model),
                           static_cast<const void *>(solo.group(0)), static_cast<const void *>(zeros)})
    for (int step : {-16, -8, -4, -1, 1, 2, 3, 4, 8, 15}) values.push_back(reinterpret_cast<uintptr_t>(near) + step);
  std::mt19937_64 random(7);
  for (size_t i = 0; i < most; ++i) values.push_back(random());
  for (size_t i = 0; i < most; ++i) values.push_back(random() >> (random() % 64));
  std::unordered_set<const void *> own = {solo.context, solo.model};
  for (size_t g = 0; g < 3; ++g) own.insert(solo.group(g));
  uint32_t rank = 0;
  fsdp_chunk chunk = FSDP_CHUNK_INIT;
  for (const uintptr_t value : values) {
    if (own.contains(reinterpret_cast<void *>(value))) continue;
    ASSERT_TRUE(refused(fsdp_get_rank(reinterpret_cast<fsdp_context *>(value), &rank))) << value;
    ASSERT_TRUE(refused(fsdp_seal_model(reinterpret_cast<fsdp_model *>(value)))) << value;
    ASSERT_TRUE(refused(fsdp_get_chunk(reinterpret_cast<fsdp_group *>(value), 0, 0, &chunk))) << value;
    ASSERT_TRUE(refused(fsdp_prepare_replay(reinterpret_cast<fsdp_capture *>(value), 0, nullptr))) << value;
    fsdp_destroy_context(reinterpret_cast<fsdp_context *>(value));
    fsdp_destroy_model(reinterpret_cast<fsdp_model *>(value));
    fsdp_destroy_mesh(reinterpret_cast<fsdp_mesh *>(value));
    fsdp_destroy_capture(reinterpret_cast<fsdp_capture *>(value));
  }
  solo.clean_step();
}

// Handles come and go on many threads at once, and each is used by others while it goes.
TEST(ReusedHandle, IsRefusedOnManyThreads) {
  std::atomic<fsdp_context *> shown[4] = {};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::unordered_set<fsdp_context *> old;
      for (int i = 0; i < 3000; ++i) {
        fsdp_context *context = nullptr;
        if (fsdp_create_plan_context(t + 1, t, nullptr, &context) != FSDP_OK || !old.insert(context).second) ++wrong;
        shown[t] = context;
        uint32_t rank = 99;
        if (fsdp_get_rank(context, &rank) != FSDP_OK || rank != t) ++wrong;
        if (fsdp_context *other = shown[(t + 1) % 4]) {
          const fsdp_status status = fsdp_get_rank(other, &rank);
          if (status == FSDP_OK ? rank != (t + 1) % 4 : !refused(status)) ++wrong;
        }
        fsdp_destroy_context(context);
        if (!refused(fsdp_get_rank(context, &rank))) ++wrong;
      }
    });
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// ---- what a failed create call leaves ----

template <class Handle>
Handle *garbage() {
  return reinterpret_cast<Handle *>(uintptr_t{0x5151});
}

struct Creation {
  std::string name;
  fsdp_status expected;
  std::function<std::pair<fsdp_status, const void *>(Solo &)> run;
};

template <class Handle, class Call>
std::function<std::pair<fsdp_status, const void *>(Solo &)> creating(Call call) {
  return [call](Solo &solo) {
    Handle *handle = garbage<Handle>();
    const fsdp_status status = call(solo, &handle);
    return std::pair<fsdp_status, const void *>(status, handle);
  };
}

fsdp_context_options bad_context() {
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.log_level = 99;
  return options;
}

template <class Options>
Options short_options() {
  Options options{};
  options.struct_size = 1;
  return options;
}

std::vector<Creation> creations() {
  static const auto bad = bad_context();
  static const auto no_mesh = short_options<fsdp_mesh_options>();
  static const auto no_model = short_options<fsdp_model_options>();
  static const auto no_group = short_options<fsdp_group_options>();
  const auto group = [](fsdp_model *model, const char *name, const fsdp_group_options *options, fsdp_group **out) {
    return fsdp_create_group(model, name, nullptr, 0, sizeof(fsdp_param), options, out);
  };
  const auto model = garbage<fsdp_model>();
  const auto context = garbage<fsdp_context>();
  return {
      {"context, options", FSDP_INVALID_ARGUMENT,
       creating<fsdp_context>([](Solo &, fsdp_context **out) { return fsdp_create_context(&bad, out); })},
      {"plan context, options", FSDP_INVALID_ARGUMENT,
       creating<fsdp_context>([](Solo &, auto **out) { return fsdp_create_plan_context(1, 0, &bad, out); })},
      {"plan context, rank", FSDP_INVALID_ARGUMENT,
       creating<fsdp_context>([](Solo &, auto **out) { return fsdp_create_plan_context(1, 1, nullptr, out); })},
      {"plan context, world size", FSDP_INVALID_ARGUMENT,
       creating<fsdp_context>([](Solo &, auto **out) { return fsdp_create_plan_context(0, 0, nullptr, out); })},
      {"mesh, NULL", FSDP_INVALID_HANDLE,
       creating<fsdp_mesh>([](Solo &, auto **out) { return fsdp_create_mesh(nullptr, nullptr, out); })},
      {"mesh, no handle", FSDP_INVALID_HANDLE,
       creating<fsdp_mesh>([=](Solo &, auto **out) { return fsdp_create_mesh(context, nullptr, out); })},
      {"mesh, options", FSDP_INVALID_ARGUMENT,
       creating<fsdp_mesh>([](Solo &solo, auto **out) { return fsdp_create_mesh(solo.context, &no_mesh, out); })},
      {"model, NULL", FSDP_INVALID_HANDLE,
       creating<fsdp_model>([](Solo &, auto **out) { return fsdp_create_model(nullptr, nullptr, out); })},
      {"model, options", FSDP_INVALID_ARGUMENT,
       creating<fsdp_model>([](Solo &solo, auto **out) { return fsdp_create_model(solo.context, &no_model, out); })},
      {"group, NULL", FSDP_INVALID_HANDLE,
       creating<fsdp_group>([=](Solo &, auto **out) { return group(nullptr, "g", nullptr, out); })},
      {"group, no handle", FSDP_INVALID_HANDLE,
       creating<fsdp_group>([=](Solo &, auto **out) { return group(model, "g", nullptr, out); })},
      {"group, options", FSDP_INVALID_ARGUMENT,
       creating<fsdp_group>([=](Solo &solo, auto **out) { return group(solo.model, "g", &no_group, out); })},
      {"group, name", FSDP_INVALID_ARGUMENT,
       creating<fsdp_group>([=](Solo &solo, auto **out) { return group(solo.model, nullptr, nullptr, out); })},
      {"capture, NULL", FSDP_INVALID_HANDLE,
       creating<fsdp_capture>([](Solo &, auto **out) { return fsdp_end_capture(nullptr, nullptr, out); })},
      {"capture, none begun", FSDP_INVALID_STATE,
       creating<fsdp_capture>([](Solo &solo, auto **out) { return fsdp_end_capture(solo.model, nullptr, out); })},
  };
}

TEST(FailedCreate, ACreationThatFailsLeavesNull) {
  for (const Creation &creation : creations()) {
    Solo solo(State::declared);
    const auto [status, handle] = creation.run(solo);
    EXPECT_EQ(status, creation.expected) << creation.name << ": " << last_message();
    EXPECT_EQ(handle, nullptr) << creation.name;
  }
}

TEST(FailedCreate, OfLocalContextsLeavesNullInAll) {
  const auto bad = bad_context();
  const auto cut = short_options<fsdp_context_options>();
  for (const fsdp_context_options *options : {static_cast<const fsdp_context_options *>(nullptr), &bad, &cut})
    for (const uint32_t size : {1U, 2U, 1025U, 5000U}) {
      if (!options && size <= 1024) continue;  // which works
      std::vector<fsdp_context *> contexts(size, garbage<fsdp_context>());
      EXPECT_EQ(fsdp_create_local_contexts(size, options, contexts.data()), FSDP_INVALID_ARGUMENT);
      for (fsdp_context *context : contexts) ASSERT_EQ(context, nullptr) << size;
    }
}

// A second thread comes while the first one waits inside.
TEST(FailedCreate, OfABusyContextLeavesNull) {
  static std::atomic<bool> inside, leave;
  inside = leave = false;
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.interrupted = [](void *) -> int32_t {
    inside = true;
    return leave;
  };
  fsdp_context *contexts[2] = {};
  FSDP(fsdp_create_local_contexts(2, &options, contexts));
  fsdp_model *model = nullptr;
  FSDP(fsdp_create_model(contexts[0], nullptr, &model));
  std::thread waiter([&] {
    double value = 1;
    EXPECT_EQ(fsdp_all_reduce_values(contexts[0], nullptr, &value, 1, FSDP_VALUE_SUM), FSDP_INTERRUPTED);
  });
  while (!inside) std::this_thread::yield();
  auto *mesh = garbage<fsdp_mesh>();
  auto *other = garbage<fsdp_model>();
  auto *group = garbage<fsdp_group>();
  auto *capture = garbage<fsdp_capture>();
  EXPECT_FAILS(FSDP_BUSY, fsdp_create_mesh(contexts[0], nullptr, &mesh), "another thread is inside");
  EXPECT_FAILS(FSDP_BUSY, fsdp_create_model(contexts[0], nullptr, &other), "another thread is inside");
  EXPECT_FAILS(FSDP_BUSY, fsdp_create_group(model, "g", nullptr, 0, sizeof(fsdp_param), nullptr, &group),
               "another thread is inside");
  EXPECT_FAILS(FSDP_BUSY, fsdp_end_capture(model, nullptr, &capture), "another thread is inside");
  leave = true;
  waiter.join();
  EXPECT_TRUE(!mesh && !other && !group && !capture);
  fsdp_destroy_model(model);
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
}

}  // namespace
