// SPDX-License-Identifier: Apache-2.0
// fsdp-run: start the ranks of a job on this machine, or this machine's ranks of a job on several.
#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "cli.h"
#include "fsdp.h"
#include "run/job.h"
#include "run/rank_process.h"

namespace {

constexpr const char *footer = R"(
Every rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (as torchrun sets them) and
FSDP_JOB_SECRET, a random secret of this job, and FSDP_RESTART_COUNT. Standard input is empty.

Over several machines, start it on each with its own --node-rank, and with the same --nnodes, -n, --rendezvous and job
secret (FSDP_JOB_SECRET_FILE or FSDP_JOB_SECRET); ranks get FSDP_RENDEZVOUS too. With --max-restarts each machine
starts its own ranks again, and they meet at the same rendezvous.

When a rank fails, the others have --grace-seconds to report that (a flight record, say) and to end by themselves. Then
they get SIGTERM, and SIGKILL after --kill-seconds. fsdp-run exits with the status of the rank that failed first, 128 +
signal if it was killed (SIGKILL is the cause whenever it came), 124 after --timeout, 127 if the program was not found.

Examples: fsdp-run -n 2 ./train --steps 100
          fsdp-run --nnodes 2 --node-rank 0 --rendezvous tcp://10.0.0.1:29500 -n 8 ./train
)";

int parse_and_run(int argc, char **argv) {
  run::JobOptions options;
  double timeout = 0, grace = 5, kill = 5;
  bool no_prefix = false;
  const std::string version = std::to_string(FSDP_VERSION_MAJOR) + "." + std::to_string(FSDP_VERSION_MINOR) + "." +
                              std::to_string(FSDP_VERSION_PATCH);

  CLI::App app{"Start the ranks of a job on this machine: fsdp-run -n N [options] [--] program [arguments...]",
               "fsdp-run"};
  app.add_option("-n,--ranks", options.ranks, "how many ranks to start")->required()->check(CLI::Range(1, 4096));
  app.add_option("--nnodes", options.nodes, "how many machines the job has")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--node-rank", options.node_rank, "which of them this one is, from 0")->check(CLI::Range(0, 4095));
  app.add_option(
      "--rendezvous", options.rendezvous,
      "where the ranks of several machines meet: tcp://HOST:PORT, HOST being node 0's, or file:///DIRECTORY");
  app.add_option("--max-restarts", options.max_restarts, "start the ranks again so often after one failed")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_option("--timeout", timeout, "end the job after so many seconds (default: never)")
      ->check(CLI::PositiveNumber);
  app.add_option("--grace-seconds", grace, "seconds that the other ranks have to end by themselves after one failed")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--kill-seconds", kill, "seconds between SIGTERM and SIGKILL")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--log", options.log, "log of the library on standard error (FSDP_LOG)")
      ->check(CLI::IsMember({"error", "warning", "info", "debug"}));
  app.add_flag("--debug", options.debug,
               "find what is used after it was given back (FSDP_DEBUG); where a rank faults in it, name the group");
  app.add_option("--trace", options.trace, "directory for trace-RANK.json of every rank (FSDP_TRACE); made if need be");
  app.add_option("--wait-timeout", options.wait_seconds, "seconds that a rank waits for others at most (FSDP_TIMEOUT)")
      ->check(CLI::Range(1, 4294967));
  app.add_flag("--no-prefix", no_prefix, "do not put \"[rank] \" before each line of output");
  app.set_version_flag("--version", version);
  app.footer(footer);
  app.prefix_command();  // the first word that is not an option of fsdp-run begins the program's command line
  if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;

  options.timeout = std::chrono::duration<double>(timeout);
  options.grace = std::chrono::duration<double>(grace);
  options.kill = std::chrono::duration<double>(kill);
  options.prefix = !no_prefix;
  options.command = app.remaining();
  if (!options.command.empty() && options.command.front() == "--") options.command.erase(options.command.begin());
  if (options.command.empty()) {
    fmt::print(stderr, "fsdp-run: no program given. Try: fsdp-run -n {} ./program arguments...\n", options.ranks);
    return 2;
  }
  return run::run_job(options);
}

}  // namespace

int main(int argc, char **argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const run::UsageError &error) {
    fmt::print(stderr, "fsdp-run: {}\n", error.what());
    return 2;
  } catch (const run::StartError &error) {
    fmt::print(stderr, "fsdp-run: {}\n", error.what());
    return error.status;
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-run: {}\n", error.what());
    return 1;
  }
}
