// SPDX-License-Identifier: Apache-2.0
// Where ranks come that want to join: takes connections, lets in who proves the secret, has this version of the library
// and says which rank it is, and turns all others away. Never waits.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "membership/job.h"
#include "membership/join/message.h"
#include "membership/wire/endpoint.h"
#include "membership/wire/frame_stream.h"
#include "membership/wire/proof.h"

namespace fsdp::membership {

class Entrance {
 public:
  using Clock = std::chrono::steady_clock;
  // Takes the stream of who may join; of one that it leaves here, the connection ends.
  using Admit = std::function<void(FrameStream &stream, message::Join &join)>;
  // However many strangers come, each has this time to prove the secret.
  static constexpr auto least_time = std::chrono::milliseconds(500);

  // Of rank options.rank. All outlive it.
  Entrance(const WorldOptions &options, Listeners &listeners, const std::string &label)
      : options_(options), listeners_(listeners), label_(label) {}

  void add_polls(std::vector<pollfd> &polls);
  void look(const Admit &admit);
  // To who has proven the secret and is about to join, who would take the end of the connection for a death.
  void dismiss(const message::Refusal &word);
  // Says so on the stream and, in the log, of whom.
  void turn_away(FrameStream &stream, const message::Refusal &word);
  void note_refusal(const std::string &text);
  // What was wrong with one, for who misses ranks.
  const std::string &remark() const noexcept { return remark_; }

 private:
  struct Guest {
    FrameStream stream;
    Handshake proof;
    Clock::time_point since;
    bool welcomed = false;    // has been seen to be proven
    bool introduced = false;  // has said which library it has
    bool proven() const { return proof.state() == Handshake::State::proven; }
  };
  bool has_room();
  bool drop_stranger();
  void accept(const Admit &admit);
  bool hear(Guest &guest, const Admit &admit);  // false: its connection is of no more use
  bool prove(Guest &guest);                     // false: not yet
  bool greet(Guest &guest, const message::Hello &hello);
  void note(const std::string &who, const std::string &why, uint32_t &notes);

  const WorldOptions &options_;
  Listeners &listeners_;
  const std::string &label_;
  std::vector<Guest> guests_;
  uint32_t notes_ = 0, stranger_notes_ = 0;  // in the log
  std::string remark_;
};

// So few bytes fit into any socket's buffer.
void refuse(FrameStream &stream, const message::Refusal &word);

}  // namespace fsdp::membership
