// SPDX-License-Identifier: Apache-2.0
#include "run/rank_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "run/failure.h"

namespace run {
namespace {

struct Pipe {
  explicit Pipe(int read_flags = 0) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail("cannot make a pipe for a rank's output (see ulimit -n)");
    from = UniqueFd(ends[0]);
    to = UniqueFd(ends[1]);
    if (read_flags != 0) fcntl(from.get(), F_SETFL, read_flags);
  }
  UniqueFd from, to;
};

// Between fork and exec. Returns only if a step failed, with errno set.
void become_program(const std::vector<std::string> &command, const RankProcess::Environment &environment,
                    pid_t launcher, int out, int err) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || setpgid(0, 0) != 0) return;
  if (getppid() != launcher) _exit(1);  // it died before the line above could ask to be told
  // Ranks are no foreground processes of the terminal: reading from it would stop them.
  const int in = open("/dev/null", O_RDONLY);
  if (in < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) return;
  if (in > 2) close(in);
  for (const auto &[name, value] : environment)
    if ((value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str())) != 0) return;
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // A shell starts background jobs with SIGINT ignored; what is forwarded must arrive all the same.
  for (const int number : {SIGINT, SIGTERM, SIGPIPE}) ::signal(number, SIG_DFL);
  std::vector<char *> arguments;
  for (const auto &word : command) arguments.push_back(const_cast<char *>(word.c_str()));
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
}

std::string explain_start(const std::string &program, int code) {
  const auto text = std::generic_category().message(code);
  if (code == ENOENT && program.find('/') == std::string::npos)
    return fmt::format("cannot start '{}': not found in PATH (a program of this directory is './{}')", program,
                       program);
  return fmt::format("cannot start '{}': {}", program, text);
}

}  // namespace

RankProcess::RankProcess(const std::vector<std::string> &command, const Environment &environment) {
  Pipe out_pipe(O_NONBLOCK), err_pipe(O_NONBLOCK), error_pipe;
  const pid_t launcher = getpid();
  const pid_t child = fork();
  if (child < 0) fail("cannot fork a rank");
  if (child == 0) {
    become_program(command, environment, launcher, out_pipe.to.get(), err_pipe.to.get());
    const int code = errno;
    const ssize_t written = write(error_pipe.to.get(), &code, sizeof code);
    _exit(written == sizeof code ? 127 : 1);
  }
  pid_.value = running_.value = child;
  error_pipe.to.reset();
  int code = 0;
  ssize_t got;
  do got = read(error_pipe.from.get(), &code, sizeof code);
  while (got < 0 && errno == EINTR);
  if (got == sizeof code) {
    waitpid(child, nullptr, 0);
    running_.value = 0;
    throw StartError(code == ENOENT ? 127 : 126, explain_start(command[0], code));
  }
  out = std::move(out_pipe.from);
  err = std::move(err_pipe.from);
  ended = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));  // close-on-exec by itself
  if (ended.get() >= 0) return;
  const int error = errno;
  signal(SIGKILL);
  waitpid(child, nullptr, 0);
  errno = error;
  fail("cannot watch for the end of a rank (pidfd_open)");
}

RankProcess::~RankProcess() {
  if (!running()) return;
  signal(SIGKILL);
  waitpid(pid(), nullptr, 0);
}

void RankProcess::signal(int number) const {
  if (running()) kill(-pid(), number);
}

std::optional<Exit> RankProcess::poll_exit() {
  siginfo_t info{};
  // WNOWAIT keeps the process id reserved, so that the group killed below can be no one else's.
  if (!running() || waitid(P_PID, static_cast<id_t>(pid()), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0)
    return std::nullopt;
  kill(-pid(), SIGKILL);
  waitpid(pid(), nullptr, 0);
  running_.value = 0;
  ended.reset();
  if (info.si_code == CLD_EXITED) return Exit{info.si_status, 0};
  return Exit{128 + info.si_status, info.si_status};
}

}  // namespace run
