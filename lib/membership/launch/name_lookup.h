// SPDX-License-Identifier: Apache-2.0
// The addresses of a host's name, asked for in bounded time: a resolver may be silent for half a minute and cannot be
// interrupted, so a thread of its own asks.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "membership/wire/endpoint.h"

namespace fsdp::membership {

class NameLookup {
 public:
  // What asks. Replaced in tests.
  using Resolver = std::vector<Endpoint> (*)(const std::string &host, uint16_t port, std::string &problem,
                                             bool *temporary);

  explicit NameLookup(Resolver resolver = Endpoint::resolve) : resolver_(resolver) {}
  // A question without an answer is abandoned: its thread ends when the resolver answers, and touches nothing of this.
  ~NameLookup();
  NameLookup(const NameLookup &) = delete;
  NameLookup &operator=(const NameLookup &) = delete;

  // Empty, with `problem` set, if there are none, or no answer has come until the limit: then the next call for the
  // same name goes on waiting for it. Addresses that are written as numbers ask nobody. Throws what the waiter does.
  std::vector<Endpoint> find(const std::string &host, uint16_t port, const Limit &limit, std::string &problem);
  // The last find() was answered, and another one would be answered the same way: there is no such name, and never was.
  bool is_unknown() const noexcept { return unknown_; }
  // For how long a name service that says that it cannot answer now is asked again.
  static constexpr std::chrono::seconds patience{10};

 private:
  struct Question;
  void ask(const std::string &host, uint16_t port);

  Resolver resolver_;
  bool unknown_ = false;
  bool known_ = false;  // has been answered with an address: that it is gone may be a matter of moments
  std::shared_ptr<Question> question_;
};

}  // namespace fsdp::membership
