// SPDX-License-Identifier: Apache-2.0

#include "transport/message/channel/net.h"

#include <algorithm>
#include <map>
#include <set>

#include "transport/call/launch.h"

namespace fsdp::transport::messages {

Ticket ChannelCollectives::enqueue(Launch &launch, device::Stream &stream) {
  seat_->watch.enter_caller();
  launch.round = channel_->round().number();
  launch.number = channel_->round().enqueue();
  // A sum over the network always waits for peers, so the stream's thread does it.
  if (launch.operation == Operation::reduce_scatter || launch.operation == Operation::all_reduce) stream.give_back();
  stream.run([channel = channel_.get(), pending = &launch] {
    const LaunchReturn guard(*pending);
    channel->run(*pending, false);
  });
  return {};
}

Ticket ChannelCollectives::gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  Launch &launch = launches_.take(Operation::all_gather, tag, gathers.size());
  launch.add(gathers);
  return enqueue(launch, stream);
}

Ticket ChannelCollectives::sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) {
  const Operation operation = operation_of(sums, accumulate, Shape::messages(), channel_->size(), tag);
  Launch &launch = launches_.take(operation, tag, sums.size());
  launch.add(sums, accumulate);
  return enqueue(launch, stream);
}

Ticket ChannelCollectives::broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  require_root(root, channel_->size());
  Launch &launch = launches_.take(Operation::broadcast, tag, 1);
  launch.add_broadcast(data, bytes, root);
  return enqueue(launch, stream);
}

Ticket ChannelCollectives::exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) {
  require_moves(from, moves, Shape::messages(), channel_->size(), tag);
  const uint32_t rank = channel_->rank();
  Launch &launch = launches_.take(Operation::exchange, tag, count_moves(moves, rank));
  launch.add(from, moves, rank, channel_->size());
  return enqueue(launch, stream);
}

Ticket ChannelCollectives::barrier(Tag tag, device::Stream &stream) {
  return enqueue(launches_.take(Operation::barrier, tag, 0), stream);
}

void ChannelCollectives::quiesce() {
  channel_->round().quiesce();
  channel_->tell_end();
}

// After a failure of the job this rank does not tell its peers that it gives up. That message would arrive before the
// verdict, and the peers would name this rank as the cause.
void ChannelCollectives::abandon() {
  const bool failed = seat_->watch.has_failed();
  channel_->round().abandon();
  if (!failed) channel_->tell_end();
}

namespace {

// Sums go from each rank to every other rank, so with more peers they would be slow and need many descriptors.
constexpr size_t max_data_peers = 256;

// Exchanges are agreements of all ranks, most of a few hundred bytes. Among many ranks, their boxes would take much
// memory.
constexpr uint64_t max_short_agreement = 1024;
constexpr size_t max_short_agreement_ranks = 64;
constexpr uint64_t short_agreement_bytes(size_t ranks) noexcept {
  return ranks <= max_short_agreement_ranks ? max_short_agreement : 0;
}

// One sequence of exchanges.
struct Exchanges {
  Exchanges(Transport &transport, const std::shared_ptr<Seat> &seat, std::span<const uint32_t> ranks, uint64_t key,
            uint64_t chunk_bytes)
      : channel(transport, seat, {ranks.begin(), ranks.end()}, key, chunk_bytes, short_agreement_bytes(ranks.size()),
                nullptr, "exchanges") {}
  Channel channel;
  Launch launch;
  bool torn = false;
};

class ChannelNet final : public Net {
 public:
  ChannelNet(std::unique_ptr<Transport> transport, uint64_t chunk_bytes)
      : chunk_bytes_(chunk_bytes), transport_(std::move(transport)) {}

  std::vector<std::byte> address() const override { return transport_->address(); }
  const std::string &warnings() const noexcept override { return transport_->warnings(); }
  uint32_t library_major() const noexcept override { return transport_->library_major(); }
  void join(NetJob job, std::shared_ptr<Seat> seat, device::Device &device) override {
    device_ = &device;
    seat_ = seat;
    transport_->join(std::move(job), std::move(seat));
  }
  std::unique_ptr<Collectives> create_collectives(std::vector<uint32_t> ranks, uint64_t key, const std::string &what,
                                                  bool sums) override {
    expect(ranks, what);
    const auto size = static_cast<uint32_t>(ranks.size());
    const uint64_t chunk = net_chunk_bytes(size, chunk_bytes_);
    return std::make_unique<ChannelCollectives>(
        seat_, std::make_unique<Channel>(*transport_, seat_, std::move(ranks), key, chunk,
                                         sums ? net_short_bytes(size) : 0, sums ? device_ : nullptr, what));
  }
  void exchange(std::span<const uint32_t> ranks, uint64_t key, const void *mine, uint64_t bytes, void *all,
                const char *what) override;
  void broadcast(std::span<const uint32_t> ranks, uint64_t key, void *data, uint64_t bytes, const char *what) override;
  uint64_t scratch_bytes(uint32_t ranks) const noexcept override { return net_scratch_bytes(ranks, chunk_bytes_); }

 private:
  void expect(std::span<const uint32_t> ranks, const std::string &what);
  void connect(std::span<const uint32_t> ranks);
  Exchanges &find(std::span<const uint32_t> ranks, uint64_t key, const char *what);
  void run(Exchanges &exchanges, const char *what);

  uint64_t chunk_bytes_;
  device::Device *device_ = nullptr;  // allocates the memory for sums
  std::shared_ptr<Seat> seat_;
  std::unique_ptr<Transport> transport_;
  std::map<uint64_t, std::unique_ptr<Exchanges>> exchanges_;  // used by the caller's thread
  // The peers of all collectives so far, and this rank: connections last as long as the context.
  std::set<uint32_t> data_peers_;
};

// Each rank sends to every other rank, and has places for the chunks of each.
void ChannelNet::expect(std::span<const uint32_t> ranks, const std::string &what) {
  std::set<uint32_t> peers = data_peers_;
  peers.insert(ranks.begin(), ranks.end());
  if (peers.size() > max_data_peers + 1)
    fail_rank(FSDP_UNSUPPORTED, static_cast<int32_t>(transport_->rank()),
              "{}: rank {} would exchange data with {} ranks of other hosts; this release connects a rank with {} at "
              "most in the life of a context: choose a mesh whose outer axis has no more than {} ranks "
              "(replicate_size), or fewer such meshes",
              what, transport_->rank(), peers.size() - 1, max_data_peers, max_data_peers + 1);
  connect(ranks);
  data_peers_ = std::move(peers);
}

// Tells the leaders of the hosts about these peers, because a cut between two hosts is found only if their leaders
// watch each other.
void ChannelNet::connect(std::span<const uint32_t> ranks) {
  for (const uint32_t rank : ranks)
    if (rank != transport_->rank()) seat_->control.set_data_peer(rank);
  transport_->expect(ranks);
}

// Returns the exchanges with this key, with a launch to fill.
Exchanges &ChannelNet::find(std::span<const uint32_t> ranks, uint64_t key, const char *what) {
  seat_->watch.enter_caller();
  seat_->watch.check();  // a failed context takes no part, and tells its peers
  std::unique_ptr<Exchanges> &found = exchanges_[key];
  if (!found) {
    connect(ranks);
    found = std::make_unique<Exchanges>(*transport_, seat_, ranks, key, chunk_bytes_);
  }
  if (found->torn) fail(FSDP_INVALID_STATE, "{}: an earlier exchange of these ranks did not complete", what);
  if (!std::ranges::equal(ranks, found->channel.ranks())) fail(FSDP_INTERNAL, "{}: other ranks than before", what);
  found->launch.pieces.clear();
  return *found;
}

void ChannelNet::run(Exchanges &exchanges, const char *what) {
  exchanges.torn = true;
  exchanges.launch.round = exchanges.channel.round().number();
  exchanges.launch.number = exchanges.channel.round().enqueue();
  if (!exchanges.channel.run(exchanges.launch, true))  // only if a peer ends a round here, which no peer does
    fail(FSDP_INTERNAL, "rank {}: {}: a peer has ended the exchanges of these ranks", transport_->rank(), what);
  exchanges.torn = false;
}

void ChannelNet::exchange(std::span<const uint32_t> ranks, uint64_t key, const void *mine, uint64_t bytes, void *all,
                          const char *what) {
  Exchanges &exchanges = find(ranks, key, what);
  exchanges.launch.start(Operation::all_gather, {0, what});
  // The gathered bytes are only read.
  const Gather gather{Part::alone(const_cast<void *>(mine)), static_cast<std::byte *>(all), bytes};
  exchanges.launch.add(std::span(&gather, 1));
  run(exchanges, what);
}

void ChannelNet::broadcast(std::span<const uint32_t> ranks, uint64_t key, void *data, uint64_t bytes,
                           const char *what) {
  Exchanges &exchanges = find(ranks, key, what);
  exchanges.launch.start(Operation::broadcast, {0, what});
  exchanges.launch.add_broadcast(Part::alone(data), bytes, 0);
  run(exchanges, what);
}

}  // namespace

std::unique_ptr<Net> create_net(std::unique_ptr<Transport> transport, uint64_t chunk_bytes) {
  return std::make_unique<ChannelNet>(std::move(transport), chunk_bytes);
}

}  // namespace fsdp::transport::messages
