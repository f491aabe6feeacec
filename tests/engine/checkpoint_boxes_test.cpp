// SPDX-License-Identifier: Apache-2.0
// Parameters that are boxes of larger tensors, saved and loaded: tensor parallelism, stacked experts.
#include "checkpoint_folder.h"

using namespace harness;

namespace {

constexpr uint64_t whole_rows = 12, whole_columns = 10;

struct Cut {
  const char *name;
  uint64_t row, column, rows, columns;
};

// A model of a matrix, or of a box of it, beside tensors that are whole.
Scenario cut_scenario(uint32_t ranks, const Cut *cut) {
  Scenario setup = harness::scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
  ParamDef w{"w", {whole_rows, whole_columns}};
  if (cut) {
    w.shape = {cut->rows, cut->columns};
    w.global_shape = {whole_rows, whole_columns};
    w.global_offset = {cut->row, cut->column};
  }
  setup.groups = {{"g", {w}}, {"h", {{"b", {7}}, {"s", {}}}}};
  return setup;
}

std::vector<float> cut_out(const std::vector<float> &whole, const Cut &cut) {
  std::vector<float> part;
  for (uint64_t r = cut.row; r < cut.row + cut.rows; ++r)
    for (uint64_t c = cut.column; c < cut.column + cut.columns; ++c) part.push_back(whole[r * whole_columns + c]);
  return part;
}

// Weights and states of w, then of b and s: as `everything` has them, the order of which is weights, then states.
std::vector<std::vector<float>> cut_out(std::vector<std::vector<float>> all, const Cut &cut) {
  for (const size_t of_w : {0, 3, 4}) all[of_w] = cut_out(all[of_w], cut);
  return all;
}

constexpr Cut cuts[] = {{"rows", 3, 0, 7, 10}, {"columns", 0, 4, 12, 5}, {"both", 5, 2, 4, 7}, {"all", 0, 0, 12, 10}};

// Three ranks save the whole tensor. Models of boxes of it load their part, and read no other bytes of it.
TEST_F(Checkpoint, OfAWholeTensorIsLoadedByBoxes) {
  std::vector<std::vector<float>> saved;
  run(cut_scenario(3, nullptr), "saved", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) clean_step(rank, step);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  for (const Cut &cut : cuts)
    for (const uint32_t ranks : {1, 2, 5}) {
      std::atomic<uint64_t> wanted = 0;
      run(cut_scenario(ranks, &cut), cut.name, [&](Rank &rank) {
        fsdp_loaded loaded = FSDP_LOADED_INIT;
        FSDP(load(rank, path, 0, &loaded));
        wanted += loaded.wanted_bytes;
        FSDP(fsdp_publish_weights(rank.model, stream()));
        REQUIRE(same_bits(everything(rank), cut_out(saved, cut)));
        REQUIRE(rank.stats().step == 2);
        clean_step(rank, 2);
      });
      // Each fp32 element has a weight and two states. Each rank also has the step numbers of three parameters.
      EXPECT_EQ(wanted, (cut.rows * cut.columns + 7 + 1) * 12 + ranks * 3 * 8) << cut.name;
    }
}

// A box is saved as a part of its tensor. A load succeeds if all of its elements were saved.
TEST_F(Checkpoint, OfABoxIsThatPartOfItsTensor) {
  constexpr Cut cut{"saved", 3, 2, 8, 7}, inside{"inside", 4, 3, 5, 6}, beside{"beside", 4, 3, 5, 7};
  std::vector<std::vector<float>> saved;
  run(cut_scenario(2, &cut), "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  for (int file = 1; file <= 2; ++file) {
    const std::string name = "shard-0000" + std::to_string(file) + "-model-00001-of-00001.safetensors";
    const std::string offsets = R"(\"w\":{\"saved_offsets\":[)" + std::to_string(file == 1 ? 3 : 7) + ",2]}";
    EXPECT_NE(files("step-0000000001").at(name).find(offsets), std::string::npos) << offsets;
    EXPECT_NE(files("step-0000000001").at(name).find(R"("shape":[4,7])"), std::string::npos);
  }
  const std::string manifest = files("step-0000000001").at("checkpoint.json");
  EXPECT_NE(
      manifest.find(R"("shape":[12,10],"parts":[{"offset":[3,2],"shape":[8,7],"cuts":[[0,2,4]]}],"partial":true)"),
      std::string::npos)
      << manifest;
  run(cut_scenario(3, &cut), "the same box", [&](Rank &rank) {
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(same_bits(everything(rank), saved));
  });
  // The part of the saved box after its first row and first column.
  const auto inner = [&](size_t of_w) {
    std::vector<float> part;
    for (uint64_t r = 1; r < 6; ++r)
      for (uint64_t c = 1; c < 7; ++c) part.push_back(saved[of_w][r * 7 + c]);
    return part;
  };
  run(cut_scenario(2, &inside), "inside", [&](Rank &rank) {
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    const auto all = everything(rank);
    for (const size_t of_w : {0, 3, 4}) REQUIRE(all[of_w] == inner(of_w));
    FSDP(fsdp_begin_update(rank.model, stream()));
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(fsdp_load_weights(rank.model, path.c_str(), nullptr, 0, sizeof(fsdp_rename), nullptr, &loaded));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(everything(rank)[0] == inner(0));
  });
  const auto refused = [&](const Cut *other, const std::vector<std::string> &words) {
    run(cut_scenario(2, other), "refused", [&](Rank &rank) {
      require_error(load(rank, path), FSDP_INVALID_ARGUMENT, words);
      rank.load();
    });
  };
  refused(&beside, {R"("w" has [5, 7] from [4, 3] on here, and of these 35 elements the checkpoint has 30)"});
  refused(nullptr, {R"("w" has [12, 10] from [0, 0] on here, and of these 120 elements the checkpoint has 56)"});
  run(cut_scenario(2, &beside), "weights refused", [&](Rank &rank) {
    require_error(fsdp_load_weights(rank.model, path.c_str(), nullptr, 0, sizeof(fsdp_rename), nullptr, nullptr),
                  FSDP_INVALID_ARGUMENT,
                  {R"("w" takes [5, 7] from [4, 3] on of "w", and of these 35 elements the files have 30)"});
    rank.load();
  });
}

}  // namespace
