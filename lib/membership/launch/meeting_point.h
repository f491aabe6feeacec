// SPDX-License-Identifier: Apache-2.0
// Where a job meets, as the rendezvous text says: a name (ranks of one host), tcp://host:port, or file:///directory, in
// which rank 0 writes the address that it listens at.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "membership/job.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

// The addresses of a host's name, asked for in bounded time: a resolver may be silent for half a minute and cannot be
// interrupted, so a thread of its own asks.

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
  // same name goes on waiting for it. Addresses that are written as numbers need no name service. Throws what the
  // waiter does.
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

struct MeetingPoint {
  enum class Scheme { name, tcp, file } kind = Scheme::name;
  std::string text;       // all of it
  std::string host;       // tcp
  uint16_t port = 0;      // tcp
  std::string directory;  // file
};

// Throws INVALID_ARGUMENT if it is none of these.
MeetingPoint parse_meeting_point(const std::string &rendezvous);
// "host:port" or "[v6 address]:port". Throws INVALID_ARGUMENT.
std::pair<std::string, uint16_t> parse_host_port(const std::string &text);

// The addresses of its host. Throws INVALID_ARGUMENT, in the words of the name service, at once if there is no such
// name, and after NameLookup::patience if the service cannot answer. Empty, with `problem` set: no answer has come
// until the limit.
std::vector<Endpoint> find_host(const MeetingPoint &point, const WorldOptions &options, NameLookup &names,
                                const Limit &limit, std::string &problem);

// Without a job secret only loopback addresses are served and visited: INVALID_ARGUMENT that says how to set one.
void check_guarded(const Endpoint &at, const WorldOptions &options);

// The address of this host by which others reach it: that of the default route, else the first that is not loopback,
// else loopback.
Endpoint own_address();

// The file in a shared directory that tells where rank 0 listens.
std::string notice_path(const MeetingPoint &point, const WorldOptions &options);
// Replaces the file of a dead job.
class Notice {
 public:
  Notice(std::string path, const Endpoint &at);
  ~Notice();  // removes it, unless another job has replaced it
  Notice(const Notice &) = delete;
  Notice &operator=(const Notice &) = delete;

 private:
  std::string path_, text_;
};
// Empty, with `problem` set, if there is no such file, or nothing of use in it.
std::vector<Endpoint> read_notice(const std::string &path, std::string &problem);

}  // namespace fsdp::membership
