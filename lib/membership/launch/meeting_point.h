// SPDX-License-Identifier: Apache-2.0
// The place where the ranks of a job meet, parsed from the text of the rendezvous: a name (for ranks of one host),
// tcp://host:port, or file:///directory. Into that directory rank 0 writes the address at which it listens.
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
  // The function that asks the resolver; tests replace it.
  using Resolver = std::vector<Endpoint> (*)(const std::string &host, uint16_t port, std::string &problem,
                                             bool *temporary);

  explicit NameLookup(Resolver resolver = Endpoint::resolve) : resolver_(resolver) {}
  // A question without an answer is abandoned: its thread ends when the resolver answers, and does not touch this
  // object.
  ~NameLookup();
  NameLookup(const NameLookup &) = delete;
  NameLookup &operator=(const NameLookup &) = delete;

  // Returns nothing, and sets `problem`, if there are no addresses or there is no answer before the limit. In the
  // latter case the next call for the same name waits for the same answer. Numeric addresses need no name service.
  // Throws the waiter's errors.
  std::vector<Endpoint> find(const std::string &host, uint16_t port, const Limit &limit, std::string &problem);
  // True if the last find() was answered and a repeated one would get the same answer: the name does not exist, and
  // earlier calls did not find it.
  bool is_unknown() const noexcept { return unknown_; }
  // A name service that cannot answer at the moment is asked again for this long.
  static constexpr std::chrono::seconds patience{10};

 private:
  struct Question;
  void ask(const std::string &host, uint16_t port);

  Resolver resolver_;
  bool unknown_ = false;
  bool known_ = false;  // an address was found once; if it is gone now, it may soon return
  std::shared_ptr<Question> question_;
};

struct MeetingPoint {
  enum class Scheme { name, tcp, file } kind = Scheme::name;
  std::string text;       // the whole text
  std::string host;       // set for tcp
  uint16_t port = 0;      // set for tcp
  std::string directory;  // set for file
};

// Throws INVALID_ARGUMENT if the text has none of these forms.
MeetingPoint parse_meeting_point(const std::string &rendezvous);
// "host:port" or "[v6 address]:port". Throws INVALID_ARGUMENT.
std::pair<std::string, uint16_t> parse_host_port(const std::string &text);

// The addresses of the rendezvous host. Throws INVALID_ARGUMENT with the text of the name service: immediately if the
// name does not exist, and after NameLookup::patience if the service cannot answer. Returns nothing, and sets
// `problem`, if there is no answer before the limit.
std::vector<Endpoint> find_host(const MeetingPoint &point, const WorldOptions &options, NameLookup &names,
                                const Limit &limit, std::string &problem);

// Throws INVALID_ARGUMENT, which says how to set a job secret, if there is none and the address is not a loopback
// address.
void check_guarded(const Endpoint &at, const WorldOptions &options);

// The address at which other hosts reach this one: the address of the default route, else the first that is not a
// loopback address, else the loopback address.
Endpoint own_address();

// The path of the file in a shared directory that has rank 0's address.
std::string notice_path(const MeetingPoint &point, const WorldOptions &options);
// Writes the file for rank 0, and removes it at the end. Replaces the file of a dead job.
class Notice {
 public:
  Notice(std::string path, const Endpoint &at);
  ~Notice();  // removes the file, unless another job has replaced it
  Notice(const Notice &) = delete;
  Notice &operator=(const Notice &) = delete;

 private:
  std::string path_, text_;
};
// Reads the address in the file. Returns nothing, and sets `problem`, if the file does not exist or has no address.
std::vector<Endpoint> read_notice(const std::string &path, std::string &problem);

}  // namespace fsdp::membership
