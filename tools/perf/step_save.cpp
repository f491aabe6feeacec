// SPDX-License-Identifier: Apache-2.0
// A step while a checkpoint is saved beside it, against the same step without one. The step in which the save copies
// its data waits for the copy. The steps after it share the machine with the threads that write.
#include <sys/prctl.h>

#include <algorithm>
#include <vector>

#include "perf/bench.h"
#include "perf/scratch.h"
#include "perf/step.h"

namespace perf {
namespace {

// The compute of a step lasts this many times as long as the copying of a save: a shorter step could not hide it.
constexpr double copies_in_a_step = 2;

class SavedStep {
 public:
  SavedStep(Bench &bench, Step &step, std::string folder) : bench_(bench), step_(step), folder_(std::move(folder)) {}

  // Two steps with a save that begins in the first one; what is left of it is waited for afterwards.
  double with(const Compute &times) {
    fsdp_checkpoint *checkpoint = nullptr;
    const double seconds = bench_.lab.time(
        [&] {
          checkpoint = begin();
          steps(times);
        },
        1);
    step_.model().check(fsdp_wait_checkpoint(checkpoint));
    fsdp_destroy_checkpoint(checkpoint);
    return seconds;
  }
  double without(const Compute &times) {
    return bench_.lab.time([&] { steps(times); }, 1);
  }
  // Seconds until all is copied, with nothing beside it.
  double copy_time() {
    fsdp_checkpoint *checkpoint = begin();
    const double start = now();
    step_.pass({});
    const double seconds = bench_.lab.longest(now() - start);
    step_.update();
    step_.model().check(fsdp_wait_checkpoint(checkpoint));
    fsdp_destroy_checkpoint(checkpoint);
    return seconds;
  }
  double stall() {
    fsdp_stats stats = FSDP_STATS_INIT;
    step_.model().check(fsdp_get_stats(step_.model().model.get(), &stats));
    return bench_.lab.longest(1e-9 * static_cast<double>(stats.checkpoint_stall_ns));
  }

 private:
  fsdp_checkpoint *begin() {
    fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
    options.step = 1;
    options.flags = FSDP_SAVE_REPLACE;
    fsdp_checkpoint *checkpoint = nullptr;
    AbiModel &model = step_.model();
    model.check(fsdp_begin_checkpoint(model.context.get(), folder_.c_str(), &options, &checkpoint));
    model.check(fsdp_add_checkpoint_model(checkpoint, nullptr, model.model.get()));
    model.check(fsdp_commit_checkpoint(checkpoint));
    return checkpoint;
  }
  void steps(const Compute &times) {
    for (int i = 0; i < 2; ++i) {
      step_.pass(times);
      step_.update();
    }
  }

  Bench &bench_;
  Step &step_;
  std::string folder_;
};

// Stretches the compute so much that the copying fits into a step.
Compute stretched(const Bench &bench, Compute times, double copying) {
  const double whole = (times.forward + times.backward) * static_cast<double>(bench.request.depth);
  const double factor = std::max(1.0, copies_in_a_step * copying / whole);
  return {times.forward * factor, times.backward * factor};
}

Compute choose_compute(Bench &bench, Step &step, SavedStep &saved) {
  std::vector<double> copying;
  for (int i = 0; i < 3; ++i) copying.push_back(saved.copy_time());
  return stretched(bench, compute_beside(bench, calibrate(bench, step)), median(copying));
}

}  // namespace

void run_step_save(Bench &bench) {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  const Scratch scratch(bench);
  const uint64_t weights = uint64_t{12} * bench.request.width * bench.request.width * bench.request.depth;
  const uint64_t bytes = weights * sizeof(float);
  fsdp_model_options options = Step::options(bench);
  options.save_staging_bytes = std::max<uint64_t>(bytes / bench.size() + bytes / 8, uint64_t{32} << 20);
  Step step(bench, options);
  SavedStep saved(bench, step, scratch.file("saved"));
  const Compute times = choose_compute(bench, step, saved);
  std::vector<double> with, without, ratios;
  const double before = saved.stall();
  for (uint32_t i = 0; i < bench.request.pairs; ++i) {
    with.push_back(saved.with(times) / 2);
    without.push_back(saved.without(times) / 2);
    ratios.push_back(without.back() / with.back());
  }
  Measured measured;
  measured.seconds = median(with);
  measured.reference = median(without);
  measured.ratio = median(ratios);
  measured.pairs = bench.request.pairs;
  Line line = make_line(bench, "step_save", "saved beside it", scratch.kind(), bytes, measured);
  line.reference = "the same step";
  line.more = {{"stall_us_per_save", 1e6 * (saved.stall() - before) / bench.request.pairs},
               {"compute_us", 1e6 * (times.forward + times.backward) * static_cast<double>(bench.request.depth)}};
  bench.report.add(line);
}

}  // namespace perf
