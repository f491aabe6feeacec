// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a job meet, as the text of the rendezvous says: a name (ranks of one host), tcp://host:port, or
// file:///directory. In that directory rank 0 writes the address at which it listens.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "membership/job.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

// Looks up the addresses of a host's name in bounded time. A resolver may be silent for half a minute and cannot be
// interrupted, so each question runs on a thread of its own.

class NameLookup {
 public:
  // The function that asks; tests replace it.
  using Resolver = std::vector<Endpoint> (*)(const std::string &host, uint16_t port, std::string &problem,
                                             bool *temporary);

  explicit NameLookup(Resolver resolver = Endpoint::resolve) : resolver_(resolver) {}
  // A question without an answer is abandoned: its thread ends when the resolver answers, and does not touch this
  // object.
  ~NameLookup();
  NameLookup(const NameLookup &) = delete;
  NameLookup &operator=(const NameLookup &) = delete;

  // Empty, with `problem` set, if there are no addresses or if no answer has come until the limit. In the latter case
  // the next call for the same name waits for the same answer. Addresses that are written as numbers need no name
  // service. Throws what the waiter throws.
  std::vector<Endpoint> find(const std::string &host, uint16_t port, const Limit &limit, std::string &problem);
  // True if the last find() was answered, and another one would get the same answer: there is no such name, and earlier
  // calls found none.
  bool is_unknown() const noexcept { return unknown_; }
  // For how long a name service is asked again that cannot answer at the moment.
  static constexpr std::chrono::seconds patience{10};

 private:
  struct Question;
  void ask(const std::string &host, uint16_t port);

  Resolver resolver_;
  bool unknown_ = false;
  bool known_ = false;  // an address was found once: if it is gone now, it may soon be back
  std::shared_ptr<Question> question_;
};

struct MeetingPoint {
  enum class Scheme { name, tcp, file } kind = Scheme::name;
  std::string text;       // the whole text
  std::string host;       // for tcp
  uint16_t port = 0;      // for tcp
  std::string directory;  // for file
};

// Throws INVALID_ARGUMENT if the text has none of these forms.
MeetingPoint parse_meeting_point(const std::string &rendezvous);
// "host:port" or "[v6 address]:port". Throws INVALID_ARGUMENT.
std::pair<std::string, uint16_t> parse_host_port(const std::string &text);

// The addresses of the rendezvous host. Throws INVALID_ARGUMENT with the text of the name service: at once if there is
// no such name, and after NameLookup::patience if the service cannot answer. Empty, with `problem` set, if no answer
// has come until the limit.
std::vector<Endpoint> find_host(const MeetingPoint &point, const WorldOptions &options, NameLookup &names,
                                const Limit &limit, std::string &problem);

// Throws INVALID_ARGUMENT that says how to set a job secret, if there is none and the address is not a loopback
// address.
void check_guarded(const Endpoint &at, const WorldOptions &options);

// The address of this host by which others reach it: the address of the default route, else the first that is not a
// loopback address, else the loopback address.
Endpoint own_address();

// The file in a shared directory that tells where rank 0 listens.
std::string notice_path(const MeetingPoint &point, const WorldOptions &options);
// Writes this file, and removes it at the end. Replaces the file of a dead job.
class Notice {
 public:
  Notice(std::string path, const Endpoint &at);
  ~Notice();  // removes the file, unless another job has replaced it
  Notice(const Notice &) = delete;
  Notice &operator=(const Notice &) = delete;

 private:
  std::string path_, text_;
};
// Reads the address in this file. Empty, with `problem` set, if there is no such file or no address in it.
std::vector<Endpoint> read_notice(const std::string &path, std::string &problem);

}  // namespace fsdp::membership
