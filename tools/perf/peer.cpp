// SPDX-License-Identifier: Apache-2.0
#include "perf/peer.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <system_error>
#include <thread>

extern char **environ;

namespace perf {
namespace {

std::string directory_of_this_program() {
  char path[PATH_MAX] = {};
  if (::readlink("/proc/self/exe", path, sizeof path - 1) < 0) return ".";
  const std::string whole = path;
  return whole.substr(0, whole.rfind('/'));
}

std::vector<std::string> mpirun(uint32_t ranks, const std::vector<std::string> &transport) {
  // Ranks that share cores must let each other run; others get cores of their own, as fsdp-perf's do.
  const bool crowded = ranks > std::thread::hardware_concurrency();
  std::vector<std::string> command = {"mpirun",    "--allow-run-as-root",    "-n", std::to_string(ranks),
                                      "--bind-to", crowded ? "none" : "core"};
  command.insert(command.end(), transport.begin(), transport.end());
  if (crowded) command.insert(command.end(), {"--oversubscribe", "--mca", "mpi_yield_when_idle", "1"});
  return command;
}

int start(const std::vector<std::string> &command) {
  std::vector<char *> arguments;
  for (const std::string &word : command) arguments.push_back(const_cast<char *>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t process = -1;
  const int code = ::posix_spawnp(&process, arguments[0], nullptr, nullptr, arguments.data(), environ);
  if (code != 0) throw std::system_error(code, std::generic_category(), command[0]);
  return process;
}

}  // namespace

// The file has no name that could be left behind: the job's ranks open it through this process.
PeerJob::PeerJob(std::string name, std::vector<std::string> command)
    : name_(std::move(name)), owner_(::getpid()), file_(::memfd_create("fsdp-perf", MFD_CLOEXEC)) {
  if (!file_ || ::ftruncate(file_.get(), sizeof(peer_memory)) != 0)
    throw std::system_error(errno, std::generic_category(), "memory shared with the peer");
  command.push_back(directory_of_this_program() + "/fsdp-perf-mpi");
  command.push_back(fmt::format("/proc/{}/fd/{}", owner_, file_.get()));
  process_ = start(command);
  process_fd_ = fsdp::Fd(static_cast<int>(::syscall(SYS_pidfd_open, process_, 0)));
  void *data = ::mmap(nullptr, sizeof(peer_memory), PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (!process_fd_ || data == MAP_FAILED) {
    ::kill(process_, SIGTERM);
    throw std::system_error(errno, std::generic_category(), name_);
  }
  memory_ = static_cast<peer_memory *>(data);
}

PeerJob::~PeerJob() {
  if (::getpid() != owner_) return;
  tell(PEER_QUIT);
  for (int tries = 0; tries < 50 && ::waitpid(process_, nullptr, WNOHANG) == 0; ++tries) {
    ::usleep(100'000);
    if (tries == 30) ::kill(process_, SIGTERM);
  }
  ::munmap(memory_, sizeof(peer_memory));
}

// Any rank may ask, not only its parent.
bool PeerJob::ended() const {
  pollfd state{process_fd_.get(), POLLIN, 0};
  return ::poll(&state, 1, 0) > 0;
}

void PeerJob::tell(uint32_t operation) {
  memory_->operation = operation;
  __atomic_store_n(&memory_->count, 0u, __ATOMIC_RELAXED);
  __atomic_add_fetch(&memory_->command, 1u, __ATOMIC_RELEASE);
  ::syscall(SYS_futex, &memory_->command, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

double PeerJob::measure(PeerOperation operation, uint64_t bytes, uint64_t repeats, uint32_t ranks,
                        double limit_seconds) {
  memory_->bytes = bytes;
  memory_->repeats = repeats;
  tell(static_cast<uint32_t>(operation));
  const double start = now();
  const timespec slice{0, 100'000'000};
  for (uint32_t seen; (seen = __atomic_load_n(&memory_->done, __ATOMIC_ACQUIRE)) != memory_->command;) {
    if (now() - start > limit_seconds) throw std::runtime_error(fmt::format("{} does not answer", name_));
    if (ended()) throw std::runtime_error(fmt::format("{} ended early", name_));
    ::syscall(SYS_futex, &memory_->done, FUTEX_WAIT, seen, &slice, nullptr, 0);
  }
  return *std::max_element(memory_->seconds, memory_->seconds + ranks);
}

Peers::Peers(uint32_t ranks) : ranks_(ranks) {
  const std::pair<const char *, std::vector<std::string>> transports[] = {
      {"Open MPI, shared memory", {"--mca", "pml", "ob1", "--mca", "btl", "self,vader"}},
      {"Open MPI, UCX", {"--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"}},
  };
  for (const auto &[name, transport] : transports) try {
      auto job = std::make_unique<PeerJob>(name, mpirun(ranks, transport));
      job->measure(PeerOperation::barrier, 0, 10, ranks_, 30);
      jobs_.push_back(std::move(job));
    } catch (const std::exception &error) {
      fmt::print(stderr, "fsdp-perf: no {}: {}\n", name, error.what());
    }
  if (jobs_.empty()) throw std::runtime_error("--mpi: Open MPI cannot be started; see above");
}

void Peers::prepare(Lab &lab, const PeerCall &call, double seconds) {
  bytes_ = call.bytes;
  contenders_.clear();
  for (const auto &job : jobs_) {
    contenders_.push_back({job.get(), call.operation});
    if (call.other) contenders_.push_back({job.get(), *call.other});
  }
  if (lab.rank() == 0)
    for (Contender &contender : contenders_) {
      const auto time = [&](uint64_t repeats) {
        return contender.job->measure(contender.operation, bytes_, repeats, ranks_) / static_cast<double>(repeats);
      };
      time(2);
      contender.repeats =
          static_cast<uint64_t>(std::clamp(std::ceil(seconds / std::max(time(4), 1e-7)), 1.0, 10'000.0));
    }
  lab.meet();
}

void Peers::take(Lab &lab, std::vector<std::vector<double>> &samples) {
  samples.resize(contenders_.size());
  for (size_t i = 0; i < contenders_.size(); ++i) {
    const Contender &contender = contenders_[i];
    double mine = 0;
    if (lab.rank() == 0)
      mine = contender.job->measure(contender.operation, bytes_, contender.repeats, ranks_) /
             static_cast<double>(contender.repeats);
    samples[i].push_back(lab.longest(mine));
  }
}

}  // namespace perf
