// SPDX-License-Identifier: Apache-2.0
// Sockets at which ranks come, of whatever family, taken from as one.
#pragma once

#include <poll.h>

#include <vector>

#include "membership/wire/accept_pause.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

class Listeners {
 public:
  void add(Fd listener) { all_.push_back(std::move(listener)); }
  void clear() noexcept { all_.clear(); }
  void add_polls(std::vector<pollfd> &polls) const {
    if (!pause_.over()) return;
    for (const Fd &listener : all_) polls.push_back({listener.get(), POLLIN, 0});
  }
  // Empty: nobody is there, or no more can be taken at the moment.
  Fd accept() {
    if (!pause_.over()) return {};
    for (const Fd &listener : all_) {
      Fd socket = accept_from(listener);
      if (socket) {
        pause_.clear();
        return socket;
      }
      if (pause_.note(errno)) return {};
    }
    return {};
  }
  const AcceptPause &pause() const noexcept { return pause_; }

 private:
  std::vector<Fd> all_;
  AcceptPause pause_;
};

}  // namespace fsdp::membership
