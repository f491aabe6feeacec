// SPDX-License-Identifier: Apache-2.0
// Checkpoints of models whose experts have meshes of their own: what some ranks have saved is loaded by any others, and
// training goes on with the same bits as on one rank.
#include <numeric>

#include "checkpoint_folder.h"
#include "weight_file.h"

using namespace harness;

namespace {

// How ranks divide the model. Without expert meshes the experts are on the model's mesh.
struct ExpertWay {
  const char *name;
  uint32_t ranks;
  uint32_t expert_meshes = 0;  // rank r is in mesh r % expert_meshes
  uint32_t replicas = 1;       // of each expert mesh
  fsdp_outer_strategy outer = 0;
  fsdp_strategy strategy = 0;  // of the experts; 0: the model's
  bool copies_router = false;  // ranks have tensor-parallel copies of the router, in the meshes of the experts
};

constexpr ExpertWay expert_ways[] = {
    {"one rank", 1},
    {"one mesh", 3},
    {"two meshes", 4, 2},
    {"three meshes", 6, 3},
    {"meshes of one rank", 4, 4},
    {"replicas", 8, 2, 2, FSDP_OUTER_NO_SHARD},
    {"replicas that divide states", 8, 2, 2, FSDP_OUTER_OPTIM, FSDP_STRATEGY_OPTIM},
    {"copies of the router", 4, 2, 1, 0, FSDP_STRATEGY_OPTIM_GRADS, true},
};

// Options of the model, and the dtype of its parameters.
struct ExpertKind {
  const char *name;
  fsdp_optimizer optimizer;
  fsdp_main_storage storage;
  fsdp_dtype dtype;
  fsdp_quantization frozen;  // quantization of the frozen experts
};

constexpr ExpertKind expert_kinds[] = {
    {"fp32", FSDP_OPTIMIZER_ADAMW, 0, FSDP_FLOAT32, 0},
    {"compact", FSDP_OPTIMIZER_ADAMW_8BIT, FSDP_MAIN_SPLIT16, FSDP_BFLOAT16, FSDP_QUANTIZE_MXFP8}};

// Values are multiples of 1/8 below 4, and so exact in every dtype.
float expert_value(const std::string &name, uint64_t element, uint32_t step) {
  uint64_t seed = step * 5;
  for (const char c : name) seed = seed * 31 + static_cast<unsigned char>(c);
  return (static_cast<float>((element * 7 + seed) % 63) - 31) / 8;
}

class ExpertRank {
 public:
  ExpertRank(fsdp_context *context, const ExpertKind &kind, const ExpertWay &way, uint32_t rank)
      : way_(way), number_(rank) {
    setup_ = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, way.ranks);
    setup_.groups.clear();
    setup_.model.grad_op = FSDP_GRAD_OP_SUM;
    setup_.model.optimizer = kind.optimizer, setup_.model.main_storage = kind.storage;
    if (way.expert_meshes) make_mesh(context);
    ParamDef stack{"experts.stack", {12, 7, 4}}, frozen{"experts.frozen", {384, 64}};
    stack.row_dimensions = 2;
    frozen.flags = FSDP_PARAM_FROZEN, frozen.quantization = kind.frozen;
    add({"dense", {{"dense.w", {10, 4}}, {"dense.b", {7}}}}, false);
    add({"router", {{"router", {12, 4}}}}, way.copies_router);
    add({"experts", {divide({"experts.w", {96, 64}}), divide(stack), divide(frozen)}}, true);
    if (way.copies_router) {
      ParamDef &router = setup_.groups[1].params[0];
      router.global_shape = router.shape, router.global_offset = {0, 0};
    }
    setup_.set_dtype(kind.dtype);
    rank_.emplace(context, setup_);
  }
  ~ExpertRank() {
    rank_.reset();
    if (mesh_) fsdp_destroy_mesh(mesh_);
  }
  ExpertRank(const ExpertRank &) = delete;
  ExpertRank &operator=(const ExpertRank &) = delete;

  Rank &rank() { return *rank_; }
  void load_initial() {
    for_each_param([&](size_t g, size_t p, const ParamDef &param) {
      const auto values = values_of(param, 0);
      FSDP(fsdp_load_param(rank_->groups[g], p, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    });
    FSDP(fsdp_publish_weights(rank_->model, stream()));
  }
  // One step, in which the first rank of each mesh has all of the gradient. So sums are the same on any ranks.
  void train(uint32_t step) {
    for (size_t g = rank_->groups.size(); g-- > 0;) {
      const bool gives = setup_.groups[g].options.mesh ? number_ < way_.expert_meshes : number_ == 0;
      for (size_t p = 0; p < setup_.groups[g].params.size(); ++p) {
        const ParamDef &param = setup_.groups[g].params[p];
        if (param.flags & FSDP_PARAM_FROZEN) continue;
        std::vector<float> values = values_of(param, step + 1);
        if (!gives) std::ranges::fill(values, 0.0f);
        FSDP(fsdp_put_grad(rank_->groups[g], p, values.data(), FSDP_FLOAT32, values.size(), 0, stream()));
      }
      FSDP(fsdp_reduce_grad(rank_->groups[g], FSDP_LAST, stream()));
    }
    FSDP(fsdp_finish_grads(rank_->model, 1.0, 0, stream()));
    fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
    FSDP(fsdp_step_adamw(rank_->model, 1e-2, &adamw, stream()));
  }
  // The part of a whole tensor's numbers that this rank's mesh has.
  std::vector<float> part_of(const ParamDef &param, const std::vector<float> &whole) const {
    const uint64_t begin = param.global_offset.empty() ? 0 : param.global_offset[0] * (param.count() / param.shape[0]);
    return {whole.begin() + static_cast<std::ptrdiff_t>(begin),
            whole.begin() + static_cast<std::ptrdiff_t>(begin + param.count())};
  }
  // Throws unless weights and states are those of one rank.
  void require_same(const std::vector<std::vector<float>> &whole) {
    const auto all = everything(*rank_);
    REQUIRE(all.size() == whole.size());
    size_t next = 0;
    const auto compare = [&](const ParamDef &param) {
      REQUIRE(same_bits({all[next]}, {part_of(param, whole[next])}));
      ++next;
    };
    for_each_param([&](size_t, size_t, const ParamDef &param) { compare(param); });
    for_each_param([&](size_t, size_t, const ParamDef &param) {
      for (size_t s = 0; !(param.flags & FSDP_PARAM_FROZEN) && s < std::size(states); ++s) compare(param);
    });
  }

 private:
  void make_mesh(fsdp_context *context) {
    std::vector<uint32_t> ranks;
    for (uint32_t r = number_ % way_.expert_meshes; r < way_.ranks; r += way_.expert_meshes) ranks.push_back(r);
    fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
    options.ranks = ranks.data(), options.rank_count = static_cast<uint32_t>(ranks.size());
    options.replicate_size = way_.replicas;
    FSDP(fsdp_create_mesh(context, &options, &mesh_));
  }
  void add(GroupDef group, bool on_mesh) {
    if (on_mesh && mesh_) {
      group.options.mesh = mesh_;
      group.options.strategy = way_.strategy, group.options.outer_strategy = way_.outer;
    }
    setup_.groups.push_back(std::move(group));
  }
  ParamDef divide(ParamDef param) const {
    if (!way_.expert_meshes) return param;
    param.global_shape = param.shape;
    param.global_offset.assign(param.shape.size(), 0);
    param.shape[0] /= way_.expert_meshes;
    param.global_offset[0] = param.shape[0] * (number_ % way_.expert_meshes);
    return param;
  }
  std::vector<float> values_of(const ParamDef &param, uint32_t step) const {
    const auto &shape = param.global_shape.empty() ? param.shape : param.global_shape;
    std::vector<float> whole(std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>()));
    for (uint64_t i = 0; i < whole.size(); ++i) whole[i] = expert_value(param.name, i, step);
    return part_of(param, whole);
  }
  template <class Visit>
  void for_each_param(Visit visit) {
    for (size_t g = 0; g < setup_.groups.size(); ++g)
      for (size_t p = 0; p < setup_.groups[g].params.size(); ++p) visit(g, p, setup_.groups[g].params[p]);
  }

  const ExpertWay &way_;
  uint32_t number_;
  fsdp_mesh *mesh_ = nullptr;
  Scenario setup_;
  std::optional<Rank> rank_;
};

void run_way(const ExpertKind &kind, const ExpertWay &way, const std::string &what,
             const std::function<void(ExpertRank &)> &body) {
  const Scenario job = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, way.ranks);
  std::vector<std::string> errors;
  run_threads(
      job,
      [&](uint32_t r, fsdp_context *context) {
        {
          ExpertRank rank(context, kind, way, r);
          body(rank);
        }
        FSDP(fsdp_close_context(context));
      },
      &errors);
  for (const std::string &error : errors) EXPECT_EQ(error, "") << kind.name << ", " << what;
}

// What one rank has after 2 steps, and after 3.
std::vector<std::vector<std::vector<float>>> train_on_one(const ExpertKind &kind) {
  std::vector<std::vector<std::vector<float>>> seen;
  run_way(kind, expert_ways[0], "one rank", [&](ExpertRank &rank) {
    rank.load_initial();
    for (uint32_t step = 0; step < 3; ++step) {
      rank.train(step);
      if (step > 0) seen.push_back(everything(rank.rank()));
    }
  });
  return seen;
}

class MeshCheckpoint : public Checkpoint {
 protected:
  void save_way(const ExpertKind &kind, const ExpertWay &way, const std::string &folder) {
    run_way(kind, way, way.name, [&](ExpertRank &rank) {
      rank.load_initial();
      for (uint32_t step = 0; step < 2; ++step) rank.train(step);
      FSDP(save(rank.rank(), folder));
    });
  }
};

TEST_F(MeshCheckpoint, IsLoadedByOtherMeshesAndTrainingGoesOn) {
  for (const ExpertKind &kind : expert_kinds) {
    const auto whole = train_on_one(kind);
    ASSERT_EQ(whole.size(), 2u);
    for (size_t from = 0; from < std::size(expert_ways); ++from) {
      const std::string folder = path + "/" + kind.name + " " + expert_ways[from].name;
      save_way(kind, expert_ways[from], folder);
      for (size_t to = 0; to < std::size(expert_ways); ++to) {
        if (kind.frozen && (from + to) % 3) continue;  // all of them take long
        run_way(kind, expert_ways[to], folder + " to " + expert_ways[to].name, [&](ExpertRank &rank) {
          FSDP(load(rank.rank(), folder, (from + to) % 2 ? FSDP_LOAD_ONE_REPLICA : 0));
          FSDP(fsdp_publish_weights(rank.rank().model, stream()));
          rank.require_same(whole[0]);
          REQUIRE(rank.rank().stats().step == 2);
          rank.train(2);
          rank.require_same(whole[1]);
        });
      }
    }
  }
}

TEST_F(MeshCheckpoint, DescribesItsMeshes) {
  run_way(expert_kinds[0], expert_ways[2], "described", [&](ExpertRank &rank) {
    rank.load_initial();
    FSDP(save(rank.rank(), path));
    std::string text(1 << 20, '\0');
    uint64_t size = text.size();
    FSDP(fsdp_describe_model(rank.rank().model, text.data(), &size));
    text.resize(size - 1);
    const auto layout = nlohmann::json::parse(text);
    REQUIRE(!layout["groups"][0].contains("ranks"));
    const auto &experts = layout["groups"][2];
    const uint32_t number = rank.rank().rank;
    REQUIRE(experts["replicate_size"] == 1 && experts["shard_size"] == 2);
    REQUIRE(experts["ranks"] == (std::vector<uint32_t>{number % 2, number % 2 + 2}));
  });
  EXPECT_NE(
      files(names().back())
          .at("checkpoint.json")
          .find("4 ranks, replicate 1 x shard 4, 3 groups optim_grads_params, 1 groups on 2 meshes of replicate 1 x "
                "shard 2"),
      std::string::npos);
}

// ---- experts that are parameters of their own, as Hugging Face has them ----

constexpr uint32_t expert_count = 12;
constexpr uint64_t expert_size = 6 * 4;

std::string expert_name(uint32_t expert) { return "layers.0.experts." + std::to_string(expert) + ".w1"; }

// Rank r has the experts of mesh r % meshes. Without a mesh it has all of them.
class NamedExperts {
 public:
  NamedExperts(fsdp_context *context, uint32_t ranks, uint32_t meshes, uint32_t rank, uint32_t experts = expert_count,
               bool has_dense = true)
      : setup_(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks)) {
    setup_.groups.clear();
    if (has_dense) setup_.groups.push_back({"dense", {{"dense.w", {10, 4}}}});
    GroupDef group{"experts", {}};
    const uint32_t mesh = rank % meshes, count = experts / meshes;
    for (uint32_t e = mesh * count; e < (mesh + 1) * count; ++e) {
      experts_.push_back(e);
      group.params.push_back({expert_name(e), {6, 4}});
    }
    if (meshes > 1) {
      std::vector<uint32_t> members;
      for (uint32_t r = mesh; r < ranks; r += meshes) members.push_back(r);
      mesh_ = make_mesh(context, members);
      group.options.mesh = mesh_;
    }
    setup_.groups.push_back(std::move(group));
    rank_.emplace(context, setup_);
  }
  ~NamedExperts() {
    rank_.reset();
    if (mesh_) fsdp_destroy_mesh(mesh_);
  }
  NamedExperts(const NamedExperts &) = delete;
  NamedExperts &operator=(const NamedExperts &) = delete;

  Rank &rank() { return *rank_; }
  static std::vector<float> values_of(uint32_t expert) {
    std::vector<float> values(expert_size);
    for (uint64_t i = 0; i < expert_size; ++i) values[i] = expert_value(expert_name(expert), i, 0);
    return values;
  }
  size_t group() const { return setup_.groups.size() - 1; }
  void load_initial() {
    rank_->load();
    FSDP(fsdp_begin_update(rank_->model, stream()));
    for (size_t p = 0; p < experts_.size(); ++p) {
      const auto values = values_of(experts_[p]);
      FSDP(fsdp_load_param(rank_->groups[group()], p, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    }
    FSDP(fsdp_publish_weights(rank_->model, stream()));
  }
  void require_values(uint32_t count = expert_count) {
    for (size_t p = 0; p < experts_.size(); ++p)
      if (experts_[p] < count) REQUIRE(rank_->read(group(), p) == values_of(experts_[p]));
  }

 private:
  Scenario setup_;
  std::vector<uint32_t> experts_;
  fsdp_mesh *mesh_ = nullptr;
  std::optional<Rank> rank_;
};

void run_named(uint32_t ranks, const std::function<void(uint32_t, fsdp_context *)> &body, const std::string &what) {
  std::vector<std::string> errors;
  run_threads(
      scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks),
      [&](uint32_t r, fsdp_context *context) {
        body(r, context);
        FSDP(fsdp_close_context(context));
      },
      &errors);
  expect_no_errors(errors, what);
}

constexpr std::pair<uint32_t, uint32_t> rank_and_mesh_counts[] = {{1, 1}, {4, 2}, {6, 3}, {4, 4}, {3, 1}};

TEST_F(MeshCheckpoint, HasExpertsByTheirNames) {
  for (const auto &[from, from_meshes] : rank_and_mesh_counts) {
    const std::string folder = path + "/" + std::to_string(from) + " " + std::to_string(from_meshes);
    run_named(
        from,
        [&, meshes = from_meshes, ranks = from](uint32_t r, fsdp_context *context) {
          NamedExperts experts(context, ranks, meshes, r);
          experts.load_initial();
          FSDP(save(experts.rank(), folder, 7));
        },
        "saved");
    for (const auto &[to, to_meshes] : rank_and_mesh_counts)
      run_named(
          to,
          [&, meshes = to_meshes, ranks = to](uint32_t r, fsdp_context *context) {
            NamedExperts experts(context, ranks, meshes, r);
            FSDP(load(experts.rank(), folder));
            FSDP(fsdp_publish_weights(experts.rank().model, stream()));
            experts.require_values();
          },
          folder + " on " + std::to_string(to) + " ranks");
  }
}

// Hugging Face's files have all experts of all layers, and a rank takes those that it declares.
TEST_F(MeshCheckpoint, TakesExpertsFromFilesOfHuggingFace) {
  std::vector<Given> first, second;
  for (uint32_t e = 0; e < expert_count; ++e)
    (e % 2 ? first : second)
        .push_back({"model." + expert_name(e), "F32", {6, 4}, bytes_of(NamedExperts::values_of(e))});
  second.push_back({"model.dense.w", "F32", {10, 4}, bytes_of(std::vector<float>(40, 2.5f))});
  write_file(path + "/model-00001-of-00002.safetensors", first);
  write_file(path + "/model-00002-of-00002.safetensors", second);
  for (const auto &[to, to_meshes] : rank_and_mesh_counts)
    run_named(
        to,
        [&, meshes = to_meshes, ranks = to](uint32_t r, fsdp_context *context) {
          NamedExperts experts(context, ranks, meshes, r);
          const fsdp_rename rename{"model.*", "*", 0, 0, 0, 0, 0};
          fsdp_loaded loaded = FSDP_LOADED_INIT;
          FSDP(fsdp_load_weights(experts.rank().model, path.c_str(), &rename, 1, sizeof rename, nullptr, &loaded));
          FSDP(fsdp_publish_weights(experts.rank().model, stream()));
          experts.require_values();
          REQUIRE(experts.rank().read(0, 0) == std::vector<float>(40, 2.5f));
          REQUIRE(loaded.loaded_tensors == expert_count + 1);
        },
        std::to_string(to) + " ranks");
}

// A rank whose experts are all new counts steps as the others do.
TEST_F(MeshCheckpoint, StepsOfRanksWithNewExpertsAreThoseOfTheOthers) {
  run_named(
      2,
      [&](uint32_t r, fsdp_context *context) {
        NamedExperts experts(context, 2, 2, r, 2, false);
        experts.load_initial();
        for (uint32_t step = 0; step < 3; ++step) clean_step(experts.rank(), step);
        FSDP(save(experts.rank(), path));
      },
      "saved");
  run_named(
      3,
      [&](uint32_t r, fsdp_context *context) {
        NamedExperts experts(context, 3, 3, r, 3, false);
        experts.load_initial();
        FSDP(fsdp_begin_update(experts.rank().model, stream()));
        FSDP(load(experts.rank(), path, FSDP_LOAD_ALLOW_MISSING));
        FSDP(fsdp_publish_weights(experts.rank().model, stream()));
        clean_step(experts.rank(), 3);
        FSDP(save(experts.rank(), path));
      },
      "loaded");
  EXPECT_EQ(names().back(), "step-0000000004");
}

// Each rank saves a model of its own under one name, after 2 and 3 steps. One model cannot load both numbers.
TEST_F(MeshCheckpoint, DifferentStepNumbersAreRefused) {
  run_named(
      2,
      [&](uint32_t r, fsdp_context *context) {
        Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
        const uint32_t own[] = {r};
        setup.mesh.ranks = own, setup.mesh.rank_count = 1, setup.mesh.shard_size = 1;
        setup.groups = {{"experts", {{expert_name(r), {6, 4}}}}};
        Rank rank(context, setup);
        rank.load();
        for (uint32_t step = 0; step < 2 + r; ++step) clean_step(rank, step);
        fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
        options.step = 9;
        fsdp_checkpoint *checkpoint = nullptr;
        FSDP(fsdp_begin_checkpoint(context, path.c_str(), &options, &checkpoint));
        FSDP(fsdp_add_checkpoint_model(checkpoint, nullptr, rank.model));
        FSDP(fsdp_commit_checkpoint(checkpoint));
        FSDP(fsdp_wait_checkpoint(checkpoint));
        fsdp_destroy_checkpoint(checkpoint);
      },
      "saved");
  run_named(
      2,
      [&](uint32_t r, fsdp_context *context) {
        NamedExperts experts(context, 2, 2, r, 2, false);
        REQUIRE(load(experts.rank(), path) == FSDP_INVALID_ARGUMENT);
        const std::string text = last_message();
        REQUIRE(text.find("has 2 optimizer steps for the parameters of rank 0 and 3 for those of rank 1") !=
                text.npos);
      },
      "refused");
}

}  // namespace
