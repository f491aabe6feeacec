// SPDX-License-Identifier: Apache-2.0
// fsdp-plan: how many bytes a job of any number of ranks will hold, computed without starting it.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>

#include "cli.h"
#include "plan/estimate.h"
#include "plan/job_spec.h"
#include "plan/names.h"

namespace {

struct Request {
  std::string model_file;
  plan::TransformerShape shape;
  plan::Policy policy;
  double disk_gbs = 0;  // 0: not given
  bool json = false;
};

constexpr const char *footer = R"(
A model file lists groups in the order of the forward pass; "{}" in names counts the repeats:
  {"groups": [
    {"name": "embedding", "params": [{"name": "embedding", "shape": [50257, 768]}]},
    {"name": "layer.{}", "repeat": 12, "params": [{"name": "layer.{}.qkv", "shape": [2304, 768]}]}]}
Groups may have: strategy, grad_dtype, reduce_dtype, main_storage (as --main), backward_weights (gathered or none),
resident, meshes, replicate. With "meshes": 4, rank r shares the group with the ranks r % 4, r % 4 + 4, ... (experts);
"replicate" is the number of replicas in each of these meshes. Shapes are those of one rank's experts, and the table
shows a rank of the first mesh.
Parameters may have: dtype, frozen, no_decay, granule, granule_rows, row_dimensions, quantization, piece, optimizer
(adamw or caller), matrix (true: its last two dimensions come whole to one rank), matrix_splits (rows of each matrix).

Example: fsdp-plan --layers 32 --width 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --gated --ranks 64
)";

template <class Value>
CLI::Option *add_choice(CLI::App &app, const char *name, Value &value, const plan::Names &names, const char *text) {
  return app.add_option(name, value, text)->transform(CLI::CheckedTransformer(names, CLI::ignore_case));
}

void add_model_options(CLI::App &app, Request &request) {
  auto *file = app.add_option("--model", request.model_file, "read the groups from a JSON file instead")
                   ->check(CLI::ExistingFile)
                   ->group("Model");
  auto &shape = request.shape;
  const auto add = [&](const char *name, uint64_t &value, const char *text, uint64_t least = 1) {
    app.add_option(name, value, text)->check(CLI::Range(least, uint64_t{1} << 32))->excludes(file)->group("Model");
  };
  add("--layers", shape.layers, "transformer layers (12)", 0);
  add("--width", shape.width, "model width (768)");
  add("--heads", shape.heads, "attention heads (12)");
  add("--kv-heads", shape.kv_heads, "key and value heads (as --heads)");
  add("--ffn", shape.ffn, "width of the feed-forward layer (4 x width)");
  add("--vocab", shape.vocab, "vocabulary (50257)");
  add_choice(app, "--quantize", shape.quantization, plan::quantizations,
             "what the matrices of layers are stored as (none)")
      ->excludes(file)
      ->group("Model");
  app.add_flag("--gated", shape.gated, "gate and up projection, as SwiGLU")->excludes(file)->group("Model");
  app.add_flag("--tied", shape.tied, "the head shares the embedding's weights")->excludes(file)->group("Model");
}

void add_matrix_options(CLI::App &app, Request &request) {
  app.add_flag("--muon", request.shape.muon,
               "the matrices of layers come whole to one rank each, with a momentum of 4 bytes; AdamW has the rest")
      ->group("Model");
  app.add_option("--matrix-bytes", request.policy.matrix_bytes,
                 "limit of the matrices that a rank gets at once, in fp32 (64 MiB, or the largest matrix)")
      ->transform(CLI::AsSizeValue(false));
}

void add_home_options(CLI::App &app, Request &request) {
  plan::Policy &policy = request.policy;
  add_choice(app, "--state-home", policy.state_home, plan::homes, "where optimizer states are kept (memory)")
      ->group("Larger than memory");
  add_choice(app, "--main-home", policy.main_home, plan::homes, "where main weights are kept (memory)")
      ->group("Larger than memory");
  add_choice(app, "--grad-home", policy.grad_home, plan::homes, "where main gradients are kept (memory)")
      ->group("Larger than memory");
  app.add_option("--turn-bytes", policy.turn_bytes, "bytes of the file that come to memory at once (64 MiB)")
      ->transform(CLI::AsSizeValue(false))
      ->group("Larger than memory");
  app.add_option("--turns", policy.turns, "buffers of that size (3)")
      ->check(CLI::Range(2, 16))
      ->group("Larger than memory");
  app.add_option("--disk-gbs", request.disk_gbs,
                 "GB/s that the disk of a host moves, reads and writes together: tells the time of an update")
      ->check(CLI::PositiveNumber)
      ->group("Larger than memory");
}

void add_policy_options(CLI::App &app, plan::Policy &policy) {
  app.add_option("--ranks", policy.ranks, "ranks of the job (8)")->check(CLI::Range(1, 16384));
  app.add_option("--replicate", policy.replicate, "replicas of the sharded model (1)")->check(CLI::Range(1, 1 << 24));
  add_choice(app, "--outer", policy.outer, plan::outer_strategies, "what replicas shard among them (no_shard)");
  app.add_option("--ranks-per-host", policy.ranks_per_host, "a shard axis may lie on several hosts (all on one)")
      ->check(CLI::Range(1, 1 << 24));
  add_choice(app, "--strategy", policy.strategy, plan::strategies, "what is sharded (optim_grads_params)");
  add_choice(app, "--compute-dtype", policy.compute_dtype, plan::dtypes, "of the weights the math reads (bf16)");
  add_choice(app, "--grad-dtype", policy.grad_dtype, plan::dtypes, "of full gradients (the compute dtype)");
  add_choice(app, "--reduce-dtype", policy.reduce_dtype, plan::dtypes,
             "gradients are rounded to it first (grad dtype)");
  add_choice(app, "--unshard", policy.unshard_mode, plan::unshard_modes, "how weights become whole (mapped)");
  add_choice(app, "--reduce", policy.reduce_policy, plan::reduce_policies, "reduce each micro-batch or the last");
  add_choice(app, "--optimizer", policy.optimizer, plan::optimizers, "whose state is counted (adamw)");
  add_choice(app, "--main", policy.main_storage, plan::main_storages,
             "what main weights of bf16 weights are in (fp32)");
  add_choice(app, "--states", policy.states, plan::states, "what AdamW's moments are in (fp32)");
  auto *schedule = add_choice(app, "--schedule", policy.schedule, plan::schedules, "order of the passes (sequential)");
  app.add_flag("--by-piece", policy.by_piece,
               "gather pieces of groups one by one; without --model a layer has two, attention and feed-forward")
      ->excludes(schedule);
  app.add_option("--held-groups", policy.held_groups, "groups of copied weights held at once, of --schedule any (4)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--save-staging", policy.save_staging, "memory for checkpoints on their way to the disk (none)")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--prefetch", policy.prefetch, "groups gathered ahead (1)")->check(CLI::Range(0, 1 << 20));
  app.add_option("--max-pending", policy.max_pending_groups, "full gradient buffers alive at once (2)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--max-pending-bytes", policy.max_pending_bytes, "memory for them, by parts of groups (no limit)")
      ->transform(CLI::AsSizeValue(false));
}

struct Role {
  fsdp_role role;
  const char *name, *text;
};
constexpr Role roles[] = {
    {FSDP_ROLE_COMPUTE, "compute", "compute weights"},
    {FSDP_ROLE_MAIN, "main", "main weights"},
    {FSDP_ROLE_GRAD, "grad", "main gradients"},
    {FSDP_ROLE_OPTIMIZER, "optimizer", "optimizer state"},
    {FSDP_ROLE_GATHER, "gather", "gather buffers"},
    {FSDP_ROLE_REDUCE, "reduce", "gradient buffers"},
    {FSDP_ROLE_STAGING, "staging", "control and exchange"},
    {FSDP_ROLE_MATRIX, "matrix", "whole matrices"},
    {FSDP_ROLE_HOME, "home", "at home in a file"},
};

std::string format_bytes(uint64_t bytes) {
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  const char *units[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  double value = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  for (; value >= 1000 && unit < 5; ++unit) value /= 1000;
  return fmt::format("{:.3g} {}", value, units[unit]);
}

// Buffers that only a sharded run needs have no share.
std::string format_share(uint64_t mine, uint64_t whole) {
  const double percent = 100 * static_cast<double>(mine) / static_cast<double>(whole);
  return whole == 0 || percent > 1000 ? "-" : fmt::format("{:.4g} %", percent);
}

void print_row(const char *text, uint64_t mine, uint64_t whole) {
  fmt::print("  {:<24}{:>12}{:>16}{:>12}{:>22}\n", text, format_bytes(mine), format_bytes(whole),
             format_share(mine, whole), mine);
}

// The roles whose memory grows with the parameters. Their bytes per element include padding.
constexpr fsdp_role kept_roles[] = {FSDP_ROLE_COMPUTE, FSDP_ROLE_MAIN, FSDP_ROLE_GRAD, FSDP_ROLE_OPTIMIZER,
                                    FSDP_ROLE_HOME};

double bytes_of_element(const plan::Memory &memory, uint64_t element_count) {
  uint64_t bytes = 0;
  for (const auto role : kept_roles) bytes += memory.role_bytes[role];
  return element_count == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(element_count);
}

void print_element(const plan::Estimate &estimate) {
  const auto count = estimate.info.element_count;
  fmt::print("  an element of the model: {:.4g} bytes of weights, gradients and states; on this rank {:.4g}\n",
             bytes_of_element(estimate.all_shards, count), bytes_of_element(estimate.largest, count));
}

// Prints the owners, in each row as many as fit. The list of a large job is cut; --json has all owners.
void print_matrices(const plan::Matrices &matrices) {
  constexpr size_t shown = 16, in_a_row = 4;
  fmt::print("  matrices: {} in {} waves of at most {} a rank; {} travel each way; load {:.3f} of the mean\n",
             matrices.count, matrices.waves, format_bytes(matrices.limit_bytes), format_bytes(matrices.wire_bytes),
             matrices.load);
  for (size_t i = 0; i < std::min(matrices.owners.size(), shown); ++i) {
    const plan::MatrixOwner &owner = matrices.owners[i];
    fmt::print("{}rank {}: {} ({:.2f}){}", i % in_a_row ? "  " : "    ", owner.rank, owner.matrices, owner.load,
               (i + 1) % in_a_row == 0 || i + 1 == std::min(matrices.owners.size(), shown) ? "\n" : "");
  }
  if (matrices.owners.size() > shown) fmt::print("    ... and {} more owners\n", matrices.owners.size() - shown);
}

// The seconds that the disk of a host needs for the file's part of a step. Each byte of the file is read and written
// once, and the ranks of a host share its disk. The first chunk of a step is read, and the last one written, beside
// nothing else.
double disk_seconds(const Request &request, const plan::Estimate &estimate) {
  const auto bytes = static_cast<double>(estimate.largest.role_bytes[FSDP_ROLE_HOME]) * request.policy.host_ranks();
  return 2 * bytes / (request.disk_gbs * 1e9);
}

void print_home(const Request &request, const plan::Estimate &estimate) {
  const uint64_t bytes = estimate.largest.role_bytes[FSDP_ROLE_HOME];
  fmt::print("  of the total {} are in memory, and {} in a file, which a step reads and writes once\n",
             format_bytes(estimate.largest.in_memory()), format_bytes(bytes));
  if (request.policy.grad_home == FSDP_HOME_FILE)
    fmt::print("  a norm of gradients reads them once more, and each further micro-batch reads and writes them\n");
  if (request.disk_gbs > 0)
    fmt::print(
        "  at {:g} GB/s for the {} ranks of a host the disk takes {:.3g} s of each step; it bounds the update unless "
        "AdamW takes longer\n",
        request.disk_gbs, request.policy.host_ranks(), disk_seconds(request, estimate));
}

void print_by_parts(const plan::Estimate &estimate) {
  const auto &[limit, total] = estimate.by_parts;
  fmt::print(
      "  with --max-pending-bytes {} the total would be {} ({} of one unsharded rank), if the program acquires or\n"
      "    puts gradients one by one and calls fsdp_complete_grad for each\n",
      limit, format_bytes(total), format_share(total, estimate.unsharded.total()));
}

void print_table(const plan::ModelSpec &model, const Request &request, const plan::Estimate &estimate) {
  const auto &memory = estimate.largest;
  const auto &policy = request.policy;
  fmt::print("{}: {} groups, {} parameter tensors, {} parameters\n", model.name, estimate.groups, estimate.params,
             estimate.info.element_count);
  fmt::print("{} ranks (replicate {} x shard {}), {}, {} weights, main {}, states {}, unshard {}, prefetch {}\n\n",
             policy.ranks, policy.replicate, policy.ranks / policy.replicate,
             plan::name_of(plan::strategies, policy.strategy), plan::name_of(plan::dtypes, policy.compute_dtype),
             plan::name_of(plan::main_storages, policy.main_storage), plan::name_of(plan::states, policy.states),
             plan::name_of(plan::unshard_modes, policy.unshard_mode), policy.prefetch);
  fmt::print("  {:<24}{:>12}{:>16}{:>12}{:>22}\n", "role", "per rank", "one unsharded", "share", "bytes per rank");
  for (const auto &role : roles)
    print_row(role.text, memory.role_bytes[role.role], estimate.unsharded.role_bytes[role.role]);
  print_row("total", memory.total(), estimate.unsharded.total());
  fmt::print("\n  padding: {} elements, {:.4f} % of the parameters\n", estimate.info.padding_count,
             estimate.info.element_count == 0 ? 0.0
                                              : 100 * static_cast<double>(estimate.info.padding_count) /
                                                    static_cast<double>(estimate.info.element_count));
  if (estimate.pieces.count)
    fmt::print("  pieces: {}; {} has the most padding, {:.4f} % of its elements\n", estimate.pieces.count,
               estimate.pieces.worst_name, 100 * estimate.pieces.worst_padding);
  print_element(estimate);
  if (estimate.matrices.count) print_matrices(estimate.matrices);
  if (request.policy.has_file()) print_home(request, estimate);
  if (estimate.by_parts.limit_bytes) print_by_parts(estimate);
  for (const auto &[name, bytes] : estimate.planes)
    fmt::print("  plane {:<14} {:>12} of all ranks\n", name, format_bytes(bytes));
  if (estimate.smallest_total != memory.total())
    fmt::print("  ranks differ: shown is shard {}, the largest; the smallest holds {}\n", estimate.largest_rank,
               format_bytes(estimate.smallest_total));
}

nlohmann::ordered_json memory_to_json(const plan::Memory &memory) {
  nlohmann::ordered_json json;
  for (const auto &role : roles) json[role.name] = memory.role_bytes[role.role];
  json["total"] = memory.total();
  return json;
}

void print_json(const Request &request, const plan::Estimate &estimate) {
  nlohmann::ordered_json json{
      {"ranks", request.policy.ranks},
      {"replicate", request.policy.replicate},
      {"strategy", plan::name_of(plan::strategies, request.policy.strategy)},
      {"main", plan::name_of(plan::main_storages, request.policy.main_storage)},
      {"states", plan::name_of(plan::states, request.policy.states)},
      {"groups", estimate.groups},
      {"parameter_tensors", estimate.params},
      {"parameter_count", estimate.info.element_count},
      {"padding_count", estimate.info.padding_count},
      {"rank_bytes", memory_to_json(estimate.largest)},
      {"rank", estimate.largest_rank},
      {"smallest_rank_total", estimate.smallest_total},
      {"gather_lower_bound_bytes", estimate.info.gather_lower_bound_bytes},
      {"reduce_lower_bound_bytes", estimate.info.reduce_lower_bound_bytes},
      {"unsharded_bytes", memory_to_json(estimate.unsharded)},
      {"element_bytes", bytes_of_element(estimate.all_shards, estimate.info.element_count)},
      {"rank_element_bytes", bytes_of_element(estimate.largest, estimate.info.element_count)},
  };
  for (const auto &[name, bytes] : estimate.planes) json["plane_bytes"][name] = bytes;
  if (estimate.pieces.count)
    json["pieces"] = {{"count", estimate.pieces.count},
                      {"worst_padding", estimate.pieces.worst_padding},
                      {"worst_name", estimate.pieces.worst_name}};
  if (estimate.matrices.count) {
    json["matrices"] = {{"count", estimate.matrices.count},
                        {"waves", estimate.matrices.waves},
                        {"limit_bytes", estimate.matrices.limit_bytes},
                        {"wire_bytes", estimate.matrices.wire_bytes},
                        {"load_max_over_mean", estimate.matrices.load}};
    for (const plan::MatrixOwner &owner : estimate.matrices.owners)
      json["matrices"]["owners"].push_back({{"rank", owner.rank}, {"matrices", owner.matrices}, {"load", owner.load}});
  }
  if (estimate.by_parts.limit_bytes)
    json["by_parts"] = {{"max_pending_bytes", estimate.by_parts.limit_bytes}, {"rank_total", estimate.by_parts.total}};
  if (request.policy.has_file()) {
    json["state_home"] = plan::name_of(plan::homes, request.policy.state_home);
    json["main_home"] = plan::name_of(plan::homes, request.policy.main_home);
    json["grad_home"] = plan::name_of(plan::homes, request.policy.grad_home);
    if (request.disk_gbs > 0) json["disk_seconds"] = disk_seconds(request, estimate);
  }
  fmt::print("{}\n", json.dump(2));
}

int parse_and_print(int argc, char **argv) {
  Request request;
  CLI::App app{"Compute what every rank of a job will hold, without starting it. Defaults in parentheses.",
               "fsdp-plan"};
  app.set_version_flag("--version", std::string(fsdp_get_version()));
  add_model_options(app, request);
  add_policy_options(app, request.policy);
  add_matrix_options(app, request);
  add_home_options(app, request);
  app.add_flag("--json", request.json, "print one JSON object instead of the table");
  app.footer(footer);
  if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;

  if (request.policy.ranks % request.policy.replicate != 0)
    throw std::invalid_argument(
        fmt::format("--ranks {} is not a multiple of --replicate {}", request.policy.ranks, request.policy.replicate));
  if (request.policy.main_storage != FSDP_MAIN_FLOAT32 && request.policy.compute_dtype == FSDP_FLOAT32)
    throw CLI::ValidationError("--main",
                               "split16 and none are for --compute-dtype bf16: fp32 weights are their own "
                               "main weights");
  if (request.policy.states != FSDP_OPTIMIZER_ADAMW && request.policy.optimizer != FSDP_OPTIMIZER_ADAMW)
    throw std::invalid_argument("--states is of --optimizer adamw");
  if (request.disk_gbs > 0 && !request.policy.has_file())
    throw std::invalid_argument("--disk-gbs needs --state-home file, --main-home file or --grad-home file");
  request.shape.by_piece = request.policy.by_piece;
  const auto model =
      request.model_file.empty() ? plan::build_transformer(request.shape) : plan::read_model_file(request.model_file);
  const auto estimate = plan::estimate(model, request.policy);
  if (request.json)
    print_json(request, estimate);
  else
    print_table(model, request, estimate);
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    return parse_and_print(argc, argv);
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-plan: {}\n", error.what());
    return 1;
  }
}
