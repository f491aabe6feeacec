// SPDX-License-Identifier: Apache-2.0
// The world as the launcher's variables say it, whichever launcher it is.
#include <optional>

#include "membership/job.h"
#include "membership/launch/launchers.h"
#include "membership/launch/meeting_point.h"
#include "membership/launch/secret_file.h"
#include "membership/launch/variables.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {
namespace {

// The first that has started this process, in the order that fsdp_create_context gives.
std::optional<LaunchedRank> read_launch() {
  if (auto launch = read_torchrun(false)) return launch;
  if (auto launch = read_open_mpi()) return launch;
  if (auto launch = read_slurm()) return launch;
  if (auto launch = read_mpich()) return launch;
  return read_torchrun(true);
}

// Ranks of one host need no network, so the text becomes a name.
std::string choose_rendezvous(const LaunchedRank &launch) {
  const auto elsewhere = variable("FSDP_RENDEZVOUS");
  if (elsewhere) {
    const MeetingPoint point = parse_meeting_point(*elsewhere);
    if (launch.one_host)
      return point.kind == MeetingPoint::Kind::name ? point.text
                                                    : "at " + elsewhere->substr(elsewhere->find("://") + 3);
    if (point.kind == MeetingPoint::Kind::name && !launch.unplaced.empty())
      fail(FSDP_INVALID_ARGUMENT,
           "FSDP_RENDEZVOUS='{}' is a name, for ranks of one host, but {}, so the ranks may be on several: set "
           "LOCAL_RANK and "
           "LOCAL_WORLD_SIZE (to the value of WORLD_SIZE), or give tcp://HOST:PORT or file:///DIRECTORY",
           *elsewhere, launch.unplaced);
    if (point.kind == MeetingPoint::Kind::name)
      fail(FSDP_INVALID_ARGUMENT,
           "FSDP_RENDEZVOUS='{}' is a name, for ranks of one host; ranks of several need tcp://HOST:PORT or "
           "file:///DIRECTORY",
           *elsewhere);
    return *elsewhere;
  }
  const std::string &found = launch.one_host ? launch.name : launch.address;
  if (found.empty()) fail(FSDP_INVALID_ARGUMENT, "{}", launch.help);
  return found;
}

uint32_t read_attempt() {
  for (const char *name : {"FSDP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"})
    if (const auto value = variable(name)) return number(name, *value, 0, INT32_MAX);
  return 0;
}

}  // namespace

std::string read_job_secret() {
  auto secret = variable("FSDP_JOB_SECRET");
  const auto path = variable("FSDP_JOB_SECRET_FILE");
  if (secret && path) fail(FSDP_INVALID_ARGUMENT, "FSDP_JOB_SECRET and FSDP_JOB_SECRET_FILE are both set; set one");
  if (secret) {
    const WipedText wiped(*secret);
    return *secret;
  }
  if (!path) return {};
  return read_secret_file(*path);
}

WorldOptions read_launcher_environment() {
  WorldOptions options;
  const auto launch = read_launch();
  if (!launch) return options;
  options.rank = launch->rank;
  options.size = launch->size;
  options.job = launch->job;
  options.source = launch->launcher;
  if (options.size > 1) options.rendezvous = choose_rendezvous(*launch);
  options.attempt = read_attempt();
  options.secret = read_job_secret();
  return options;
}

void complete_world(WorldOptions &options) {
  options.secret = read_job_secret();
  options.attempt = read_attempt();
  options.source = "fsdp_context_options";
  if (options.size == 1 || !options.rendezvous.empty()) return;
  options.rendezvous = variable("FSDP_RENDEZVOUS").value_or("");
  if (options.rendezvous.empty()) {
    WorldOptions launched = read_launcher_environment();
    const WipedText wiped(launched.secret);
    options.rendezvous = std::move(launched.rendezvous);
  }
  if (options.rendezvous.empty())
    fail(FSDP_INVALID_ARGUMENT,
         "fsdp_context_options.rendezvous: NULL, and neither FSDP_RENDEZVOUS nor the variables of a launcher are set; "
         "give the {} ranks a common name, tcp://HOST:PORT or file:///DIRECTORY",
         options.size);
}

}  // namespace fsdp::membership
