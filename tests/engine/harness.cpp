// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <sys/wait.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

namespace harness {
namespace {

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// In [-1, 1), a multiple of 2^-16: exact in every arithmetic used here.
float noise(uint64_t key) { return static_cast<float>(static_cast<int32_t>(mix(key) >> 47) - 65536) / 65536.0f; }

float half_to_float(uint16_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                        : std::ldexp(static_cast<float>(mantissa | 1024), static_cast<int>(exponent) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

float load_element(const void *data, fsdp_dtype dtype, uint64_t i) {
  if (dtype == FSDP_FLOAT32) return static_cast<const float *>(data)[i];
  const uint16_t bits = static_cast<const uint16_t *>(data)[i];
  if (dtype == FSDP_BFLOAT16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  return half_to_float(bits);
}

uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void store_element(void *data, fsdp_dtype dtype, uint64_t i, float value) {
  if (dtype == FSDP_FLOAT32) static_cast<float *>(data)[i] = value;
  else if (dtype == FSDP_BFLOAT16) static_cast<uint16_t *>(data)[i] = to_bf16(value);
  else throw std::runtime_error("the harness writes no float16 gradients");
}

void set_flush_to_zero(bool on) {
#if defined(__SSE2__)
  if (on) _mm_setcsr(_mm_getcsr() | 0x8040);
#else
  (void)on;
#endif
}

uint32_t first_param(const Scenario &setup, size_t group) {
  uint32_t first = 0;
  for (size_t g = 0; g < group; ++g) first += static_cast<uint32_t>(setup.groups[g].params.size());
  return first;
}

}  // namespace

void check(fsdp_status status, const char *call) {
  if (status == FSDP_OK) return;
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(nullptr, &error);
  throw Failure(status, call, error.message, error.rank);
}

std::string last_message() {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(nullptr, &error);
  return error.message;
}

float round_to(float value, fsdp_dtype dtype) {
  if (dtype == FSDP_BFLOAT16) return std::bit_cast<float>(static_cast<uint32_t>(to_bf16(value)) << 16);
  return value;
}

std::vector<GroupDef> odd_groups() {
  std::vector<GroupDef> groups;
  groups.push_back({"embed", {{"embed.w", {37, 24}}}});
  groups.push_back({"layer.0", {{"l0.wq", {24, 24}}, {"l0.bias", {24}, FSDP_FLOAT32, FSDP_PARAM_NO_DECAY}, {"l0.w1", {51, 24}}, {"l0.scalar", {}}}});
  groups.push_back({"layer.1", {{"l1.wide", {2, 1000}}, {"l1.tall", {129, 3}}, {"l1.block", {70, 8}, FSDP_FLOAT32, 0, FSDP_GRANULE_BLOCK, 32}}});
  groups.push_back({"head", {{"head.whole", {9, 40}, FSDP_FLOAT32, 0, FSDP_GRANULE_TENSOR}, {"head.norm", {24}, FSDP_FLOAT32, 0, 0, 0, 0.5}}});
  return groups;
}

std::vector<GroupDef> equal_groups(uint32_t count, uint64_t rows, uint64_t columns) {
  std::vector<GroupDef> groups;
  for (uint32_t g = 0; g < count; ++g) {
    const std::string name = "layer." + std::to_string(g);
    groups.push_back({name, {{name + ".w", {rows, columns}}}});
  }
  return groups;
}

float initial_weight(uint32_t param, uint64_t element) { return noise(mix(param * 7919ull + 1) + element); }

float gradient(uint32_t rank, uint32_t step, uint32_t microbatch, uint32_t param, uint64_t element, float weight) {
  const uint64_t key = mix(mix(mix(rank + 1ull) + step * 131ull + microbatch) + param) + element;
  return 0.25f * weight + noise(key);
}

Rank::Rank(fsdp_context *context, const Scenario &setup, bool seal) : setup(setup), context(context) {
  FSDP(fsdp_get_rank(context, &rank));
  FSDP(fsdp_create_model(context, &setup.model, &model));
  try {
    declare(seal);
  } catch (...) {
    fsdp_destroy_model(model);  // there will be no destructor
    throw;
  }
}

void Rank::declare(bool seal) {
  for (const GroupDef &def : setup.groups) {
    std::vector<fsdp_param> params;
    for (const ParamDef &param : def.params) {
      fsdp_param p = FSDP_PARAM_INIT;
      p.name = param.name.c_str();
      p.shape = param.shape.data();
      p.dimension_count = static_cast<uint32_t>(param.shape.size());
      p.dtype = param.dtype;
      p.flags = param.flags;
      p.granule = param.granule;
      p.granule_rows = param.granule_rows;
      p.lr_scale = param.lr_scale;
      params.push_back(p);
    }
    fsdp_group *group = nullptr;
    FSDP(fsdp_create_group(model, def.name.c_str(), params.data(), params.size(), sizeof(fsdp_param), &def.options, &group));
    groups.push_back(group);
  }
  if (setup.schedule != FSDP_SCHEDULE_SEQUENTIAL) {
    fsdp_schedule_options options = FSDP_SCHEDULE_OPTIONS_INIT;
    options.visits = setup.visits.data();
    options.visit_count = setup.visits.size();
    FSDP(fsdp_set_schedule(model, setup.schedule, &options));
  }
  if (seal) FSDP(fsdp_seal_model(model));
}

Rank::~Rank() { fsdp_destroy_model(model); }

void Rank::load() {
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t p = 0; p < def(g).params.size(); ++p) {
      std::vector<float> data(def(g).params[p].count());
      for (uint64_t i = 0; i < data.size(); ++i) data[i] = initial_weight(first_param(setup, g) + static_cast<uint32_t>(p), i);
      FSDP(fsdp_load_param(groups[g], p, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK));
    }
  FSDP(fsdp_publish_weights(model, nullptr));
}

std::vector<float> Rank::read(size_t group, size_t param) const {
  std::vector<float> data(def(group).params[param].count());
  FSDP(fsdp_read_param(groups[group], param, data.data(), FSDP_FLOAT32, data.size()));
  return data;
}

fsdp_stats Rank::stats() const {
  fsdp_stats stats = FSDP_STATS_INIT;
  FSDP(fsdp_get_stats(model, &stats));
  return stats;
}

std::vector<float> Rank::view(size_t group, size_t param, fsdp_phase phase, uint64_t *address) const {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  FSDP(fsdp_get_param(groups[group], param, phase, &tensor));
  if (address) *address = reinterpret_cast<uint64_t>(tensor.data);
  std::vector<float> data(tensor.element_count);
  for (uint64_t i = 0; i < data.size(); ++i) data[i] = load_element(tensor.data, tensor.dtype, i);
  return data;
}

namespace {

void visit_forward(Rank &rank, size_t g, fsdp_phase phase, Outcome *outcome) {
  FSDP(fsdp_unshard(rank.groups[g], phase, nullptr));
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    uint64_t address = 0;
    rank.view(g, p, phase, &address);
    if (outcome) outcome->addresses.push_back(address);
  }
  FSDP(fsdp_reshard(rank.groups[g], phase, nullptr));
}

void give_grad(Rank &rank, size_t g, size_t p, const std::vector<float> &values) {
  const ParamDef &param = rank.def(g).params[p];
  if (rank.setup.put) {
    FSDP(fsdp_put_grad(rank.groups[g], p, values.data(), FSDP_FLOAT32, param.count(), nullptr));
    return;
  }
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[g], p, nullptr, &grad, &accumulate));
  for (uint64_t i = 0; i < values.size(); ++i) {
    const float old = accumulate ? load_element(grad.data, grad.dtype, i) : 0.0f;
    store_element(grad.data, grad.dtype, i, accumulate ? old + values[i] : values[i]);
  }
}

}  // namespace

void forward(Rank &rank, Outcome *outcome) {
  for (size_t g = 0; g < rank.groups.size(); ++g) visit_forward(rank, g, FSDP_FORWARD, outcome);
}

void backward_group(Rank &rank, size_t g, uint32_t step, uint32_t microbatch, Outcome *outcome) {
  const Scenario &setup = rank.setup;
  FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, nullptr));
  if (setup.recompute) visit_forward(rank, g, FSDP_RECOMPUTE, nullptr);
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    if (rank.def(g).params[p].flags & FSDP_PARAM_FROZEN) continue;
    uint64_t address = 0;
    std::vector<float> values = rank.view(g, p, FSDP_BACKWARD, &address);
    if (outcome) outcome->addresses.push_back(address);
    const uint32_t ordinal = first_param(setup, g) + static_cast<uint32_t>(p);
    for (uint64_t i = 0; i < values.size(); ++i) values[i] = gradient(rank.rank, step, microbatch, ordinal, i, values[i]);
    give_grad(rank, g, p, values);
  }
  FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, nullptr));
  FSDP(fsdp_reduce_grad(rank.groups[g], microbatch + 1 == setup.microbatches ? FSDP_LAST : 0, nullptr));
}

void backward(Rank &rank, uint32_t step, uint32_t microbatch, Outcome *outcome) {
  for (size_t g = rank.groups.size(); g-- > 0;) backward_group(rank, g, step, microbatch, outcome);
}

namespace {

void collect_grads(Rank &rank, Outcome &outcome) {
  outcome.grads.clear();
  for (const GroupDef &def : rank.setup.groups)
    for (const ParamDef &param : def.params) outcome.grads.emplace_back(param.count(), 0.0f);
  uint64_t count = 0;
  FSDP(fsdp_get_shard_count(rank.model, &count));
  for (uint64_t s = 0; s < count; ++s) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    FSDP(fsdp_get_shard(rank.model, s, &shard));
    for (size_t g = 0; g < rank.groups.size(); ++g)
      if (rank.groups[g] == shard.group)
        std::copy_n(shard.main_grad, shard.element_count,
                    outcome.grads[first_param(rank.setup, g) + shard.param_index].begin() + static_cast<long>(shard.element_offset));
  }
}

}  // namespace

void train(Rank &rank, Outcome &outcome) {
  const Scenario &setup = rank.setup;
  set_flush_to_zero(setup.flush_to_zero);
  rank.load();
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  adamw.weight_decay = setup.weight_decay;
  for (uint32_t step = 0; step < setup.steps; ++step) {
    for (uint32_t m = 0; m < setup.microbatches; ++m) {
      forward(rank, &outcome);
      backward(rank, step, m, &outcome);
    }
    FSDP(fsdp_finish_grads(rank.model, setup.scale, nullptr));
    double norm = 0;
    if (setup.clip > 0) FSDP(fsdp_clip_grads(rank.model, setup.clip, nullptr, &norm));
    else FSDP(fsdp_get_grad_norm(rank.model, nullptr, &norm));
    outcome.norms.push_back(norm);
    if (step + 1 == setup.steps) collect_grads(rank, outcome);
    FSDP(fsdp_step_adamw(rank.model, 0.01, &adamw, nullptr));
    if (setup.eval)
      for (size_t g = 0; g < rank.groups.size(); ++g) visit_forward(rank, g, FSDP_EVAL, nullptr);
  }
  outcome.stats = rank.stats();
  FSDP(fsdp_get_memory(rank.model, rank.rank, &outcome.memory));
  for (size_t g = 0; g < rank.groups.size(); ++g)
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) outcome.weights.push_back(rank.read(g, p));
}

void run_threads(const Scenario &setup, const std::function<void(uint32_t, fsdp_context *)> &body, std::vector<std::string> *errors) {
  std::vector<fsdp_context *> contexts(setup.ranks);
  FSDP(fsdp_create_local_contexts(setup.ranks, &setup.context, contexts.data()));
  std::vector<std::string> failed(setup.ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < setup.ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r, contexts[r]);
      } catch (const std::exception &error) {
        failed[r] = error.what();
        if (failed[r].empty()) failed[r] = "?";
        if (!errors) fsdp_abort_context(contexts[r], "its test body failed");
      }
    });
  for (auto &thread : threads) thread.join();
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
  if (errors) {
    *errors = failed;
    return;
  }
  // The rank that failed first is not one that only saw the abort.
  for (int pass = 0; pass < 2; ++pass)
    for (uint32_t r = 0; r < setup.ranks; ++r)
      if (!failed[r].empty() && (pass || failed[r].find("its test body failed") == std::string::npos))
        throw std::runtime_error("rank " + std::to_string(r) + ": " + failed[r]);
}

std::vector<Outcome> train_threads(const Scenario &setup) {
  std::vector<Outcome> outcomes(setup.ranks);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    train(rank, outcomes[r]);
    FSDP(fsdp_close_context(context));
  });
  return outcomes;
}

namespace {

void write_all(int fd, const void *data, size_t bytes) {
  for (const char *at = static_cast<const char *>(data); bytes;) {
    const ssize_t n = ::write(fd, at, bytes);
    if (n <= 0) ::_exit(3);
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

bool read_all(int fd, void *data, size_t bytes) {
  for (char *at = static_cast<char *>(data); bytes;) {
    const ssize_t n = ::read(fd, at, bytes);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

[[noreturn]] void child(const Scenario &setup, uint32_t rank, const std::string &rendezvous, int fd) {
  try {
    fsdp_context_options options = setup.context;
    options.world_size = setup.ranks;
    options.rank = rank;
    options.rendezvous = rendezvous.c_str();
    fsdp_context *context = nullptr;
    FSDP(fsdp_create_context(&options, &context));
    Outcome outcome;
    {
      Rank self(context, setup);
      train(self, outcome);
      FSDP(fsdp_close_context(context));
    }
    fsdp_destroy_context(context);
    for (const auto &weights : outcome.weights) write_all(fd, weights.data(), weights.size() * sizeof(float));
    write_all(fd, outcome.norms.data(), outcome.norms.size() * sizeof(double));
    ::_exit(0);
  } catch (const std::exception &error) {
    ::fprintf(stderr, "rank %u: %s\n", rank, error.what());
    ::_exit(1);
  }
}

}  // namespace

std::vector<Outcome> train_processes(const Scenario &setup) {
  static std::atomic<int> counter{0};
  const std::string rendezvous = "test-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    int ends[2];
    if (::pipe(ends)) throw std::runtime_error("pipe failed");
    const pid_t pid = ::fork();
    if (pid == 0) child(setup, r, rendezvous, ends[1]);
    ::close(ends[1]);
    children.push_back(pid);
    pipes.push_back(ends[0]);
  }
  std::vector<Outcome> outcomes(setup.ranks);
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    Outcome &outcome = outcomes[r];
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) outcome.weights.emplace_back(param.count());
    outcome.norms.resize(setup.steps);
    bool complete = true;
    for (auto &weights : outcome.weights) complete = complete && read_all(pipes[r], weights.data(), weights.size() * sizeof(float));
    complete = complete && read_all(pipes[r], outcome.norms.data(), outcome.norms.size() * sizeof(double));
    ::close(pipes[r]);
    int status = 0;
    ::waitpid(children[r], &status, 0);
    if (!complete || status) outcome.error = "rank " + std::to_string(r) + " ended with status " + std::to_string(status);
  }
  for (const Outcome &outcome : outcomes)
    if (!outcome.error.empty()) throw std::runtime_error(outcome.error);
  return outcomes;
}

namespace {

fsdp_dtype first_of(fsdp_dtype a, fsdp_dtype b, fsdp_dtype c) { return a ? a : b ? b : c; }

// What one parameter's training needs, element by element.
struct ReferenceParam {
  const Scenario &setup;
  const GroupDef &group;
  const ParamDef &param;
  uint32_t ordinal;
  std::vector<float> weight, m, v, grad;

  fsdp_dtype grad_dtype() const { return first_of(group.options.grad_dtype, setup.model.grad_dtype, param.dtype); }
  fsdp_dtype wire_dtype() const { return first_of(group.options.reduce_dtype, setup.model.reduce_dtype, grad_dtype()); }
  bool last_only() const {
    const fsdp_strategy strategy = group.options.strategy ? group.options.strategy : setup.model.strategy;
    if (strategy == FSDP_OPTIM) return true;
    if (setup.model.reduce_policy) return setup.model.reduce_policy == FSDP_REDUCE_LAST;
    return strategy == FSDP_NO_SHARD;
  }
  float sum_ranks(const std::vector<float> &values) const {
    float sum = round_to(values[0], wire_dtype());
    for (uint32_t r = 1; r < setup.ranks; ++r) sum += round_to(values[r], wire_dtype());
    const float factor = setup.model.grad_op == FSDP_GRAD_SUM      ? 1.0f
                         : setup.model.grad_op == FSDP_GRAD_FACTOR ? static_cast<float>(setup.model.grad_factor)
                                                                   : static_cast<float>(1.0 / setup.ranks);
    return factor == 1.0f ? sum : sum * factor;
  }
  void differentiate(uint32_t step) {
    for (uint64_t i = 0; i < weight.size(); ++i) {
      const float seen = round_to(weight[i], param.dtype);
      std::vector<float> local(setup.ranks);
      float total = 0;
      for (uint32_t k = 0; k < setup.microbatches; ++k) {
        for (uint32_t r = 0; r < setup.ranks; ++r) {
          const float g = gradient(r, step, k, ordinal, i, seen);
          local[r] = round_to(k && last_only() ? local[r] + g : g, grad_dtype());
        }
        if (last_only()) continue;
        total = k ? total + sum_ranks(local) : sum_ranks(local);
      }
      grad[i] = last_only() ? sum_ranks(local) : total;
      if (static_cast<float>(setup.scale) != 1.0f) grad[i] *= static_cast<float>(setup.scale);
    }
  }
  double squares() const {
    return std::accumulate(grad.begin(), grad.end(), 0.0, [](double sum, float g) { return sum + double(g) * g; });
  }
  // In double from fp32 state: an independent calculation, close but not equal in bits.
  void adamw(uint32_t step, double factor) {
    const double c1 = 1 - std::pow(0.9, step + 1), c2 = 1 - std::pow(0.999, step + 1);
    const double lr = 0.01 * (param.lr_scale != 0 ? param.lr_scale : 1);
    const double decay = param.flags & FSDP_PARAM_NO_DECAY ? 0 : setup.weight_decay;
    for (uint64_t i = 0; i < weight.size(); ++i) {
      const double g = static_cast<float>(grad[i] * static_cast<float>(factor));
      m[i] = static_cast<float>(0.9 * m[i] + 0.1 * g);
      v[i] = static_cast<float>(0.999 * v[i] + 0.001 * g * g);
      weight[i] = static_cast<float>(weight[i] - lr * decay * weight[i] - lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + 1e-8));
    }
  }
};

}  // namespace

Outcome reference(const Scenario &setup) {
  std::vector<ReferenceParam> params;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      ReferenceParam p{setup, group, param, static_cast<uint32_t>(params.size()), {}, {}, {}, {}};
      for (uint64_t i = 0; i < param.count(); ++i) p.weight.push_back(initial_weight(p.ordinal, i));
      p.m.assign(p.weight.size(), 0);
      p.v.assign(p.weight.size(), 0);
      p.grad.assign(p.weight.size(), 0);
      params.push_back(std::move(p));
    }
  Outcome outcome;
  for (uint32_t step = 0; step < setup.steps; ++step) {
    double squares = 0;
    for (auto &p : params)
      if (!(p.param.flags & FSDP_PARAM_FROZEN)) {
        p.differentiate(step);
        squares += p.squares();
      }
    const double norm = std::sqrt(squares);
    outcome.norms.push_back(norm);
    const double factor = setup.clip > 0 && norm > setup.clip ? setup.clip / norm : 1;
    for (auto &p : params)
      if (!(p.param.flags & FSDP_PARAM_FROZEN)) p.adamw(step, factor);
  }
  for (auto &p : params) {
    outcome.weights.push_back(p.weight);
    outcome.grads.push_back(p.grad);
  }
  return outcome;
}

bool same_bits(const std::vector<std::vector<float>> &a, const std::vector<std::vector<float>> &b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].size() != b[i].size() || (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)))) return false;
  return true;
}

double relative_l2(const std::vector<float> &a, const std::vector<float> &b) {
  double difference = 0, total = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    total += double(b[i]) * b[i];
  }
  return std::sqrt(difference / std::max(total, 1e-30));
}

}  // namespace harness
