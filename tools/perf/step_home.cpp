// SPDX-License-Identifier: Apache-2.0
// An update of AdamW whose states are at home in a file. As the reference each rank reads and writes as many bytes of a
// file of its own past the page cache, with one thread that reads and one that writes, and does nothing else.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <vector>

#include "perf/abi_model.h"
#include "perf/bench.h"
#include "perf/scratch.h"

namespace perf {
namespace {

constexpr uint64_t moved_at_once = uint64_t{8} << 20;
constexpr uint64_t huge_page = uint64_t{2} << 20;
constexpr uint64_t bytes_of_states = 8;  // of an element: both moments

class RawTraffic {
 public:
  RawTraffic(const std::string &file, uint64_t bytes) : bytes_(bytes) {
    file_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600);
    if (file_ < 0) file_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file_ < 0 || ::fallocate(file_, 0, 0, static_cast<off_t>(bytes)) != 0) fail_file(file, "making room for it");
    run();  // written once, as the states are before they are measured
  }
  ~RawTraffic() { ::close(file_); }
  RawTraffic(const RawTraffic &) = delete;
  RawTraffic &operator=(const RawTraffic &) = delete;

  // The writer follows the reader by a block, so both move the same bytes at the same time.
  void run() const {
    std::thread writer([this] { visit([](auto... all) { return ::pwrite(all...); }); });
    visit([](auto... all) { return ::pread(all...); });
    writer.join();
  }

 private:
  template <class Call>
  void visit(Call call) const {
    const std::unique_ptr<char, void (*)(void *)> block(
        static_cast<char *>(std::aligned_alloc(huge_page, moved_at_once)), std::free);
    ::madvise(block.get(), moved_at_once, MADV_HUGEPAGE);
    for (uint64_t i = 0; i < moved_at_once; ++i) block.get()[i] = static_cast<char>(i * 2654435761U >> 13);
    for (uint64_t at = 0; at < bytes_; at += moved_at_once) {
      const uint64_t some = std::min(moved_at_once, bytes_ - at);
      if (call(file_, block.get(), some, static_cast<off_t>(at)) != static_cast<ssize_t>(some))
        fail_file("the raw file", "moving a block of it");
    }
  }

  int file_;
  uint64_t bytes_;
};

void measure_size(Bench &bench, const Scratch &scratch, const std::string &folder, uint64_t elements) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.state_home = FSDP_HOME_FILE;
  options.home_directory = folder.c_str();
  AbiModel model(bench, bench.size(), options, {{1, elements * bench.size()}});
  const RawTraffic raw(scratch.file(fmt::format("raw{}", bench.rank())), elements * bytes_of_states);
  const auto stats = [&] {
    fsdp_stats found = FSDP_STATS_INIT;
    model.check(fsdp_get_stats(model.model.get(), &found));
    return found;
  };
  // Gradients of zeros, which are made outside of the measured time.
  const auto update = [&] {
    model.check(fsdp_finish_grads(model.model.get(), 1, FSDP_LAST, nullptr));
    return bench.lab.time([&] { model.check(fsdp_step_adamw(model.model.get(), 1e-3, nullptr, nullptr)); }, 1);
  };
  for (uint32_t i = 0; i < bench.request.warmup; ++i) update();
  const fsdp_stats before = stats();
  std::vector<double> seconds, reference, ratios;
  for (uint32_t i = 0; i < bench.request.pairs; ++i) {
    seconds.push_back(update());
    reference.push_back(bench.lab.time([&] { raw.run(); }, 1));
    ratios.push_back(reference.back() / seconds.back());
  }
  const fsdp_stats after = stats();
  Measured measured;
  measured.seconds = median(seconds);
  measured.reference = median(reference);
  measured.ratio = median(ratios);
  measured.pairs = bench.request.pairs;
  const uint64_t bytes = 2 * elements * bytes_of_states;
  Line line = make_line(bench, "step_home", "states in a file", scratch.kind(), bytes, measured);
  line.reference = "the same reads and writes";
  line.more = {{"waited_us", 1e-3 * static_cast<double>(after.home_wait_ns - before.home_wait_ns) / measured.pairs},
               {"best_ratio", *std::ranges::max_element(ratios)}};
  bench.report.add(line);
}

}  // namespace

void run_step_home(Bench &bench) {
  const Scratch scratch(bench);
  const std::string folder = scratch.file(".");
  for (uint64_t bytes = std::max<uint64_t>(bench.request.min_bytes, 1 << 20); bytes <= bench.request.max_bytes;
       bytes *= bench.request.factor)
    measure_size(bench, scratch, folder, bytes / bytes_of_states / 1024 * 1024);
}

}  // namespace perf
