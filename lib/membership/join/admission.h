// SPDX-License-Identifier: Apache-2.0
// The admission of ranks to the rendezvous. Connections must prove the secret first. A rank with this version of the
// library that asks to join is passed on to the caller; all others are refused. Never waits.
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
  // Called for a rank that may join. To keep the connection, it moves the stream away; otherwise the connection is
  // closed.
  using Admit = std::function<void(FrameStream &stream, message::Join &join)>;

  // This process is rank options.rank. `options` and the listeners must outlive the admission.
  Admission(const WorldOptions &options, std::span<const Fd> listeners, const std::string &label,
            Fd events = Acceptor::make_events());

  void add_polls(std::vector<pollfd> &polls) const;
  void look(const Admit &admit);
  // Sends this message to the ranks that have proven the secret and have not joined. Without it they would report the
  // end of their connection as a death.
  void dismiss(const message::Refused &refused);
  // Sends a verdict instead. Ranks that have not sent their version get it as Refused, which all versions can read.
  void dismiss(const Verdict &verdict);
  // Sends the refusal on the stream and writes it to the log.
  void turn_away(FrameStream &stream, const message::Refused &word);
  // Only writes to the log. `from`: the address of the other end of the connection, or another text for it.
  void note_refusal(const std::string &from, const std::string &why) { known_refusals_.note(from, why); }
  const AcceptPause &pause() const noexcept { return acceptor_.pause(); }
  // Says what was wrong with the connection that was refused last, for a message about missing ranks; may be empty.
  std::string remark() const;

 private:
  struct Candidate {
    FrameStream stream;
    std::string from;
    Clock::time_point deadline;
    bool introduced = false;  // has sent its version, which is the version of this library
  };
  // Returns false if the connection must be closed, unless `admit` has taken it.
  bool hear(Candidate &candidate, const Admit &admit);
  bool greet(Candidate &candidate, const message::Hello &hello);

  const WorldOptions &options_;
  // Refusals of strangers, and of ranks that know the secret. They are logged separately, so that a flood of strangers
  // hides no rank.
  RefusalLog refusals_, known_refusals_;
  Acceptor acceptor_;
  std::vector<Candidate> candidates_;
};

// Queues and flushes without waiting, because one message fits into any socket's buffer.
void say_last(FrameStream &stream, const message::Message &word);

}  // namespace fsdp::membership
