// SPDX-License-Identifier: Apache-2.0
// How weights become whole. Mapped: the wait for all ranks' parts of a new version, over a mapping of all shards.
// Copied: the pull of all shards into private memory, through the C ABI with its streams, and what prefetch of it
// costs. And the control path alone: unshard and reshard of a group that is gathered already.
#include <algorithm>
#include <string>

#include <fmt/format.h>

#include "perf/abi_model.h"
#include "perf/bench.h"

namespace perf {
namespace {

using fsdp::transport::Range;

class MappedUnshard {
 public:
  MappedUnshard(Bench &bench, uint64_t bytes)
      : bench_(bench), words_(bytes / sizeof(uint64_t)), thread_(bench.stream()) {
    const uint64_t part = bytes / bench.size();
    const Range own{bench.rank() * part, part};
    arena_ = bench.member.team->create_arena(bytes, {&own, 1}, "weights of the measurement");
    versions_ = bench.member.team->create_versions("versions of the measurement");
  }
  void operator()() {
    versions_->publish(++version_, thread_);
    versions_->await(version_, thread_, "a version");
  }
  // Every rank stamps all of its shard; after the wait all stamps must show everywhere.
  uint64_t check() {
    uint64_t wrong = 0;
    for (int round = 0; round < 3; ++round) {
      const uint64_t part = words_ / bench_.size();
      auto *own = reinterpret_cast<uint64_t *>(arena_->writable()) + bench_.rank() * part;
      std::fill_n(own, part, version_ + 1);
      (*this)();
      const auto *all = reinterpret_cast<const uint64_t *>(arena_->data());
      for (uint64_t i = 0; i < part * bench_.size(); ++i) wrong += all[i] != version_;
      bench_.lab.meet();  // before any rank stamps again
    }
    return bench_.lab.sum(wrong);
  }

 private:
  Bench &bench_;
  uint64_t words_;
  fsdp::device::Stream &thread_;
  std::unique_ptr<fsdp::transport::Arena> arena_;
  std::unique_ptr<fsdp::transport::Versions> versions_;
  uint64_t version_ = 0;
};

// What the library counts for an unshard of a new version of a mapped group of so many bytes.
double mapped_bytes_moved(Bench &bench, uint64_t bytes) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.optimizer = FSDP_OPTIMIZER_CALLER;
  AbiModel model(bench, bench.size(), options, {{1, bytes / sizeof(float)}});
  model.check(fsdp_unshard(model.groups[0], FSDP_EVAL, 0, nullptr));
  model.check(fsdp_reshard(model.groups[0], FSDP_EVAL, 0, nullptr));
  fsdp_stats stats = FSDP_STATS_INIT;
  model.check(fsdp_get_stats(model.model.get(), &stats));
  bench.lab.meet();
  return static_cast<double>(stats.gathered_bytes);
}

void run_mapped(Bench &bench) {
  for (const uint64_t bytes : bench.request.shared_sizes()) {
    MappedUnshard operation(bench, bytes);
    const uint64_t wrong = bench.request.check ? operation.check() : 0;
    Line line = make_line(bench, "unshard", "mapped", "bytes", bytes, measure_latency(bench, [&] { operation(); }));
    line.reference = "flag one-way";
    line.wrong = wrong;
    line.checked = bench.request.check;
    line.more = {{"bytes_moved", mapped_bytes_moved(bench, bytes)}};
    bench.report.add(line);
  }
}

void run_copied(Bench &bench) {
  for (const uint64_t bytes : bench.request.shared_sizes()) {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.unshard_mode = FSDP_UNSHARD_COPIED;
    options.flags = FSDP_MODEL_NO_PREFETCH;
    // Two groups, because a single group would keep its buffer from one visit to the next.
    const uint64_t elements = bytes / sizeof(float);
    AbiModel model(bench, bench.size(), options, {{1, elements}, {1, elements}});
    const auto stats = [&] {
      fsdp_stats stats = FSDP_STATS_INIT;
      model.check(fsdp_get_stats(model.model.get(), &stats));
      return stats;
    };
    uint64_t wrong = 0;
    if (bench.request.check) {
      model.load_pattern();
      wrong = bench.lab.sum(model.count_wrong(0) + model.count_wrong(1));
    }
    uint32_t turn = 0;
    const Work work = [&] {
      fsdp_group *group = model.groups[++turn % 2];
      model.check(fsdp_unshard(group, FSDP_EVAL, 0, nullptr));
      model.check(fsdp_reshard(group, FSDP_EVAL, 0, nullptr));
    };
    const uint64_t before = stats().gathered_bytes;
    for (int i = 0; i < 8; ++i) work();
    const double moved = static_cast<double>(stats().gathered_bytes - before) / 8;
    CopyReference copy(bench, bytes);
    Line line = make_line(bench, "unshard", "copied", "bytes", bytes, measure(bench, work, [&] { copy(); }));
    line.bus_factor = (bench.size() - 1.0) / bench.size();
    line.reference = copy.name();
    line.checked = bench.request.check;
    line.wrong = wrong;
    line.more = {{"bytes_moved", moved}};
    bench.report.add(line);
  }
}

// A pass over the groups of a copied model in their order: what is prefetched in it is visited in it.
class Pass {
 public:
  Pass(Bench &bench, uint64_t bytes, size_t group_count, bool prefetches)
      : model_(bench, bench.size(), options(prefetches),
               std::vector<GroupShape>(group_count, {1, bytes / sizeof(float)})) {}
  void operator()() {
    for (fsdp_group *group : model_.groups) {
      model_.check(fsdp_unshard(group, FSDP_EVAL, 0, nullptr));
      model_.check(fsdp_reshard(group, FSDP_EVAL, 0, nullptr));
    }
  }

 private:
  static fsdp_model_options options(bool prefetches) {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.optimizer = FSDP_OPTIMIZER_CALLER;
    options.unshard_mode = FSDP_UNSHARD_COPIED;
    if (!prefetches) options.flags = FSDP_MODEL_NO_PREFETCH;
    return options;
  }

  AbiModel model_;
};

// What prefetch costs a caller that does nothing between its visits: the most that it can cost.
void run_prefetched(Bench &bench, const std::string &variant, uint64_t bytes, size_t group_count) {
  Pass pass(bench, bytes, group_count, true), other(bench, bytes, group_count, false);
  Measured measured = measure(
      bench, [&] { pass(); }, [&] { other(); });
  measured.seconds /= static_cast<double>(group_count);
  measured.reference /= static_cast<double>(group_count);
  Line line = make_line(bench, "unshard", variant.c_str(), "bytes", bytes, measured);
  line.reference = "no prefetch";
  line.more = {{"groups", static_cast<double>(group_count)}};
  bench.report.add(line);
}

void run_prefetched(Bench &bench) {
  constexpr uint64_t max_bytes = uint64_t{512} << 20, small_group = 16 << 10;
  for (const uint64_t bytes : bench.request.shared_sizes())
    run_prefetched(bench, "prefetched", bytes, std::clamp<size_t>(max_bytes / bytes, 3, 8));
  if (bench.request.min_bytes > small_group || bench.request.max_bytes < small_group) return;
  for (const size_t group_count : {100, 1000})
    run_prefetched(bench, fmt::format("{} prefetched", group_count), small_group, group_count);
}

// The pairs are timed one by one for the tail; their clock is read twice, which is taken out.
std::pair<double, double> time_single_pairs(const Work &work) {
  std::vector<double> clock, pairs;
  for (int i = 0; i < 20'000; ++i) {
    const double start = now();
    const double middle = now();
    work();
    const double end = now();
    clock.push_back(middle - start);
    pairs.push_back(end - middle);
  }
  const double overhead = median(clock);
  std::sort(pairs.begin(), pairs.end());
  return {pairs[pairs.size() / 2] - overhead, pairs[pairs.size() * 99 / 100] - overhead};
}

}  // namespace

void run_unshard(Bench &bench) {
  if (bench.size() > 1) run_mapped(bench);
  run_copied(bench);
  run_prefetched(bench);
}

// Every rank alone: nothing is waited for, what is left is the control path.
void run_unshard_reshard(Bench &bench) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const uint64_t params : {1, 10, 100, 1000, 10'000}) {
      fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
      options.unshard_mode = mode;
      AbiModel model(bench, bench.size(), options, {{params, 64}});
      fsdp_group *group = model.groups[0];
      model.check(fsdp_unshard(group, FSDP_EVAL, 0, nullptr));  // held, so it stays gathered
      const Work work = [&] {
        model.check(fsdp_unshard(group, FSDP_EVAL, 0, nullptr));
        model.check(fsdp_reshard(group, FSDP_EVAL, 0, nullptr));
      };
      const auto [middle, tail] = time_single_pairs(work);
      const uint64_t repeats = bench.lab.repeats(work, 300e-6);
      std::vector<double> seconds;
      for (uint32_t i = 0; i < bench.request.pairs; ++i) seconds.push_back(bench.lab.time(work, repeats));
      Measured measured;
      measured.seconds = median(seconds);
      measured.pairs = bench.request.pairs;
      const bool mapped = mode == FSDP_UNSHARD_MAPPED;
      Line line = make_line(bench, "unshard_reshard", mapped ? "mapped" : "copied", "fp32", params * 64 * sizeof(float),
                            measured);
      line.more = {{"parameters", static_cast<double>(params)},
                   {"single_median_ns", middle * 1e9},
                   {"single_p99_ns", tail * 1e9}};
      bench.report.add(line);
      model.check(fsdp_reshard(group, FSDP_EVAL, 0, nullptr));
      bench.lab.meet();
    }
}

}  // namespace perf
