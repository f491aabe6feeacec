// SPDX-License-Identifier: Apache-2.0

#include "membership/launch/launchers.h"

#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>

#include "membership/job.h"
#include "membership/launch/meeting_point.h"
#include "membership/launch/secret_file.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {

namespace {

struct PlaceVariables {
  const char *rank, *size;              // in the job
  const char *local_rank, *local_size;  // on this host; nullptr: the launcher has no such variable
};

uint32_t value_of(const char *name, uint32_t least, uint32_t most) {
  return number(name, variable(name).value_or(""), least, most);
}

void read_place(const PlaceVariables &names, LaunchedRank &launch) {
  launch.size = value_of(names.size, 1, INT32_MAX);
  launch.rank = value_of(names.rank, 0, INT32_MAX);
  if (launch.rank >= launch.size)
    fail(FSDP_INVALID_ARGUMENT, "{}={} is outside [0, {}={})", names.rank, launch.rank, names.size, launch.size);
  const bool known = names.local_size && variable(names.local_size);
  const uint32_t here = known ? value_of(names.local_size, 1, launch.size) : launch.size;
  if (variable(names.local_rank)) value_of(names.local_rank, 0, here - 1);
  if (known) launch.one_host = here == launch.size;
}

bool names_loopback(const std::string &host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

std::string several_hosts(const char *launcher, const char *how) {
  return format_text(
      "the ranks are on several hosts, and {} does not say where they meet: set "
      "FSDP_RENDEZVOUS=tcp://HOST:PORT, with the host of rank 0 and a free port, or file:///DIRECTORY "
      "that all hosts share, on every rank ({})",
      launcher, how);
}

// "pid (name) state parent ... start": the name may contain spaces and parentheses.
struct Process {
  std::string name;
  pid_t parent = 0;
  std::string started;
};
std::optional<Process> read_process(pid_t pid) {
  std::ifstream file(format_text("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return {};
  const size_t open = text.find('('), close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) return {};
  Process process{text.substr(open + 1, close - open - 1), 0, {}};
  std::istringstream rest(text.substr(close + 1));
  std::string field;
  for (int number = 3; number <= 22 && rest >> field; ++number) {  // the numbers of fields in proc(5)
    if (number == 4) process.parent = static_cast<pid_t>(std::stol(field));
    if (number == 22) process.started = field;
  }
  return process;
}

// Hydra gives the job no name in the environment, but all ranks of a host descend from one proxy process.
std::string hydra_job() {
  for (pid_t pid = ::getppid(); pid > 1;) {
    const auto process = read_process(pid);
    if (!process) break;
    if (process->name == "hydra_pmi_proxy") return format_text("hydra-{}-{}", pid, process->started);
    pid = process->parent;
  }
  return {};
}

}  // namespace

std::optional<LaunchedRank> read_torchrun(bool alone) {
  const bool ranked = variable("RANK") || variable("WORLD_SIZE");
  const bool address = variable("MASTER_ADDR") || variable("MASTER_PORT");
  const bool elsewhere = variable("FSDP_RENDEZVOUS").has_value();
  if (!ranked && !(alone && (address || elsewhere))) return {};
  if (elsewhere) {
    if (!ranked)
      fail(FSDP_INVALID_ARGUMENT,
           "FSDP_RENDEZVOUS is set, but RANK and WORLD_SIZE are not, nor are the variables of another launcher");
    check_complete("a launcher", {"RANK", "WORLD_SIZE"});
  } else {
    check_complete("a launcher", {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"});
  }
  LaunchedRank launch;
  launch.launcher = "torchrun's variables (RANK, WORLD_SIZE)";
  read_place({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, launch);
  if (!variable("LOCAL_WORLD_SIZE"))
    launch.unplaced =
        variable("LOCAL_RANK") ? "LOCAL_WORLD_SIZE is not set" : "LOCAL_RANK and LOCAL_WORLD_SIZE are not set";
  launch.job = variable("TORCHELASTIC_RUN_ID").value_or("");
  const std::string host = variable("MASTER_ADDR").value_or("");
  if (!variable("LOCAL_WORLD_SIZE") && !elsewhere) launch.one_host = names_loopback(host);
  if (host.empty() || !variable("MASTER_PORT")) return launch;  // FSDP_RENDEZVOUS replaces both
  uint32_t port = value_of("MASTER_PORT", 1, 65535);
  launch.name = format_text("{}:{}", host, port);
  // torch's own store listens at this port itself.
  if (variable("TORCHELASTIC_USE_AGENT_STORE") == "True") port = value_of("MASTER_PORT", 1, 65534) + 1;
  launch.address = host.find(':') == std::string::npos ? format_text("tcp://{}:{}", host, port)
                                                       : format_text("tcp://[{}]:{}", host, port);
  return launch;
}

std::optional<LaunchedRank> read_open_mpi() {
  if (!variable("OMPI_COMM_WORLD_RANK") && !variable("OMPI_COMM_WORLD_SIZE")) return {};
  constexpr const char *name = "Open MPI's mpirun";
  check_complete(name, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                        "OMPI_COMM_WORLD_LOCAL_SIZE"});
  LaunchedRank launch;
  launch.launcher = "Open MPI's variables";
  read_place(
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
      launch);
  for (const char *job : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
    if (launch.job.empty()) launch.job = variable(job).value_or("");
  if (!launch.job.empty()) launch.name = "openmpi-" + launch.job;
  launch.help = launch.one_host
                    ? "neither PMIX_NAMESPACE nor OMPI_MCA_ess_base_jobid names the job: set FSDP_RENDEZVOUS to a name "
                      "of its own (mpirun -x FSDP_RENDEZVOUS)"
                    : several_hosts(name, "mpirun -x FSDP_RENDEZVOUS -x FSDP_JOB_SECRET_FILE");
  return launch;
}

std::optional<LaunchedRank> read_slurm() {
  if (!variable("SLURM_PROCID") || !variable("SLURM_STEP_ID"))
    return {};  // otherwise the process is in a shell of salloc or sbatch
  check_complete("srun", {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"});
  LaunchedRank launch;
  launch.launcher = "Slurm's variables";
  read_place({"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr}, launch);
  const char *nodes = variable("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
  if (!variable(nodes))
    fail(FSDP_INVALID_ARGUMENT, "neither SLURM_STEP_NUM_NODES nor SLURM_NNODES is set: srun sets both");
  launch.one_host = value_of(nodes, 1, launch.size) == 1;
  const uint32_t job = value_of("SLURM_JOB_ID", 0, UINT32_MAX), step = value_of("SLURM_STEP_ID", 0, UINT32_MAX);
  launch.job = format_text("slurm-{}.{}", job, step);
  launch.name = launch.job;
  if (launch.one_host) return launch;
  if (!variable("SLURM_STEP_NODELIST") && !variable("FSDP_RENDEZVOUS"))
    fail(FSDP_INVALID_ARGUMENT, "SLURM_STEP_NODELIST is not set: its first host is where the ranks of {} hosts meet",
         *variable(nodes));
  // The port is below those that the kernel assigns to connections.
  const uint64_t port = 20000 + (uint64_t{job} * 17 + step) % 12000;
  if (const auto list = variable("SLURM_STEP_NODELIST"))
    launch.address = format_text("tcp://{}:{}", first_host(*list), port);
  return launch;
}

std::optional<LaunchedRank> read_mpich() {
  if (!variable("PMI_RANK") && !variable("PMI_SIZE")) return {};
  constexpr const char *name = "MPICH's mpiexec";
  check_complete(name, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  LaunchedRank launch;
  launch.launcher = "MPICH's variables";
  read_place({"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, launch);
  if (launch.one_host) launch.name = hydra_job();
  launch.help = launch.one_host ? "no process above this one is hydra_pmi_proxy, whose process id names the job: set "
                                  "FSDP_RENDEZVOUS to a name of its own (mpiexec -genvlist FSDP_RENDEZVOUS)"
                                : several_hosts(name, "mpiexec -genv FSDP_RENDEZVOUS tcp://HOST:PORT");
  return launch;
}

std::string first_host(const std::string &list) {
  const auto wrong = [&]() -> std::string {
    fail(FSDP_INVALID_ARGUMENT, "SLURM_STEP_NODELIST='{}' has no first host: HOST,... or PREFIX[FIRST-LAST,...],...",
         list);
  };
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const size_t close = list.find(']', i), end = list.find_first_of("-,]", i);
    if (close == std::string::npos || end == i + 1) return wrong();
    host += list.substr(i + 1, end - i - 1);
    i = close;
  }
  if (host.empty() || host.find_first_of(" []") != std::string::npos) return wrong();
  return host;
}

// The world as the variables of any launcher describe it.

namespace {

// The first launcher that has started this process, in the order that fsdp_create_context documents.
std::optional<LaunchedRank> read_launch() {
  if (auto launch = read_torchrun(false)) return launch;
  if (auto launch = read_open_mpi()) return launch;
  if (auto launch = read_slurm()) return launch;
  if (auto launch = read_mpich()) return launch;
  return read_torchrun(true);
}

// Ranks of one host need no network, so the rendezvous for them is a name.
std::string choose_rendezvous(const LaunchedRank &launch) {
  const auto elsewhere = variable("FSDP_RENDEZVOUS");
  if (elsewhere) {
    const MeetingPoint point = parse_meeting_point(*elsewhere);
    if (launch.one_host)
      return point.kind == MeetingPoint::Scheme::name ? point.text
                                                      : "at " + elsewhere->substr(elsewhere->find("://") + 3);
    if (point.kind == MeetingPoint::Scheme::name && !launch.unplaced.empty())
      fail(FSDP_INVALID_ARGUMENT,
           "FSDP_RENDEZVOUS='{}' is a name, for ranks of one host, but {}, so the ranks may be on several: set "
           "LOCAL_RANK and "
           "LOCAL_WORLD_SIZE (to the value of WORLD_SIZE), or give tcp://HOST:PORT or file:///DIRECTORY",
           *elsewhere, launch.unplaced);
    if (point.kind == MeetingPoint::Scheme::name)
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
