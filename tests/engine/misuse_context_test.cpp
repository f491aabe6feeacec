// SPDX-License-Identifier: Apache-2.0
// Misuse of the calls that make contexts and meshes, and of fsdp_all_reduce_values.
#include <cstdlib>
#include <limits>
#include <optional>
#include <thread>

#include "../own_folder.h"
#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

// Sets the launcher's variables for one scope, those not given are unset.
class Launcher {
 public:
  explicit Launcher(std::initializer_list<std::pair<const char *, const char *>> values) {
    for (const char *name : names) {
      const char *old = std::getenv(name);
      saved_.push_back(old ? std::optional<std::string>(old) : std::nullopt);
      ::unsetenv(name);
    }
    for (const auto &[name, value] : values) ::setenv(name, value, 1);
  }
  ~Launcher() {
    for (size_t i = 0; i < saved_.size(); ++i)
      if (saved_[i])
        ::setenv(names[i], saved_[i]->c_str(), 1);
      else
        ::unsetenv(names[i]);
  }

 private:
  static constexpr const char *names[] = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",      "LOCAL_WORLD_SIZE",
                                          "MASTER_ADDR", "MASTER_PORT", "FSDP_JOB_SECRET", "FSDP_JOB_SECRET_FILE"};
  std::vector<std::optional<std::string>> saved_;
};

fsdp_status create(const fsdp_context_options *options = nullptr) {
  fsdp_context *context = reinterpret_cast<fsdp_context *>(1);
  const fsdp_status status = fsdp_create_context(options, &context);
  if (status != FSDP_OK)
    EXPECT_EQ(context, nullptr);
  else
    fsdp_destroy_context(context);
  return status;
}

TEST(MisusedContext, LauncherVariables) {
  const fsdp::test::OwnFolder folder;
  const std::string missing = folder / "none";
  {
    Launcher none({});
    EXPECT_WORKS(create());
  }
  {
    Launcher one({{"RANK", "0"}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), "RANK is set", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not");
  }
  {
    Launcher most({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), "MASTER_PORT is not");
  }
  {
    Launcher outside({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), "RANK=2", "WORLD_SIZE=2");
  }
  {
    Launcher text({{"RANK", "0"}, {"WORLD_SIZE", "two"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), "WORLD_SIZE='two'");
  }
  {
    Launcher port({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "70000"}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), "MASTER_PORT='70000'");
  }
  {
    Launcher hosts({{"RANK", "0"},
                    {"WORLD_SIZE", "4"},
                    {"LOCAL_WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "192.0.2.1"},
                    {"MASTER_PORT", "1"}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), "192.0.2.1", "FSDP_JOB_SECRET_FILE");
  }
  {
    Launcher secrets({{"RANK", "0"},
                      {"WORLD_SIZE", "1"},
                      {"MASTER_ADDR", "localhost"},
                      {"MASTER_PORT", "1"},
                      {"FSDP_JOB_SECRET", "a"},
                      {"FSDP_JOB_SECRET_FILE", missing.c_str()}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), "FSDP_JOB_SECRET", "FSDP_JOB_SECRET_FILE", "both");
  }
  {
    Launcher file({{"RANK", "0"},
                   {"WORLD_SIZE", "1"},
                   {"MASTER_ADDR", "localhost"},
                   {"MASTER_PORT", "1"},
                   {"FSDP_JOB_SECRET_FILE", missing.c_str()}});
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(), missing);
  }
}

TEST(MisusedContext, InvalidOptionsAreRefused) {
  Launcher none({});
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.flags = 0x10;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "fsdp_context_options.flags", "0x10");
  options = FSDP_CONTEXT_OPTIONS_INIT;
  options.log_level = 5;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "fsdp_context_options.log_level is 5", "[1, 4]");
  options.log_level = -1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "log_level is -1");
  options = FSDP_CONTEXT_OPTIONS_INIT;
  options.world_size = 2;
  options.rank = 2;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "rank 2 is outside [0, 2)");
  options.rank = 0;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "rendezvous", "FSDP_RENDEZVOUS");
  options.world_size = 1;
  EXPECT_WORKS(create(&options));
}

TEST(MisusedContext, InvalidStructSizesAreRefused) {
  Launcher none({});
  fsdp_context_options options = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "fsdp_context_options.struct_size is 0",
               "sizeof(fsdp_context_options)");
  options.struct_size = sizeof options - 1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "struct_size");
  options.struct_size = uint64_t{1} << 40;  // not initialized, say: must not be read
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(&options), "struct_size");
  options = FSDP_CONTEXT_OPTIONS_INIT;
  fsdp_context *context = nullptr;
  EXPECT_WORKS(fsdp_create_local_contexts(1, &options, &context));
  Scenario setup = small_setup();
  EXPECT_NO_THROW(Rank(context, setup));
  fsdp_destroy_context(context);
  Newer<fsdp_context_options> newer(FSDP_CONTEXT_OPTIONS_INIT);
  EXPECT_FAILS(FSDP_UNSUPPORTED, create(&newer.options), Newer<fsdp_context_options>::byte(), "fsdp_context_options");
  newer.tail[3] = 0;
  EXPECT_WORKS(create(&newer.options));
}

TEST(MisusedContext, InvalidLocalAndPlanningContextsAreRefused) {
  fsdp_context *context = nullptr;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_local_contexts(0, nullptr, &context), "world_size is 0");
  std::vector<fsdp_context *> many(5000, nullptr);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_local_contexts(5000, nullptr, many.data()), "world_size is 5000");
  // No caller has an array with more entries than a job may have ranks, so no entry is touched.
  const auto untouched = reinterpret_cast<fsdp_context *>(uintptr_t{1});
  for (const uint32_t ranks : {16385U, UINT32_MAX}) {
    fsdp_context *one[2] = {untouched, untouched};
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_local_contexts(ranks, nullptr, one),
                 "world_size is " + std::to_string(ranks));
    EXPECT_TRUE(one[0] == untouched && one[1] == untouched) << ranks;
  }
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_plan_context(0, 0, nullptr, &context), "world_size is 0");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_plan_context(4, 4, nullptr, &context), "rank 4 is outside [0, 4)");
  EXPECT_EQ(context, nullptr);
}

// Bindings decode messages, so bytes that are not UTF-8 are shown as escapes on every rank, and a long text ends with a
// whole character.
TEST(MisusedContext, ReasonsThatAreNotTextAreRefused) {
  harness::Scenario setup;
  setup.ranks = 2;
  std::string pattern;
  for (int i = 0; i < 700; ++i) pattern += "\xC3\xA9";
  for (const std::string &reason : {std::string("a\xFF\xFE\xC3 b"), pattern, "x" + pattern}) {
    harness::run_threads(setup, [&](uint32_t rank, fsdp_context *context) {
      if (rank == 0) FSDP(fsdp_abort_context(context, reason.c_str()));
      double one = 1;
      if (rank == 1) {
        EXPECT_EQ(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM), FSDP_PEER_FAILED);
      }
      fsdp_error error = FSDP_ERROR_INIT;
      FSDP(fsdp_get_context_error(context, &error));
      const std::string text = error.message;
      if (reason[0] == 'a') {
        EXPECT_NE(text.find("a??? b"), std::string::npos) << text;
      } else {
        EXPECT_EQ(static_cast<unsigned char>(text.back()), 0xA9) << text;
      }
    });
  }
}

// As many as a job: what is kept for each rank would fill the memory.
TEST(MisusedContext, APlannedJobIsNoLargerThanAJob) {
  fsdp_context *context = nullptr;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_plan_context(16385, 0, nullptr, &context), "fsdp_create_plan_context",
               "world_size is 16385", "16384");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_plan_context(UINT32_MAX, 0, nullptr, &context),
               "world_size is 4294967295");
  EXPECT_EQ(context, nullptr);
  EXPECT_WORKS(fsdp_create_plan_context(16384, 16383, nullptr, &context));
  fsdp_destroy_context(context);
}

TEST(MisusedContext, APlanningContextHasNoData) {
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(8, 3, nullptr, &context));
  const Scenario setup = small_setup();
  {
    Rank rank(context, setup);
    fsdp_group *group = rank.groups[0];
    fsdp_stats stats = FSDP_STATS_INIT;
    float data[32] = {};
    double value = 1;
    uint64_t count = 7;
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0),
                 "fsdp_load_param", "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(group, FSDP_FORWARD, 0, nullptr), "fsdp_unshard", "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_publish_weights(rank.model, nullptr), "fsdp_publish_weights", "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(rank.model, 1, 0, nullptr), "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_discard_step(rank.model, nullptr), "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_stats(rank.model, &stats), "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_shard_count(rank.model, &count), "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM), "only plans");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_close_context(context), "only plans");
    EXPECT_EQ(count, 7u);
    uint64_t bytes = 0;
    EXPECT_WORKS(fsdp_get_role_bytes(rank.model, FSDP_ROLE_ALL, 7, &bytes));
    EXPECT_GT(bytes, 0u);
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_role_bytes(rank.model, FSDP_ROLE_ALL, 8, &bytes),
                 "rank 8 is not one of the 8 ranks");
  }
  fsdp_destroy_context(context);
}

fsdp_status create_mesh(fsdp_context *context, uint32_t replicate, uint32_t shard) {
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.replicate_size = replicate;
  options.shard_size = shard;
  fsdp_mesh *mesh = reinterpret_cast<fsdp_mesh *>(1);
  const fsdp_status status = fsdp_create_mesh(context, &options, &mesh);
  if (status != FSDP_OK)
    EXPECT_EQ(mesh, nullptr);
  else
    fsdp_destroy_mesh(mesh);
  return status;
}

TEST(MisusedContext, InvalidMeshesAreRefused) {
  fsdp_context *contexts[4] = {}, *planning = nullptr;
  FSDP(fsdp_create_local_contexts(4, nullptr, contexts));
  FSDP(fsdp_create_plan_context(4, 0, nullptr, &planning));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_mesh(contexts[0], 3, 2), "replicate_size 3", "shard_size 2", "4 ranks");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_mesh(contexts[0], 0, 3), "shard_size 3", "4 ranks");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_mesh(contexts[0], 5, 0), "replicate_size 5");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_mesh(contexts[0], 1u << 31, 1u << 31), "4 ranks");
  EXPECT_WORKS(create_mesh(contexts[0], 2, 2));
  EXPECT_WORKS(create_mesh(contexts[0], 0, 2));
  EXPECT_WORKS(create_mesh(contexts[0], 1, 4));
  EXPECT_WORKS(create_mesh(contexts[0], 0, 0));
  EXPECT_WORKS(create_mesh(planning, 2, 2));
  fsdp_mesh *mesh = nullptr;
  fsdp_mesh_options options = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_mesh(contexts[0], &options, &mesh),
               "fsdp_mesh_options.struct_size is 0");
  Newer<fsdp_mesh_options> newer(FSDP_MESH_OPTIONS_INIT);
  EXPECT_FAILS(FSDP_UNSUPPORTED, fsdp_create_mesh(contexts[0], &newer.options, &mesh),
               Newer<fsdp_mesh_options>::byte());
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
  fsdp_destroy_context(planning);
}

TEST(MisusedContext, InvalidAllReduceValuesAreRefused) {
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_local_contexts(1, nullptr, &context));
  std::vector<double> values(513, 2.5);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_all_reduce_values(context, nullptr, values.data(), 513, FSDP_VALUE_SUM),
               "value_count is 513", "512");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_all_reduce_values(context, nullptr, nullptr, 1, FSDP_VALUE_SUM),
               "values is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_all_reduce_values(context, nullptr, values.data(), 1, 0),
               "0 is not an fsdp_value_op");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_all_reduce_values(context, nullptr, values.data(), 1, 5),
               "5 is not an fsdp_value_op");
  EXPECT_WORKS(fsdp_all_reduce_values(context, nullptr, values.data(), 512, FSDP_VALUE_MAX));
  EXPECT_EQ(values[0], 2.5);
  EXPECT_WORKS(fsdp_close_context(context));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_close_context(context), "rank 0", "closed", "destroy");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_all_reduce_values(context, nullptr, values.data(), 1, FSDP_VALUE_SUM),
               "closed");
  fsdp_destroy_context(context);
}

// Both ranks are told the same, which names both, and their values are as they were.
TEST(MisusedContext, AllReduceValuesOfDifferentCountsOrOpsAreAMismatch) {
  Scenario setup = small_setup();
  setup.ranks = 2;
  run_threads(setup, [](uint32_t rank, fsdp_context *context) {
    double values[2] = {1, 2};
    EXPECT_FAILS(FSDP_MISMATCH, fsdp_all_reduce_values(context, nullptr, values, 1 + rank, FSDP_VALUE_SUM),
                 "fsdp_all_reduce_values", "rank 1 reduces 2 values", "rank 0 reduces 1");
    EXPECT_BLAMES(1);
    EXPECT_FAILS(FSDP_MISMATCH,
                 fsdp_all_reduce_values(context, nullptr, values, 2, rank ? FSDP_VALUE_MIN : FSDP_VALUE_MAX), "op 3",
                 "op 2");
    EXPECT_BLAMES(1);
    EXPECT_TRUE(values[0] == 1 && values[1] == 2);
    EXPECT_WORKS(fsdp_all_reduce_values(context, nullptr, values, 2, FSDP_VALUE_SUM));
    EXPECT_TRUE(values[0] == 2 && values[1] == 4);
  });
}

TEST(MisusedContext, NamesOfStatusesAndSizesOfDtypes) {
#define NAMED(status) \
  { status, #status }
  for (const auto &[status, name] : std::initializer_list<std::pair<fsdp_status, const char *>>{
           NAMED(FSDP_OK), NAMED(FSDP_INVALID_ARGUMENT), NAMED(FSDP_INVALID_HANDLE), NAMED(FSDP_INVALID_STATE),
           NAMED(FSDP_UNSUPPORTED), NAMED(FSDP_OUT_OF_MEMORY), NAMED(FSDP_BUSY), NAMED(FSDP_MISMATCH),
           NAMED(FSDP_PEER_FAILED), NAMED(FSDP_TIMEOUT), NAMED(FSDP_ABORTED), NAMED(FSDP_INTERRUPTED),
           NAMED(FSDP_SYSTEM), NAMED(FSDP_INTERNAL)})
    EXPECT_STREQ(fsdp_get_status_name(status), name);
#undef NAMED
  EXPECT_STREQ(fsdp_get_status_name(FSDP_INTERNAL + 1), "unknown status");
  EXPECT_STREQ(fsdp_get_status_name(-1), "unknown status");
  EXPECT_EQ(fsdp_get_dtype_size(FSDP_FLOAT32), 4u);
  EXPECT_EQ(fsdp_get_dtype_size(FSDP_BFLOAT16), 2u);
  EXPECT_EQ(fsdp_get_dtype_size(FSDP_FLOAT16), 2u);
  EXPECT_EQ(fsdp_get_dtype_size(0), 0u);
  EXPECT_EQ(fsdp_get_dtype_size(99), 0u);
  char buffer[8] = "kept";
  uint64_t size = sizeof buffer;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_describe_build(buffer, &size), "fsdp_describe_build", "8 bytes");
  EXPECT_STREQ(buffer, "kept");
  EXPECT_GT(size, sizeof buffer);
}

}  // namespace
