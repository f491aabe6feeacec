// SPDX-License-Identifier: Apache-2.0
// Stacks of matrices with row_dimensions, so that ranks divide them inside matrices: training, loads of rows,
// checkpoints and planes are those of the same model with another division.
#include <numeric>

#include "frozen.h"

using namespace harness;

namespace {

// Stacks on which few ranks cut matrices, beside a matrix and a vector.
Scenario stacks(fsdp_strategy strategy, uint32_t ranks, uint32_t row_dimensions,
                fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(strategy, ranks, mode);
  setup.groups = {{"experts", {{"up", {5, 6, 10}}, {"down", {2, 7, 12}, FSDP_BFLOAT16}}},
                  {"other", {{"w", {9, 8}}, {"pair", {2, 300}}, {"b", {7}}}}};
  for (GroupDef &group : setup.groups)
    for (ParamDef &param : group.params)
      if (param.name != "w") param.row_dimensions = std::min<uint32_t>(row_dimensions, param.shape.size());
  return setup;
}

TEST(Stacks, TrainToTheSameBitsHoweverTheyAreDivided) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {1, 2, 3, 4}) {
      const std::vector<Outcome> plain = train_threads(stacks(strategy, ranks, 0));
      for (const uint32_t rows : {1, 2, 3}) {
        const auto mode = rows == 2 ? FSDP_UNSHARD_MAPPED + 0 : FSDP_UNSHARD_COPIED + 0;
        const Scenario setup = stacks(strategy, ranks, rows, mode);
        const std::vector<Outcome> outcomes = train_threads(setup);
        EXPECT_EQ(difference(setup, outcomes), "") << strategy << " on " << ranks << " ranks, " << rows;
        for (uint32_t r = 0; r < ranks; ++r) EXPECT_TRUE(same_bits(outcomes[r].weights, plain[r].weights));
        EXPECT_TRUE(rows > 1 || outcomes[0].memory.padding_count == plain[0].memory.padding_count);
      }
    }
}

TEST(Stacks, PadLessWhereRanksDivideMatrices) {
  const auto padding = [](uint32_t rows) {
    Scenario setup = stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, rows);
    setup.groups = {{"g", {{"experts", {2, 64, 128}}}}};
    setup.groups[0].params[0].row_dimensions = rows;
    return train_threads(setup)[0].memory.padding_count;
  };
  EXPECT_EQ(padding(0), 2u * 64 * 128);
  EXPECT_EQ(padding(2), 0u);
}

TEST(Stacks, ShowOneTensorAndTellRowsOfMatrices) {
  const Scenario setup = stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2);
  run(setup, "views", [&](Rank &rank) {
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, stream()));
    fsdp_tensor view = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_EVAL, &view));
    REQUIRE(view.dimension_count == 3 && view.shape[0] == 5 && view.shape[1] == 6 && view.shape[2] == 10);
    REQUIRE(rank.view(0, 0, FSDP_EVAL) == rank.read(0, 0));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, stream()));
    fsdp_param info = FSDP_PARAM_INIT;
    FSDP(fsdp_get_param_info(rank.groups[0], 0, &info));
    REQUIRE(info.row_dimensions == 2);
    FSDP(fsdp_get_param_info(rank.groups[1], 0, &info));
    REQUIRE(info.row_dimensions == 1);
    uint64_t rows = 0;
    for (uint32_t r = 0; r < 4; ++r) {
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
      FSDP(fsdp_get_chunk(rank.groups[0], 0, r, &chunk));
      REQUIRE(chunk.row_offset == rows && chunk.element_offset == rows * 10);
      REQUIRE(chunk.element_count == chunk.row_count * 10);
      rows += chunk.row_count;
    }
    REQUIRE(rows == 5 * 6);
  });
}

TEST(Stacks, LoadTheRowsOfAChunk) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = stacks(strategy, 4, 2);
    std::atomic<int> begun_inside = 0;  // chunks that begin inside a matrix
    run(setup, "chunks", [&](Rank &rank) {
      std::vector<float> full(setup.groups[0].params[0].count());
      std::iota(full.begin(), full.end(), 1.0f);
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
      FSDP(fsdp_get_chunk(rank.groups[0], 0, rank.rank, &chunk));
      begun_inside += chunk.row_offset % 6 != 0;
      const auto load = [&](uint64_t first, uint64_t count) {
        return fsdp_load_chunk(rank.groups[0], 0, full.data() + first * 10, FSDP_FLOAT32, first, count, 0);
      };
      const uint64_t half = chunk.row_count / 2;
      FSDP(load(chunk.row_offset, half));
      FSDP(load(chunk.row_offset + half, chunk.row_count - half));
      require_error(load(chunk.row_offset, chunk.row_count + 1), FSDP_INVALID_ARGUMENT, {"not all this rank's"});
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      REQUIRE(rank.read(0, 0) == full);
      for (const fsdp_shard &shard : rank.shards())
        if (shard.group == rank.groups[0] && shard.param_index == 0)
          REQUIRE(shard.row_offset == chunk.row_offset && shard.row_count == chunk.row_count);
    });
    EXPECT_EQ(begun_inside > 0, strategy != FSDP_STRATEGY_NO_SHARD);
  }
}

// What a checkpoint has after two steps, whatever rows the writer has.
std::vector<std::vector<float>> save_after_two_steps(const Scenario &setup, const std::string &path) {
  std::vector<std::vector<float>> saved;
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) clean_step(rank, step);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  return saved;
}

void expect_loaded(const Scenario &setup, const std::string &path, const std::vector<std::vector<float>> &saved,
                   uint32_t flags = 0) {
  run(setup, "loaded", [&](Rank &rank) {
    FSDP(load(rank, path, flags));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(same_bits(everything(rank), saved));
    REQUIRE(rank.stats().step == 2);
    clean_step(rank, 2);
  });
}

class StackCheckpoint : public Checkpoint {};

TEST_F(StackCheckpoint, IsLoadedWithOtherRowsOnOtherRanks) {
  for (const auto &[strategy, ranks, rows] :
       {std::tuple{4, 4u, 2u}, {4, 3u, 0u}, {4, 5u, 3u}, {2, 3u, 2u}, {1, 2u, 2u}}) {
    fs::remove_all(path);
    fs::create_directory(path);
    const auto saved = save_after_two_steps(stacks(strategy, ranks, rows), path);
    for (const uint32_t other_rows : {0u, 2u, 3u})
      for (const uint32_t other : {1u, 3u, 4u})
        expect_loaded(stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, other, other_rows), path, saved);
    Scenario replicas = stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2);
    replicas.mesh.replicate_size = replicas.mesh.shard_size = 2;
    expect_loaded(replicas, path, saved, FSDP_LOAD_ONE_REPLICA);
  }
}

TEST_F(StackCheckpoint, IsLoadedAsWeightsAlone) {
  const auto saved = save_after_two_steps(stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2), path);
  for (const uint32_t rows : {0u, 2u, 3u})
    run(stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, rows), "weights", [&](Rank &rank) {
      fsdp_loaded loaded = FSDP_LOADED_INIT;
      FSDP(fsdp_load_weights(rank.model, path.c_str(), nullptr, 0, sizeof(fsdp_rename), nullptr, &loaded));
      FSDP(fsdp_publish_weights(rank.model, stream()));
      const auto weights = rank.read_all();
      REQUIRE(std::equal(weights.begin(), weights.end(), saved.begin()));
    });
}

// A rank's part of a stack is at most three boxes, each in a file of its own; without row_dimensions it is one.
TEST_F(StackCheckpoint, HasAtMostThreeBoxesOfARank) {
  for (const uint32_t rows : {0u, 2u}) {
    fs::remove_all(path);
    fs::create_directory(path);
    Scenario setup = stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, rows);
    setup.groups = {{"g", {{"w", {8, 9, 128}}}}};
    setup.groups[0].params[0].row_dimensions = rows;
    const auto saved = save_after_two_steps(setup, path);
    std::map<std::string, int> boxes;  // by rank and kind
    for (const auto &[name, bytes] : files("step-0000000002"))
      if (const size_t shard = name.find("shard-"); shard != name.npos && bytes.find("\"w\"") != bytes.npos)
        ++boxes[name.substr(0, shard + 11)];
    ASSERT_EQ(boxes.size(), 3u);
    EXPECT_EQ(boxes.begin()->second, rows ? 2 : 1) << "24 rows: two matrices and a part of the third";
    EXPECT_EQ(std::next(boxes.begin())->second, rows ? 3 : 1) << "a part, a matrix, a part";
    const std::string manifest = files("step-0000000002").at("checkpoint.json");
    EXPECT_EQ(manifest.find("\"version\":2,") != manifest.npos, rows > 1);
    EXPECT_EQ(manifest.find(R"("axis":1)") != manifest.npos, rows > 1);
    expect_loaded(setup, path, saved);
  }
}

TEST_F(StackCheckpoint, KeepsStatesInCodes) {
  const auto setup_of = [](uint32_t ranks, uint32_t rows) {
    Scenario setup = stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, rows);
    setup.model.optimizer = FSDP_OPTIMIZER_ADAMW_8BIT;
    setup.groups = {{"g", {{"long", {3, 20, 256}, FSDP_BFLOAT16}, {"odd", {4, 30, 50}}}}};
    for (ParamDef &param : setup.groups[0].params) param.row_dimensions = rows;
    return setup;
  };
  const auto plain = save_after_two_steps(setup_of(3, 0), path + "/plain");
  const auto saved = save_after_two_steps(setup_of(3, 2), path + "/stacks");
  EXPECT_TRUE(same_bits(plain, saved)) << "blocks of states are counted in the parameter";
  for (const uint32_t rows : {0u, 2u, 3u}) {
    expect_loaded(setup_of(4, rows), path + "/stacks", saved);
    expect_loaded(setup_of(2, rows), path + "/plain", saved);
  }
}

// A stack of two matrices, and the same matrices as parameters.
TEST(Stacks, OfQuantizedMatricesHaveTheirPlanes) {
  for (const auto &[quantization, rows] :
       {std::pair{FSDP_QUANTIZE_MXFP8 + 0, uint64_t{96}}, {FSDP_QUANTIZE_FP8_BLOCK + 0, uint64_t{384}}})
    for (const bool is_frozen : {false, true})
      for (const uint32_t ranks : {1, 2, 3, 4})
        for (const uint32_t row_dimensions : {1, 2, 3}) {
          const uint64_t columns = 96, count = rows * columns;
          Scenario setup = stacks(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, 0);
          setup.groups = {{"stack", {quantized({"stack", {2, rows, columns}}, quantization)}},
                          {"alone",
                           {quantized({"first", {rows, columns}}, quantization),
                            quantized({"second", {rows, columns}}, quantization)}}};
          setup.groups[0].params[0].row_dimensions = row_dimensions;
          for (GroupDef &group : setup.groups)
            for (ParamDef &param : group.params) param.flags = is_frozen ? FSDP_PARAM_FROZEN + 0u : 0u;
          const std::vector<float> values = awkward_values(2 * count, 5);
          run(setup, "planes", [&](Rank &rank) {
            const auto load = [&](size_t group, size_t param, const float *from, uint64_t elements) {
              FSDP(fsdp_load_param(rank.groups[group], param, from, FSDP_FLOAT32, elements, FSDP_EVERY_RANK, 0));
            };
            load(0, 0, values.data(), 2 * count);
            load(1, 0, values.data(), count);
            load(1, 1, values.data() + count, count);
            publish(rank);
            const auto of_stack = [&] { return stored_planes(rank, 0, 0); };
            Planes both = stored_planes(rank, 1, 0);
            for (const auto &[plane, bytes] : stored_planes(rank, 1, 1))
              both[plane].insert(both[plane].end(), bytes.begin(), bytes.end());
            REQUIRE(of_stack() == both);
            fsdp_chunk chunk = FSDP_CHUNK_INIT;
            FSDP(fsdp_get_chunk(rank.groups[0], 0, rank.rank, &chunk));
            if (row_dimensions > 1 && ranks == 4) REQUIRE(chunk.element_count < count);
            FSDP(fsdp_begin_update(rank.model, stream()));
            std::vector<float> zeros(2 * count);
            load(0, 0, zeros.data(), 2 * count);
            FSDP(fsdp_load_chunk(rank.groups[0], 0, values.data() + chunk.element_offset, FSDP_FLOAT32,
                                 chunk.row_offset, chunk.row_count, 0));
            publish(rank);
            REQUIRE(of_stack() == both);
          });
        }
}

TEST_F(StackCheckpoint, KeepsPlanesOfFrozenStacks) {
  for (const fsdp_quantization quantization : {FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8_BLOCK, FSDP_QUANTIZE_FP8}) {
    const auto setup_of = [&](uint32_t ranks, uint32_t rows) {
      Scenario setup = frozen_setup(frozen({"w", {3, 128, 160}}, quantization), ranks);
      setup.groups[0].params[0].row_dimensions = rows;
      return setup;
    };
    fs::remove_all(path);
    fs::create_directory(path);
    const Planes planes = random_planes(setup_of(1, 0).groups[0].params[0], 3);
    run(setup_of(2, 2), "saved", [&](Rank &rank) {
      load_planes(rank, 0, 0, planes);
      publish(rank);
      FSDP(save(rank, path));
    });
    for (const uint32_t rows : {0u, 2u, 3u})
      for (const uint32_t ranks : {1u, 3u, 4u})
        run(setup_of(ranks, rows), "loaded", [&](Rank &rank) {
          FSDP(load(rank, path));
          publish(rank);
          REQUIRE(stored_planes(rank, 0, 0) == planes);
        });
  }
}

// Rows of a granule and of blocks are named in the rows that the caller declared.
TEST(Stacks, RefusePartsOfBlocks) {
  Scenario setup = frozen_setup(frozen({"w", {2, 64, 32}}, FSDP_QUANTIZE_MXFP8), 1);
  setup.groups[0].params[0].row_dimensions = 2;
  run(setup, "blocks", [&](Rank &rank) {
    std::vector<float> values(2 * 64 * 32);
    const auto load = [&](uint64_t first, uint64_t count) {
      return fsdp_load_chunk(rank.groups[0], 0, values.data(), FSDP_FLOAT32, first, count, 0);
    };
    FSDP(load(32, 64));
    require_error(load(16, 32), FSDP_INVALID_ARGUMENT, {"rows [16, 48) of parameter 'w'", "blocks of 32 rows"});
    FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    publish(rank);
  });
}

// The last block of a matrix may be shorter, also where every element is a row.
TEST(Stacks, LoadTheShortBlockAtTheEnd) {
  Scenario setup = frozen_setup(frozen({"w", {200, 32}}, FSDP_QUANTIZE_FP8_BLOCK), 1);
  setup.groups[0].params[0].row_dimensions = 2;
  run(setup, "the last block", [&](Rank &rank) {
    const std::vector<float> values(200 * 32, 448.0f);
    FSDP(fsdp_load_chunk(rank.groups[0], 0, values.data(), FSDP_FLOAT32, 0, 128 * 32, 0));
    require_error(fsdp_load_chunk(rank.groups[0], 0, values.data(), FSDP_FLOAT32, 128 * 32, 71 * 32, 0),
                  FSDP_INVALID_ARGUMENT, {"blocks of 4096 rows"});
    FSDP(fsdp_load_chunk(rank.groups[0], 0, values.data(), FSDP_FLOAT32, 128 * 32, 72 * 32, 0));
    publish(rank);
    REQUIRE(rank.read(0, 0) == values);
  });
}

}  // namespace
