// SPDX-License-Identifier: Apache-2.0
// A transport's receivers by key, and what comes for one that does not exist here yet, or no more. Under the
// transport's mutex.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "transport/message/channel/receiver.h"

namespace fsdp::transport::messages {

class Receivers {
 public:
  // world_size: until it is set, messages of any rank are kept.
  void set_world_size(size_t world_size) { held_of_.resize(world_size); }
  // What was kept for it comes first. Throws INTERNAL if there is, or was, one with this key.
  void add(uint64_t key, Receiver &receiver, uint32_t rank);
  void remove(uint64_t key) noexcept;
  // NULL: there is none.
  Receiver *find(uint64_t key) const noexcept;
  // For a key without a receiver. False: its sender has sent more of these than it may.
  bool keep(const Header &header, const void *payload, uint64_t bytes);
  // To keys without a receiver: answers "nothing was called", by who can send.
  std::vector<Header> take_questions() noexcept { return std::exchange(questions_, {}); }
  bool has_questions() const noexcept { return !questions_.empty(); }

  template <class Do>
  void each(Do &&act) const {
    for (const auto &[key, receiver] : receivers_) act(*receiver);
  }

 private:
  struct Held {
    Header header;
    std::vector<std::byte> payload;
  };

  std::map<uint64_t, Receiver *> receivers_;
  std::set<uint64_t> known_;  // also those that are gone
  std::vector<Held> held_;
  std::vector<uint32_t> held_of_;  // how many, by sender
  std::vector<Header> questions_;
};

// That a rank which has no such channel gives to a question.
inline Header answer_of_nobody(const Header &question, uint32_t rank) noexcept {
  Header answer = question;
  answer.kind = Kind::answer;
  answer.from = rank;
  answer.bytes = 0;  // nothing was called
  return answer;
}

}  // namespace fsdp::transport::messages
