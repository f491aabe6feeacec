// SPDX-License-Identifier: Apache-2.0
// A training step of a synthetic model: how much of the communication shows beside the compute. Compute is a timed
// wait, as an accelerator would be to the host, of Request::compute times the communication; the reference is the same
// waits alone.
#include "perf/step.h"

#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "perf/bench.h"

namespace perf {
namespace {

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

Passed calibrate(Bench &bench, Step &step, int passes) {
  std::vector<double> forward, backward;
  for (int i = 0; i < passes; ++i) {
    bench.lab.meet();
    const Passed passed = step.pass({});
    step.update();
    forward.push_back(bench.lab.longest(passed.forward));
    backward.push_back(bench.lab.longest(passed.backward));
  }
  return {median(forward), median(backward)};
}

Compute compute_beside(const Bench &bench, const Passed &communication) {
  const double scale = bench.request.compute / static_cast<double>(bench.request.depth);
  return {scale * std::max(communication.forward, communication.backward / 2), scale * communication.backward};
}

namespace {

// Measured step by step, because a virtual machine changes its speed. Its two processors may be two threads of one
// core, which share the core's caches and adders, or two cores, and the host may move them at any time. So the compute
// of each step is set by the communication just before it, and the time of a flag tells which of the two it was.
struct StepTimes {
  std::vector<double> whole, alone, exposed, communication, flag;
  double cpu_seconds = 0;
};

void measure_one(Bench &bench, Step &step, StepTimes &times) {
  constexpr int passes = 3;
  constexpr uint64_t round_trips = 1000;
  const auto timed = [&](const Compute &compute) {
    const double seconds = bench.lab.time([&] { step.pass(compute); }, 1);
    step.update();
    return seconds;
  };
  if (bench.size() > 1) times.flag.push_back(bench.lab.flag_one_way(round_trips));
  const Passed communication = calibrate(bench, step, passes);
  const Compute compute = compute_beside(bench, communication);
  times.communication.push_back(communication.forward + communication.backward);
  const double before = cpu_seconds();
  times.whole.push_back(timed(compute));
  times.cpu_seconds += cpu_seconds() - before;
  times.alone.push_back(bench.lab.time([&] { step.alone(compute); }, 1));
  times.exposed.push_back(times.whole.back() / times.alone.back() - 1);
}

void add_range(Line &line, const char *least, const char *most, const std::vector<double> &values, double unit) {
  if (values.empty()) return;
  const auto [low, high] = std::ranges::minmax(values);
  line.more.emplace_back(least, low * unit);
  line.more.emplace_back(most, high * unit);
}

void run_mode(Bench &bench, fsdp_unshard_mode mode) {
  fsdp_model_options options = Step::options(bench);
  options.unshard_mode = mode;
  Step step(bench, options);
  const uint64_t wrong = bench.request.check ? step.check() : 0;
  calibrate(bench, step);  // the first passes of a model are no measure
  StepTimes times;
  for (uint32_t i = 0; i < bench.request.pairs; ++i) measure_one(bench, step, times);
  Measured measured;
  measured.seconds = median(times.whole);
  measured.reference = median(times.alone);
  measured.ratio = 1 / (1 + median(times.exposed));
  measured.pairs = bench.request.pairs;
  const uint64_t bytes = uint64_t{48} * bench.request.width * bench.request.width * bench.request.depth;
  Line line = make_line(bench, "step", mode == FSDP_UNSHARD_MAPPED ? "mapped" : "copied", "fp32", bytes, measured);
  line.reference = "compute alone";
  line.checked = bench.request.check;
  line.wrong = wrong;
  line.more = {{"depth", static_cast<double>(bench.request.depth)},
               {"prefetch", static_cast<double>(bench.request.prefetch)},
               {"pending", static_cast<double>(bench.request.pending)},
               {"compute", bench.request.compute},
               {"communication_us", median(times.communication) * 1e6},
               {"exposed_percent", 100 * median(times.exposed)},
               {"cpu_us_per_step", times.cpu_seconds / bench.request.pairs * 1e6}};
  add_range(line, "communication_us_least", "communication_us_most", times.communication, 1e6);
  add_range(line, "flag_ns_least", "flag_ns_most", times.flag, 1e9);
  bench.report.add(line);
}

}  // namespace

void run_step(Bench &bench) {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // 1 us instead of 50
  run_mode(bench, FSDP_UNSHARD_COPIED);
  run_mode(bench, FSDP_UNSHARD_MAPPED);
}

}  // namespace perf
