// SPDX-License-Identifier: Apache-2.0
// Channel's calls that cannot go on: who is to blame.
#include <algorithm>

#include "transport/message/channel/channel.h"

namespace fsdp::transport::messages {
namespace {

using Clock = std::chrono::steady_clock;
// How long a verdict may take that says more than that a connection ended: who notices deaths knows more. Leaders of
// nodes tell a death from a cut network, the latter after the heartbeat limit.
constexpr auto lone_verdict_time = std::chrono::milliseconds(500);
constexpr auto decision_time = std::chrono::milliseconds(1000);

}  // namespace

std::chrono::milliseconds Channel::verdict_time() const noexcept {
  if (!seat_->control.has_leader()) return lone_verdict_time;
  return std::chrono::milliseconds(seat_->pulse.limit_ms()) + decision_time;
}

// Throws if the call cannot go on.
void Channel::look() {
  uint32_t different = size(), failed = size();
  Loss why;
  {
    const auto lock = transport_.lock();
    for (uint32_t r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      if (lanes_[r].different) different = std::min(different, r);
      if (transport_.loss_of(ranks_[r]).text.empty() || !(misses(r) || lanes_[r].in_flight)) continue;
      if (failed < size() && transport_.loss_of(ranks_[failed]).order < transport_.loss_of(ranks_[r]).order) continue;
      why = transport_.loss_of(ranks_[r]);
      failed = r;
    }
    if (failed < size() && failed_since_ == Clock::time_point()) failed_since_ = Clock::now();
    if (failed == size()) failed_since_ = {};
  }
  if (different < size()) condemn_different(different);
  if (failed < size() && Clock::now() - failed_since_ >= verdict_time())
    seat_->watch.condemn(Verdict::died, ranks_[failed],
                         format_text("{}: rank {} cannot be reached: {}",
                                     call_.launch().fingerprint.text(call_.launch().number), ranks_[failed], why.text),
                         why.origin, why.code);
}

// Both sides see the difference and say the same.
void Channel::condemn_different(uint32_t r) {
  const Launch &launch = call_.launch();
  Hello theirs;
  {
    const auto lock = transport_.lock();
    theirs = lanes_[r].hellos[launch.number % hellos_kept];
  }
  const uint32_t first = std::min(r, rank_), second = std::max(r, rank_);
  const auto text = [&](uint32_t of) {
    const Fingerprint &fingerprint = of == rank_ ? launch.fingerprint : theirs.fingerprint;
    return format_text("rank {} called {}", ranks_[of], fingerprint.text(launch.number));
  };
  std::string difference = format_text("{}, {}", text(first), text(second));
  if (theirs.fingerprint.hash == launch.fingerprint.hash)
    difference = format_text("rank {} has chunks of {} bytes, rank {} of {}: FSDP_NET_CHUNK_BYTES differs",
                             ranks_[first], first == rank_ ? chunk_bytes_ : theirs.chunk_bytes, ranks_[second],
                             second == rank_ ? chunk_bytes_ : theirs.chunk_bytes);
  seat_->watch.condemn(Verdict::mismatch, ranks_[second], difference);
}

}  // namespace fsdp::transport::messages
