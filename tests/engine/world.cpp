// SPDX-License-Identifier: Apache-2.0
// Ranks as threads and as processes.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "device.h"
#include "harness.h"

namespace harness {

fsdp_context *join(const Scenario &setup, uint32_t rank, const std::string &rendezvous) {
  fsdp_context_options options = place(setup.context);
  options.world_size = setup.ranks;
  options.rank = rank;
  options.rendezvous = rendezvous.c_str();
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_context(&options, &context));
  return context;
}

namespace {

// One call makes all contexts, on one GPU if on any. With a GPU each, every rank joins from its own thread.
class LocalRanks {
 public:
  explicit LocalRanks(const Scenario &setup)
      : contexts(setup.ranks),
        setup_(setup),
        apart_(setup.context.device != FSDP_DEVICE_HOST && !setup.context.device_index &&
               has_gpu_for_each(setup.ranks)) {
    static std::atomic<int> worlds{0};
    name_ = "threads-" + std::to_string(::getpid()) + "-" + std::to_string(++worlds);
    if (apart_) return;
    const fsdp_context_options options = place(setup.context);
    FSDP(fsdp_create_local_contexts(setup.ranks, &options, contexts.data()));
  }
  // In the rank's thread, before all else there.
  fsdp_context *at(uint32_t rank) {
    if (!apart_) return contexts[rank];
    use_gpu(rank);
    return contexts[rank] = join(setup_, rank, name_);
  }

  std::vector<fsdp_context *> contexts;

 private:
  const Scenario &setup_;
  const bool apart_;
  std::string name_;
};

}  // namespace

void run_threads(const Scenario &setup, const std::function<void(uint32_t, fsdp_context *)> &body,
                 std::vector<std::string> *errors) {
  LocalRanks ranks(setup);
  const auto &contexts = ranks.contexts;
  std::vector<std::string> failed(setup.ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < setup.ranks; ++r)
    threads.emplace_back([&, r] {
      stay_on_host(setup.context.device == FSDP_DEVICE_HOST);
      try {
        body(r, ranks.at(r));
      } catch (const std::exception &error) {
        failed[r] = error.what();
        if (failed[r].empty()) failed[r] = "?";
        if (!errors) fsdp_abort_context(contexts[r], "its test body failed");
      }
    });
  for (auto &thread : threads) thread.join();
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
  if (errors) {
    *errors = failed;
    return;
  }
  // The rank that failed first is not one that only saw the abort.
  for (int pass = 0; pass < 2; ++pass)
    for (uint32_t r = 0; r < setup.ranks; ++r)
      if (!failed[r].empty() && (pass || failed[r].find("its test body failed") == std::string::npos))
        throw std::runtime_error("rank " + std::to_string(r) + ": " + failed[r]);
}

std::vector<Outcome> train_threads(const Scenario &setup) {
  std::vector<Outcome> outcomes(setup.ranks);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    train(rank, outcomes[r]);
    FSDP(fsdp_close_context(context));
  });
  return outcomes;
}

namespace {

void write_all(int fd, const void *data, size_t bytes) {
  for (const char *at = static_cast<const char *>(data); bytes;) {
    const ssize_t n = ::write(fd, at, bytes);
    if (n <= 0) ::_exit(3);
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

bool read_all(int fd, void *data, size_t bytes) {
  for (char *at = static_cast<char *>(data); bytes;) {
    const ssize_t n = ::read(fd, at, bytes);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

[[noreturn]] void child(const Scenario &setup, uint32_t rank, const std::string &rendezvous, int fd) {
  try {
    fsdp_context *context = join(setup, rank, rendezvous);
    Outcome outcome;
    {
      Rank self(context, setup);
      train(self, outcome);
      FSDP(fsdp_close_context(context));
    }
    fsdp_destroy_context(context);
    for (const auto &weights : outcome.weights) write_all(fd, weights.data(), weights.size() * sizeof(float));
    for (const auto &grads : outcome.grads) write_all(fd, grads.data(), grads.size() * sizeof(float));
    for (const auto &owned : outcome.owned) write_all(fd, owned.data(), owned.size());
    write_all(fd, outcome.norms.data(), outcome.norms.size() * sizeof(double));
    const uint64_t views = outcome.views.size();
    write_all(fd, &views, sizeof views);
    write_all(fd, outcome.views.data(), views * sizeof(View));
    ::_exit(0);
  } catch (const std::exception &error) {
    ::fprintf(stderr, "rank %u: %s\n", rank, error.what());
    ::_exit(1);
  }
}

}  // namespace

std::vector<Outcome> train_processes(const Scenario &setup) {
  static std::atomic<int> counter{0};
  const std::string rendezvous = "test-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    int ends[2];
    if (::pipe(ends)) throw std::runtime_error("pipe failed");
    const pid_t pid = ::fork();
    if (pid == 0) child(setup, r, rendezvous, ends[1]);
    ::close(ends[1]);
    children.push_back(pid);
    pipes.push_back(ends[0]);
  }
  std::vector<Outcome> outcomes(setup.ranks);
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    Outcome &outcome = outcomes[r];
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) {
        outcome.weights.emplace_back(param.count());
        outcome.grads.emplace_back(param.count());
        outcome.owned.emplace_back(param.count());
      }
    outcome.norms.resize(setup.steps);
    bool complete = true;
    for (auto *values : {&outcome.weights, &outcome.grads})
      for (auto &of_one : *values)
        complete = complete && read_all(pipes[r], of_one.data(), of_one.size() * sizeof(float));
    for (auto &owned : outcome.owned) complete = complete && read_all(pipes[r], owned.data(), owned.size());
    complete = complete && read_all(pipes[r], outcome.norms.data(), outcome.norms.size() * sizeof(double));
    uint64_t views = 0;
    complete = complete && read_all(pipes[r], &views, sizeof views);
    outcome.views.resize(views);
    complete = complete && read_all(pipes[r], outcome.views.data(), views * sizeof(View));
    ::close(pipes[r]);
    int status = 0;
    ::waitpid(children[r], &status, 0);
    if (!complete || status)
      outcome.error = "rank " + std::to_string(r) + " ended with status " + std::to_string(status);
  }
  for (const Outcome &outcome : outcomes)
    if (!outcome.error.empty()) throw std::runtime_error(outcome.error);
  return outcomes;
}

}  // namespace harness
