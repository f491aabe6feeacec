// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <thread>

#include "perf/bench.h"
#include "perf/peer.h"

namespace perf {
namespace {

// Long compared with the clock's resolution and, where ranks share cores, with a time slice.
bool crowded(const Bench &bench) { return bench.size() > std::thread::hardware_concurrency(); }
double sample_seconds(const Bench &bench) { return crowded(bench) ? 20e-3 : 300e-6; }

double percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  const auto index = static_cast<size_t>(part * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<long>(index), values.end());
  return values[index];
}

// What is measured in turns with the work.
class Turns {
 public:
  Turns(Bench &bench, const Work &work, std::optional<PeerCall> peer) : bench_(bench), work_(work), peer_(peer) {
    for (uint32_t i = 0; i < bench.request.warmup; ++i) work_();
    repeats_ = bench.lab.repeats(work_, sample_seconds(bench));
    if (peer_ && bench_.peers) bench_.peers->prepare(bench_.lab, *peer_, sample_seconds(bench));
  }

  // reference: seconds of one run of it.
  template <class Reference>
  Measured operator()(Reference &&reference) {
    for (uint32_t pair = 0; pair < bench_.request.pairs; ++pair) {
      works_.push_back(bench_.lab.time(work_, repeats_));
      references_.push_back(reference());
      ratios_.push_back(references_.back() / works_.back());
      if (peer_ && bench_.peers) bench_.peers->take(bench_.lab, peers_);
    }
    return result();
  }

 private:
  Measured result() const {
    Measured measured;
    measured.seconds = median(works_);
    measured.p99_seconds = percentile(works_, 0.99);
    measured.reference = median(references_);
    measured.ratio = median(ratios_);
    measured.pairs = bench_.request.pairs;
    for (const std::vector<double> &peer : peers_) {
      const double seconds = median(peer);
      if (measured.peer != 0 && seconds >= measured.peer) continue;
      std::vector<double> ratios;
      for (size_t i = 0; i < peer.size(); ++i) ratios.push_back(peer[i] / works_[i]);
      measured.peer = seconds;
      measured.peer_ratio = median(ratios);
    }
    return measured;
  }

  Bench &bench_;
  const Work &work_;
  std::optional<PeerCall> peer_;
  uint64_t repeats_;
  std::vector<double> works_, references_, ratios_;
  std::vector<std::vector<double>> peers_;
};

}  // namespace

double median(std::vector<double> values) { return percentile(std::move(values), 0.5); }

Measured measure(Bench &bench, const Work &work, const Work &reference, std::optional<PeerCall> peer) {
  Turns turns(bench, work, peer);
  reference();
  const uint64_t repeats = bench.lab.repeats(reference, sample_seconds(bench));
  return turns([&] { return bench.lab.time(reference, repeats); });
}

Measured measure_latency(Bench &bench, const Work &work, std::optional<PeerCall> peer) {
  Turns turns(bench, work, peer);
  bench.lab.flag_one_way(100);
  Measured measured = turns([&] { return bench.lab.flag_one_way(1000); });
  // Where ranks share cores the flag waits for a time slice, so it is no reference.
  if (crowded(bench)) measured.ratio = 0;
  return measured;
}

Line make_line(const Bench &bench, const char *operation, const char *variant, const char *dtype, uint64_t bytes,
               const Measured &measured) {
  Line line;
  line.operation = operation;
  line.variant = variant;
  line.dtype = dtype;
  line.ranks = bench.size();
  line.bytes = bytes;
  line.seconds = measured.seconds;
  line.reference_seconds = measured.reference;
  line.ratio = measured.ratio;
  line.pairs = measured.pairs;
  if (measured.peer > 0) {
    line.peer = "Open MPI";
    line.peer_seconds = measured.peer;
    line.peer_ratio = measured.peer_ratio;
  }
  return line;
}

}  // namespace perf
