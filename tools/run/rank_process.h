// SPDX-License-Identifier: Apache-2.0
// One rank: a process in a process group of its own, with pipes for its output. Nothing of it outlives this object, and
// the kernel kills it if fsdp-run itself is killed.
#pragma once

#include <sys/types.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "run/unique_fd.h"

namespace run {

// The program could not be started: `status` is what a shell would exit with (127 not found, 126 not executable).
struct StartError : std::runtime_error {
  StartError(int status, const std::string &message) : std::runtime_error(message), status(status) {}
  int status;
};

struct Exit {
  int status = 0;  // of exit(), or 128 + signal
  int signal = 0;  // 0: it was not killed
};

class RankProcess {
 public:
  // Variables to set; without a value, to take away.
  using Environment = std::vector<std::pair<std::string, std::optional<std::string>>>;

  // Returns when the program is running. command is its name (looked up in PATH) and arguments.
  RankProcess(const std::vector<std::string> &command, const Environment &environment);
  RankProcess(RankProcess &&other) noexcept = default;
  RankProcess &operator=(RankProcess &&other) = delete;
  ~RankProcess();

  pid_t pid() const { return pid_.value; }
  bool running() const { return running_.value != 0; }
  // Sends a signal to the process and its descendants of the same process group.
  void signal(int number) const;
  // Has it ended? Whatever it left in its process group is killed then.
  std::optional<Exit> poll_exit();

  UniqueFd out, err;  // ends to read from, non-blocking
  UniqueFd ended;     // a pidfd: readable when the process has ended

 private:
  // A number that moves: the source is left with 0.
  struct Moved {
    pid_t value = 0;
    Moved() = default;
    Moved(Moved &&other) noexcept : value(std::exchange(other.value, 0)) {}
  };
  Moved pid_, running_;
};

}  // namespace run
