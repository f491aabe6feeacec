// SPDX-License-Identifier: Apache-2.0
// fsdp-perf: how fast the library moves bytes here, each figure beside a reference measured in the same run. It uses
// code below the C ABI for the collectives, which have no calls of their own in the ABI.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>

#include "cli.h"
#include "fsdp.h"
#include "perf/join.h"
#include "perf/operations.h"
#include "perf/peer.h"
#include "perf/ranks.h"
#include "perf/simulated_host.h"

namespace {

constexpr const char *footer = R"(
"x ref" is reference time over measured time: above 1 is faster than the reference. The reference of what moves bytes is
the fastest copy of as many bytes on all ranks at once; of what does not, the time until one rank sees another's flag.

Examples:
  fsdp-perf -n 2 -c                                      everything, checked
  fsdp-perf --op all_gather -b 1M -e 256M --mpi          beside Open MPI
  fsdp-perf --op outer -b 1M                             between hosts' processes: UCX beside a raw TCP socket
  fsdp-perf --op save,load -b 256M --dir /checkpoints    beside O_DIRECT writes and reads of as many bytes
  fsdp-perf --op reduce_scatter --json rs.jsonl --plot rs.svg)";

// The operation that makes jobs of its own.
constexpr const char *join_operation = "join";

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const perf::Operation &operation : perf::operations) names.emplace_back(operation.name);
  names.emplace_back(join_operation);
  return names;
}

void add_options(CLI::App &app, perf::Request &request) {
  app.add_option("--op", request.operations,
                 "operations to measure (all but quantize, outer, save, load, step_save, step_home, join)")
      ->check(CLI::IsMember(operation_names()))
      ->delimiter(',');
  app.add_option("-n,--ranks", request.ranks, "ranks (2)")->check(CLI::Range(1u, perf::max_ranks));
  app.add_flag("--threads", request.threads, "ranks as threads of one process");
  app.add_flag("!--no-bind", request.bind, "do not give each rank cores of its own");
  app.add_option("-b,--min-bytes", request.min_bytes, "smallest size (4K)")->transform(CLI::AsSizeValue(false));
  app.add_option("-e,--max-bytes", request.max_bytes, "largest size (256M)")->transform(CLI::AsSizeValue(false));
  app.add_option("-f,--factor", request.factor, "from one size to the next (4)")->check(CLI::Range(2, 1 << 20));
  app.add_option("-w,--warmup", request.warmup, "runs before measuring (20)")->check(CLI::Range(0, 1 << 20));
  app.add_option("-p,--pairs", request.pairs, "measurements, each with its reference; medians are reported (25)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_flag("-c,--check", request.check,
               "count wrong elements of collectives, unshards, AdamW, quantize, step, save and load; any makes the "
               "exit status 1");
  app.add_option("--json", request.json_file, "write a line of JSON for each result");
  app.add_option("--plot", request.plot_file, "write the ratios as a picture (SVG)");
  app.add_flag("--mpi", request.mpi, "measure Open MPI in turns: its shared memory and UCX, the faster one counts");
  app.add_option("--depth", request.depth, "step: groups of the model (24)")->check(CLI::Range(1, 10'000));
  app.add_option("--width", request.width, "step: a group has 12 x width x width weights (512)")
      ->check(CLI::Range(1, 1 << 14));
  app.add_option("--prefetch", request.prefetch, "step: groups gathered ahead (1)")->check(CLI::Range(1, 10'000));
  app.add_option("--pending", request.pending, "step: full gradient buffers alive at once (2)")
      ->check(CLI::Range(1, 10'000));
  app.add_option("--compute", request.compute,
                 "step, step_save: time of computing beside a pass, divided by its communication (1.2)")
      ->check(CLI::Range(0.1, 1000.0));
  app.add_option("--dir", request.directory,
                 "save, load, step_save, step_home: where the files are made, and removed (.)")
      ->check(CLI::ExistingDirectory);
  app.add_option("--netns", request.namespaces, "outer: the network namespace of each rank, two names (this one)")
      ->delimiter(',')
      ->expected(2);
  app.add_option("--address", request.address, "outer: rank 0's address for the raw socket (127.0.0.1)");
  app.add_option("--hosts", request.hosts, "join: hosts of the largest job, each a process (128)")
      ->check(CLI::Range(2u, perf::max_simulated_hosts));
  app.add_option("--ranks-per-host", request.ranks_per_host,
                 "join: ranks of each host, for all of which its process stands (8)")
      ->check(CLI::Range(1u, 64u));
  app.footer(footer);
}

void check_request(const perf::Request &request) {
  if (request.min_bytes < 64 || request.min_bytes > request.max_bytes)
    throw CLI::ValidationError(
        "-b", fmt::format("sizes from {} to {} bytes: the smallest is 64, and not above the largest", request.min_bytes,
                          request.max_bytes));
  const auto &wanted = request.operations;
  if (std::find(wanted.begin(), wanted.end(), join_operation) != wanted.end() && wanted.size() > 1)
    throw CLI::ValidationError("--op", "join makes jobs of its own, so it is measured alone");
}

}  // namespace

int main(int argc, char **argv) {
  CLI::App app("Measures the collectives and the training step, each beside a reference in the same run", "fsdp-perf");
  app.set_version_flag("--version", std::string(fsdp_get_version()));
  perf::Request request;
  add_options(app, request);
  app.callback([&] { check_request(request); });
  if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;
  try {
    if (request.operations == std::vector<std::string>{join_operation}) return perf::run_join(request);
    std::unique_ptr<perf::Peers> peers;
    if (request.mpi) peers = std::make_unique<perf::Peers>(request.ranks);
    return perf::run_ranks(request, peers.get());
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-perf: {}\n", error.what());
    return 1;
  }
}
