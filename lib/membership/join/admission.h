// SPDX-License-Identifier: Apache-2.0
// The admission of ranks to the rendezvous. Of the connections that have proven the secret it hands on those whose rank
// has this version of the library and asks to join; it turns all others away. Never waits.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "membership/job.h"
#include "membership/join/message.h"
#include "membership/wire/acceptor.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

class Admission {
 public:
  using Clock = std::chrono::steady_clock;
  // Takes the stream of a rank that may join; the connection of one whose stream it leaves here ends.
  using Admit = std::function<void(FrameStream &stream, message::Join &join)>;

  // Of rank options.rank. All outlive it.
  Admission(const WorldOptions &options, std::span<const Fd> listeners, const std::string &label,
            Fd events = Acceptor::make_events());

  void add_polls(std::vector<pollfd> &polls) const;
  void look(const Admit &admit);
  // Tells connections that have proven the secret and have not joined, which would take their end for a death.
  void dismiss(const message::Refused &refused);
  // The same; a library of another version reads Refused alone.
  void dismiss(const Verdict &verdict);
  // Says so on the stream and writes it to the log.
  void turn_away(FrameStream &stream, const message::Refused &word);
  // For the log alone: from is an address, or another text for the end of the connection.
  void note_refusal(const std::string &from, const std::string &why) { known_refusals_.note(from, why); }
  const AcceptPause &pause() const noexcept { return acceptor_.pause(); }
  // What was wrong with the last connection that was refused, for a message about missing ranks; may be empty.
  std::string remark() const;

 private:
  struct Candidate {
    FrameStream stream;
    std::string from;
    Clock::time_point deadline;
    bool introduced = false;  // it has said which library it has
  };
  // False: its connection is of no more use.
  bool hear(Candidate &candidate, const Admit &admit);
  bool greet(Candidate &candidate, const message::Hello &hello);

  const WorldOptions &options_;
  // Of strangers, and of ranks that know the secret: a flood of the former does not hide the latter.
  RefusalLog refusals_, known_refusals_;
  Acceptor acceptor_;
  std::vector<Candidate> candidates_;
};

// So few bytes fit into any socket's buffer.
void say_last(FrameStream &stream, const message::Message &word);

}  // namespace fsdp::membership
