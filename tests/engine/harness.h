// SPDX-License-Identifier: Apache-2.0
// Drives the C ABI as a training framework would, with ranks as threads or as processes. The gradients of its made-up
// models depend on the weights that are read. The reference does not use the library.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp.h"
#include "quantized.h"

namespace harness {

struct Failure : std::runtime_error {
  Failure(fsdp_status status, const std::string &call, const std::string &message, int32_t rank)
      : std::runtime_error(call + ": " + fsdp_get_status_name(status) + ": " + message),
        status(status),
        message(message),
        rank(rank) {}
  fsdp_status status;
  std::string message;
  int32_t rank;
};

// Throws Failure with the library's message.
void check(fsdp_status status, const char *call);
#define FSDP(call) harness::check((call), #call)
std::string last_message();
// Throws if the condition is false, with the last failing call's message, which is often the reason.
void require(bool holds, const char *condition);
#define REQUIRE(condition) harness::require((condition), #condition)
// Throws unless the call that returned `status` failed as expected, with all of the words in its message.
void require_error(fsdp_status status, fsdp_status expected, const std::vector<std::string> &words);

// Whether the library of this process is AddressSanitizer's or ThreadSanitizer's: a program of the plain build may run
// over either's.
bool is_sanitized();
bool is_thread_sanitized();
// Puts the function that has it on the stack that ThreadSanitizer reports and tests/tsan.supp is compared with: a
// program that is not built with it has only the library on that stack. That function must not be inlined.
class SanitizerFrame {
 public:
  [[gnu::noinline]] SanitizerFrame();
  ~SanitizerFrame();
  SanitizerFrame(const SanitizerFrame &) = delete;
  SanitizerFrame &operator=(const SanitizerFrame &) = delete;
};

// A sample of a matrix whose every entry other builds run. Sanitizers look for other faults than wrong bits, so each
// nth entry is enough for them. ThreadSanitizer takes ten times as long and sees the same threads in most entries, so
// it runs half of those. Lengths of the loops that share no factor with n and 2 n + 1 let each of their values come up.
class Sample {
 public:
  explicit Sample(unsigned n, unsigned first = 0)
      : n_(is_thread_sanitized() ? 2 * n + 1
           : is_sanitized()      ? n
                                 : 1),
        next_(first) {}
  bool takes_next() { return next_++ % n_ == 0; }

 private:
  unsigned n_, next_;
};

double now();  // seconds, the same clock in all processes
void pause_ms(int ms);

struct ParamDef {
  std::string name;
  std::vector<uint64_t> shape;
  fsdp_dtype dtype = FSDP_FLOAT32;
  uint32_t flags = 0;
  fsdp_granule granule = 0;
  uint64_t granule_rows = 0;
  double lr_scale = 0;
  std::vector<uint64_t> global_shape = {}, global_offset = {};  // empty: it is no box of a larger tensor
  fsdp_quantization quantization = 0;
  fsdp_missing_grad missing_grad = 0;
  uint32_t row_dimensions = 0;
  uint32_t piece = 0;
  // FSDP_OPTIMIZER_CALLER: update() updates it, by SGD with momentum. The model then has the state "momentum".
  fsdp_optimizer optimizer = 0;
  fsdp_matrix_layout matrix = 0;
  std::vector<uint64_t> splits = {};  // of its matrices; empty: one

  bool by_caller() const { return optimizer == FSDP_OPTIMIZER_CALLER; }
  uint64_t count() const {
    uint64_t product = 1;
    for (const uint64_t size : shape) product *= size;
    return product;
  }
};

inline ParamDef quantized(ParamDef param, fsdp_quantization quantization) {
  param.quantization = quantization;
  return param;
}

struct GroupDef {
  std::string name;
  std::vector<ParamDef> params;
  fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
  // Above 1: rank r has the group in mesh number r % meshes, as experts are divided, and adds this number to the names
  // of its parameters.
  uint32_t meshes = 1;

  uint32_t pieces() const { return params.empty() ? 1 : params.back().piece + 1; }
};

inline constexpr fsdp_strategy strategies[] = {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS,
                                               FSDP_STRATEGY_OPTIM_GRADS_PARAMS};

class Rank;

// A world, a model, and how it is trained.
struct Scenario {
  // Groups that are too small for it are prefetched, too: in debug mode with delays, here the shortest.
  void prefetch_small_groups() { context.debug_delay_us = 1; }
  void set_dtype(fsdp_dtype dtype);  // of every parameter
  uint32_t ordinal(size_t group, size_t param) const;

  uint32_t ranks = 2;
  fsdp_context_options context = FSDP_CONTEXT_OPTIONS_INIT;
  fsdp_model_options model = FSDP_MODEL_OPTIONS_INIT;
  fsdp_mesh_options mesh = FSDP_MESH_OPTIONS_INIT;  // all zero: no mesh is made
  fsdp_schedule_kind schedule = FSDP_SCHEDULE_SEQUENTIAL;
  std::vector<fsdp_visit> visits;
  uint32_t held_groups = 0;  // with FSDP_SCHEDULE_ANY
  std::vector<GroupDef> groups;
  uint32_t steps = 2;
  uint32_t microbatches = 1;
  bool recompute = false;
  bool eval = false;       // a forward pass between steps
  bool put = false;        // hand gradients in with fsdp_put_grad
  bool by_piece = false;   // gather the pieces of a group one by one, in BACKWARD from the last one on
  bool complete = false;   // and complete each, from a group's last parameter on
  bool ends_late = false;  // contributions end only in fsdp_finish_grads
  double clip = 0;
  double scale = 1;
  double weight_decay = 0.01;
  bool flush_to_zero = false;  // the caller's threads run with FTZ and DAZ
  // Called in each visit of a group when its weights have been read, and again when the hold was returned.
  std::function<void(const Rank &, size_t group, fsdp_phase phase, bool held)> visited = {};
};

// A few groups whose sizes divide by nothing.
std::vector<GroupDef> odd_groups();
// Groups of one shape.
std::vector<GroupDef> equal_groups(uint32_t count, uint64_t rows, uint64_t columns);
inline constexpr uint64_t group_bytes = 64 * 32 * sizeof(float);  // of a group of equal_groups(count, 64, 32)
// The odd groups, with a timeout below that of the tests.
Scenario scenario_of(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED);
Scenario debug_scenario(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode = 0);

// What the plan says about a rank, by role ([FSDP_ROLE_ALL] is the sum), and about the model.
constexpr int last_role = FSDP_ROLE_HOME;
struct Memory : fsdp_model_info {
  Memory() : fsdp_model_info(FSDP_MODEL_INFO_INIT) {}
  std::array<uint64_t, last_role + 1> role_bytes{};
};
Memory memory_of(fsdp_model *model, uint32_t rank);

// Counters, and what was allocated.
struct Stats : fsdp_stats {
  Stats() : fsdp_stats(FSDP_STATS_INIT) {}
  std::array<uint64_t, last_role + 1> allocated_bytes{};
};

// Compute weights that a rank has read while it held them.
struct View {
  uint32_t version, ordinal;
  fsdp_phase phase;
  uint64_t hash;  // of the values as fp32
};

struct Outcome {
  std::vector<std::vector<float>> weights;  // one a parameter, in declaration order
  std::vector<std::vector<float>>
      grads;  // whole main grads of the last step, read from the shards (zero where not owned)
  std::vector<std::vector<uint8_t>> owned;  // 1 where this rank owns the element
  std::vector<double> norms;                // one a step
  Stats stats;
  Memory memory;
  std::vector<uint64_t> addresses;  // of every parameter seen in every visit, in order
  uint32_t version = 0;             // that was published last
  std::vector<View> views;          // in every visit, in order
  // The reference has hashes for each version and parameter: of what BACKWARD reads, and of what the other phases read.
  std::vector<std::vector<uint64_t>> versions, backward_versions;
  std::string error;
};

inline float *main_weight(const fsdp_shard &shard) { return static_cast<float *>(shard.main_weight); }
inline float *main_grad(const fsdp_shard &shard) { return static_cast<float *>(shard.main_grad); }

// One rank's handles.
class Rank {
 public:
  Rank(fsdp_context *context, const Scenario &setup, bool seal = true);
  ~Rank();
  Rank(const Rank &) = delete;
  Rank &operator=(const Rank &) = delete;
  void load();  // deterministic weights, and publish
  const GroupDef &def(size_t group) const { return setup.groups[group]; }
  std::vector<float> read(size_t group, size_t param) const;
  std::vector<std::vector<float>> read_all() const;  // in declaration order
  std::vector<fsdp_shard> shards() const;
  Stats stats() const;
  // The compute weights as floats; of a quantized parameter what its planes stand for.
  std::vector<float> view(size_t group, size_t param, fsdp_phase phase, uint64_t *address = nullptr) const;
  // The planes of a quantized parameter as they are stored. MXFP8 has planes for each phase.
  Blocks planes(size_t group, size_t param, fsdp_phase phase, uint64_t *address = nullptr) const;

  const Scenario &setup;
  fsdp_context *context;
  fsdp_model *model = nullptr;
  std::vector<fsdp_group *> groups;
  uint32_t rank = 0;

 private:
  void declare(bool seal);
  fsdp_mesh *mesh_of(const GroupDef &def) const;
};

// The gradient of one element, as this rank's data of a micro-batch gives it.
float gradient(uint32_t rank, uint32_t step, uint32_t microbatch, uint32_t param, uint64_t element, float weight);
float initial_weight(uint32_t param, uint64_t element);

// Visits of all groups, forward and back, each of one piece.
std::vector<fsdp_visit> visits_of_pieces(const std::vector<GroupDef> &groups);
void forward(Rank &rank, Outcome *outcome);
void backward(Rank &rank, uint32_t step, uint32_t microbatch, Outcome *outcome);
void backward_group(Rank &rank, size_t group, uint32_t step, uint32_t microbatch, Outcome *outcome);
void train(Rank &rank, Outcome &outcome);
// The parts of a step without a record of it: up to the open window, the update as train() does it, both.
void finish_step(Rank &rank, uint32_t step);
void update(Rank &rank);
void update_own(Rank &rank);           // the part of update() that is the caller's
void update_chunks(const Rank &rank);  // the part of update_own() that is at home in a file
void clean_step(Rank &rank, uint32_t step);
// Gives every parameter of the group a gradient of one value.
void put_all(Rank &rank, size_t group, float value);
// Does the same for every group, and reduces the gradients. fsdp_finish_grads ends that step.
void reduce_all(Rank &rank, float value);
// A mesh of one axis.
fsdp_mesh *make_mesh(fsdp_context *context, const std::vector<uint32_t> &ranks);

// This process as a rank of a world of processes.
fsdp_context *join(const Scenario &setup, uint32_t rank, const std::string &rendezvous);
// Runs `body` as every rank of a new world, one thread each. Exceptions become the outcome's error.
void run_threads(const Scenario &setup, const std::function<void(uint32_t, fsdp_context *)> &body,
                 std::vector<std::string> *errors = nullptr);
std::vector<Outcome> train_threads(const Scenario &setup);
std::vector<Outcome> train_processes(const Scenario &setup);

// The same training by one process without the library, in fp32 with the documented operations in the documented order.
// Throws if its AdamW is not that of fp64, but for rounding.
Outcome reference(const Scenario &setup);
// Describes where the results of a job differ from the reference: each rank's weights, main grads and norms, and the
// weights read in every visit. Empty if nothing differs. The norms are added in another order, and compared to 12
// digits.
std::string difference(const Scenario &setup, const std::vector<Outcome> &outcomes, const Outcome &expected);
std::string difference(const Scenario &setup, const std::vector<Outcome> &outcomes);
// The same of the views alone, where sums may be added in any order. The first version is what was loaded, the last one
// what was read at the end, and each other one the same on every rank and in every visit.
std::string view_difference(const Scenario &setup, const std::vector<Outcome> &outcomes);
uint64_t hash_of(const std::vector<float> &values);

bool same_bits(const std::vector<std::vector<float>> &a, const std::vector<std::vector<float>> &b);
double relative_l2(const std::vector<float> &a, const std::vector<float> &b);

}  // namespace harness
