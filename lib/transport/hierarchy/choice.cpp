// SPDX-License-Identifier: Apache-2.0
#include "transport/hierarchy/choice.h"

#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "membership/wire/secret.h"
#include "transport/names.h"

namespace fsdp::transport {
namespace {

constexpr const char *names[] = {"auto", "tcp", "ucx"};
constexpr const char *checksums[] = {"none", "crc32c"};
constexpr const char *encryptions[] = {"off", "on"};
constexpr const char *variables[] = {"FSDP_NET", "FSDP_NET_CHECKSUM", "FSDP_NET_ENCRYPTION"};

const char *name_of(NetChoice choice) { return names[static_cast<size_t>(choice)]; }

// Is this variable the second of the words? The first one is the default.
bool read_switch(const char *variable, const char *text, const char *const (&words)[2]) {
  const std::string_view word(text && *text ? text : words[0]);
  if (word != words[0] && word != words[1])
    fail(FSDP_INVALID_ARGUMENT, "{} is '{}': {} or {} is expected", variable, word, words[0], words[1]);
  return word == words[1];
}

}  // namespace

NetChoice read_net_choice() {
  const char *text = std::getenv("FSDP_NET");
  if (!text || !*text) return NetChoice::automatic;
  for (const NetChoice choice : {NetChoice::automatic, NetChoice::tcp, NetChoice::ucx})
    if (std::string(text) == name_of(choice)) return choice;
  fail(FSDP_INVALID_ARGUMENT, "FSDP_NET is '{}': auto, tcp or ucx is expected", text);
}

NetProtection read_net_protection() {
  return {read_switch("FSDP_NET_CHECKSUM", std::getenv("FSDP_NET_CHECKSUM"), checksums),
          read_switch("FSDP_NET_ENCRYPTION", std::getenv("FSDP_NET_ENCRYPTION"), encryptions)};
}

const char *NetCensus::word_of(Question question, NetChoice asked, const NetProtection &protection) {
  if (question == Question::asked) return name_of(asked);
  return question == checksum ? checksums[protection.checksum] : encryptions[protection.encryption];
}

std::string NetCensus::Answer::text() const { return format_text("rank {} ({})", rank, host); }

void NetCensus::hear(const Card &card, std::string_view host) {
  const auto keep = [&](std::optional<Answer> &first) {
    if (!first)
      first =
          Answer{count_, std::string(host), card.asked, card.protection, card.ucx_major, std::string(card.obstacle)};
  };
  if (count_ == 0) nonce_bytes_ = card.nonce.size();
  keep(zero_);
  if (card.asked != zero_->asked) keep(different_[asked]);
  if (card.protection.checksum != zero_->protection.checksum) keep(different_[checksum]);
  if (card.protection.encryption != zero_->protection.encryption) keep(different_[encryption]);
  if (card.ucx.empty()) keep(without_ucx_);
  if (card.ucx_major != zero_->ucx_major) keep(other_ucx_);
  ++count_;
}

void NetCensus::check_equal(Question question) const {
  const auto &other = different_[question];
  if (!other) return;
  fail_rank(FSDP_MISMATCH, static_cast<int32_t>(other->rank),
            "{} is '{}' on {} and '{}' on {}: it must be the same everywhere", variables[question],
            word_of(question, zero_->asked, zero_->protection), zero_->text(),
            word_of(question, other->asked, other->protection), other->text());
}

std::string NetCensus::ucx_difference() const {
  return format_text("{} has UCX {} and {} has UCX {}", zero_->text(), zero_->ucx_major, other_ucx_->text(),
                     other_ucx_->ucx_major);
}

NetDecision NetCensus::choose() const {
  if (without_ucx_)
    return {false,
            format_text("messages between hosts over TCP: {} has no RDMA for UCX{}{} (FSDP_NET=ucx to insist)",
                        without_ucx_->text(), without_ucx_->obstacle.empty() ? "" : ", ", without_ucx_->obstacle)};
  if (other_ucx_) return {false, "messages between hosts over TCP: " + ucx_difference()};
  return {true, "messages between hosts by UCX: all have RDMA (FSDP_NET=tcp for TCP)"};
}

NetDecision NetCensus::decide() const {
  for (const Question question : {asked, checksum, encryption}) check_equal(question);
  if (zero_->protection.encryption && nonce_bytes_ != sizeof(Nonce))
    fail_rank(FSDP_MISMATCH, 0, "{} has brought {} random bytes for FSDP_NET_ENCRYPTION=on, {} are expected",
              zero_->text(), nonce_bytes_, sizeof(Nonce));
  if (zero_->asked == NetChoice::tcp) return {false, "messages between hosts over TCP (FSDP_NET=tcp)"};
  if (zero_->asked == NetChoice::automatic) return choose();
  if (without_ucx_)
    fail_rank(FSDP_UNSUPPORTED, static_cast<int32_t>(without_ucx_->rank),
              "{} cannot send messages to other hosts by UCX, as FSDP_NET=ucx asks: {}", without_ucx_->text(),
              without_ucx_->obstacle);
  if (other_ucx_)
    fail_rank(FSDP_MISMATCH, static_cast<int32_t>(other_ucx_->rank),
              "{}: FSDP_NET=ucx needs the same major version everywhere (FSDP_NET=tcp needs none)", ucx_difference());
  return {true, "messages between hosts by UCX (FSDP_NET=ucx)"};
}

}  // namespace fsdp::transport
