// SPDX-License-Identifier: Apache-2.0
#include "comm/net.h"

#include <algorithm>

#include "comm/call/message_launch.h"
#include "comm/ucx/communicator.h"

namespace fsdp::comm {
namespace {

using ucx::Channel;
using ucx::Transport;

// One sequence of exchanges.
struct Exchanges {
  Exchanges(Transport &transport, const std::shared_ptr<Seat> &seat, std::span<const uint32_t> ranks, uint64_t key,
            uint64_t chunk_bytes)
      : channel(transport, seat, {ranks.begin(), ranks.end()}, key, chunk_bytes, false, "exchanges") {}
  Channel channel;
  Launch launch;
  bool torn = false;
};

class UcxNet final : public Net {
 public:
  explicit UcxNet(uint32_t rank) : chunk_bytes_(read_net_chunk_bytes()), transport_(rank, chunk_bytes_) {}

  std::vector<std::byte> address() const override { return transport_.address(); }
  const std::string &warnings() const noexcept override { return transport_.warnings(); }
  void join(std::vector<std::vector<std::byte>> addresses, std::shared_ptr<Seat> seat) override {
    seat_ = seat;
    transport_.join(std::move(addresses), std::move(seat));
  }
  std::unique_ptr<MessageCommunicator> create_communicator(std::vector<uint32_t> ranks, uint64_t key,
                                                           const std::string &what, bool sums) override {
    const uint64_t chunk = net_chunk_bytes(static_cast<uint32_t>(ranks.size()), chunk_bytes_);
    return std::make_unique<ucx::UcxCommunicator>(
        seat_, std::make_unique<Channel>(transport_, seat_, std::move(ranks), key, chunk, sums, what));
  }
  void exchange(std::span<const uint32_t> ranks, uint64_t key, const void *mine, uint64_t bytes, void *all,
                const char *what) override;
  uint64_t scratch_bytes(uint32_t ranks) const noexcept override { return net_scratch_bytes(ranks, chunk_bytes_); }

 private:
  uint64_t chunk_bytes_;
  std::shared_ptr<Seat> seat_;
  Transport transport_;
  std::map<uint64_t, std::unique_ptr<Exchanges>> exchanges_;  // of the caller's thread
};

void UcxNet::exchange(std::span<const uint32_t> ranks, uint64_t key, const void *mine, uint64_t bytes, void *all,
                      const char *what) {
  seat_->watch.enter_caller();
  seat_->watch.check();  // a context that failed does not come: its peers are told
  std::unique_ptr<Exchanges> &found = exchanges_[key];
  if (!found) found = std::make_unique<Exchanges>(transport_, seat_, ranks, key, chunk_bytes_);
  Exchanges &exchanges = *found;
  if (exchanges.torn) fail(FSDP_INVALID_STATE, "{}: an earlier exchange of these ranks did not complete", what);
  if (!std::ranges::equal(ranks, exchanges.channel.ranks())) fail(FSDP_INTERNAL, "{}: other ranks than before", what);
  exchanges.torn = true;
  auto *whole = static_cast<std::byte *>(all);
  const auto me = static_cast<uint64_t>(std::ranges::find(ranks, transport_.rank()) - ranks.begin());
  if (bytes) std::memcpy(whole + me * bytes, mine, bytes);
  Launch &launch = exchanges.launch;
  launch.pieces.clear();
  launch.start(Operation::all_gather, {0, what});
  const WholeSpan span{whole, bytes};
  add_spans(launch, std::span(&span, 1));
  launch.round = exchanges.channel.round().number();
  launch.number = exchanges.channel.round().enqueue();
  if (!exchanges.channel.run(launch, true))  // only a peer that ends a round here, which none does
    fail(FSDP_INTERNAL, "rank {}: {}: a peer has ended the exchanges of these ranks", transport_.rank(), what);
  exchanges.torn = false;
}

}  // namespace

std::unique_ptr<Net> create_net(uint32_t rank) { return std::make_unique<UcxNet>(rank); }

#define FSDP_TEXT_OF(x) #x
#define FSDP_TEXT(x) FSDP_TEXT_OF(x)
const char *net_description() noexcept {
  return "yes (needs " FSDP_TEXT(UCP_API_MAJOR) "." FSDP_TEXT(UCP_API_MINOR) " or later at run time)";
}

}  // namespace fsdp::comm
