// SPDX-License-Identifier: Apache-2.0
// A training step of a synthetic model: how much of the communication shows beside the compute. Compute is a timed
// wait, as an accelerator would be to the host, of 1.2 times the communication; the reference is the same waits alone.
#include "perf/step.h"

#include <sys/prctl.h>
#include <sys/resource.h>

#include <cmath>
#include <ctime>

#include "perf/bench.h"

namespace perf {
namespace {

constexpr double compute_factor = 1.2;

void wait_until(double end) {
  const timespec time{static_cast<time_t>(end), static_cast<long>((end - std::floor(end)) * 1e9)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) {
  }
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval &time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void compute(double seconds) {
  if (seconds > 0) wait_until(now() + seconds);
}

// A transformer layer has 12 * width * width weights.
std::vector<GroupShape> shapes(const Bench &bench) {
  return std::vector<GroupShape>(bench.request.depth, {1, uint64_t{12} * bench.request.width * bench.request.width});
}

}  // namespace

Step::Step(Bench &bench, const fsdp_model_options &options)
    : bench_(bench), model_(bench, bench.size(), options, shapes(bench)) {}

fsdp_model_options Step::options(const Bench &bench) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.optimizer = FSDP_OPTIMIZER_CALLER;
  options.prefetch_depth = bench.request.prefetch;
  options.max_pending_groups = bench.request.pending;
  return options;
}

Passed Step::pass(const Compute &times) {
  auto &groups = model_.groups;
  const double start = now();
  for (fsdp_group *group : groups) {
    model_.check(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
    compute(times.forward);
    model_.check(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
  }
  const double middle = now();
  for (size_t i = groups.size(); i-- > 0;) {
    model_.check(fsdp_unshard(groups[i], FSDP_BACKWARD, 0, nullptr));
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    model_.check(fsdp_acquire_grad(groups[i], 0, 0, nullptr, &grad, &accumulate));
    if (fill_) std::fill_n(static_cast<float *>(grad.data), grad.element_count, static_cast<float>(bench_.rank() + 1));
    compute(times.backward);
    model_.check(fsdp_reshard(groups[i], FSDP_BACKWARD, 0, nullptr));
    model_.check(fsdp_reduce_grad(groups[i], FSDP_LAST, nullptr));
  }
  model_.check(fsdp_finish_grads(model_.model.get(), 1.0, 0, nullptr));
  return {middle - start, now() - middle};
}

void Step::alone(const Compute &times) const {
  for (size_t i = 0; i < model_.groups.size(); ++i) compute(times.forward);
  for (size_t i = 0; i < model_.groups.size(); ++i) compute(times.backward);
}

uint64_t Step::check() {
  fill_ = true;
  pass({});
  fill_ = false;
  uint64_t shards = 0, wrong = 0;
  model_.check(fsdp_get_shard_count(model_.model.get(), &shards));
  const auto expected = static_cast<float>((bench_.size() + 1) / 2.0);
  for (uint64_t s = 0; s < shards; ++s) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    model_.check(fsdp_get_shard(model_.model.get(), s, &shard));
    const auto *grads = static_cast<const float *>(shard.main_grad);
    for (uint64_t i = 0; i < shard.element_count; ++i) wrong += std::abs(grads[i] - expected) > 1e-6F;
  }
  update();
  return bench_.lab.sum(wrong);
}

// The communication alone: the pass without compute.
Passed calibrate(Bench &bench, Step &step) {
  std::vector<double> forward, backward;
  for (int i = 0; i < 9; ++i) {
    bench.lab.meet();
    const Passed passed = step.pass({});
    step.update();
    forward.push_back(bench.lab.longest(passed.forward));
    backward.push_back(bench.lab.longest(passed.backward));
  }
  return {median(forward), median(backward)};
}

Compute compute_beside(const Bench &bench, const Passed &communication) {
  const double scale = compute_factor / static_cast<double>(bench.request.depth);
  return {scale * std::max(communication.forward, communication.backward / 2), scale * communication.backward};
}

namespace {

void run_mode(Bench &bench, fsdp_unshard_mode mode) {
  fsdp_model_options options = Step::options(bench);
  options.unshard_mode = mode;
  Step step(bench, options);
  const uint64_t wrong = bench.request.check ? step.check() : 0;
  const auto timed = [&](const Compute &times) {
    const double seconds = bench.lab.time([&] { step.pass(times); }, 1);
    step.update();
    return seconds;
  };
  const Passed communication = calibrate(bench, step);
  const Compute times = compute_beside(bench, communication);
  std::vector<double> whole, alone, exposed;
  double cpu = 0;
  for (uint32_t i = 0; i < bench.request.pairs; ++i) {
    const double before = cpu_seconds();
    whole.push_back(timed(times));
    cpu += cpu_seconds() - before;
    alone.push_back(bench.lab.time([&] { step.alone(times); }, 1));
    exposed.push_back(whole.back() / alone.back() - 1);
  }
  Measured measured;
  measured.seconds = median(whole);
  measured.reference = median(alone);
  measured.ratio = 1 / (1 + median(exposed));
  measured.pairs = bench.request.pairs;
  const uint64_t bytes = uint64_t{48} * bench.request.width * bench.request.width * bench.request.depth;
  Line line = make_line(bench, "step", mode == FSDP_UNSHARD_MAPPED ? "mapped" : "copied", "fp32", bytes, measured);
  line.reference = "compute alone";
  line.checked = bench.request.check;
  line.wrong = wrong;
  line.more = {{"depth", static_cast<double>(bench.request.depth)},
               {"prefetch", static_cast<double>(bench.request.prefetch)},
               {"pending", static_cast<double>(bench.request.pending)},
               {"communication_us", (communication.forward + communication.backward) * 1e6},
               {"exposed_percent", 100 * median(exposed)},
               {"cpu_us_per_step", cpu / bench.request.pairs * 1e6}};
  bench.report.add(line);
}

}  // namespace

void run_step(Bench &bench) {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // 1 us instead of 50
  run_mode(bench, FSDP_UNSHARD_COPIED);
  run_mode(bench, FSDP_UNSHARD_MAPPED);
}

}  // namespace perf
