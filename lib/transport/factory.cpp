// SPDX-License-Identifier: Apache-2.0
// Chooses the backend that moves the bytes. Only this file names the backends.
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "membership/join/rank_links.h"
#include "membership/join/rendezvous.h"
#include "membership/seat.h"
#include "membership/tree/dial.h"
#include "membership/tree/leader.h"
#include "membership/wire/secret.h"
#include "transport/hierarchy/cards.h"
#include "transport/hierarchy/team.h"
#include "transport/names.h"
#include "transport/nccl/team.h"
#include "transport/net.h"
#include "transport/shm/team.h"
#include "transport/staging/collectives.h"
#include "transport/team.h"

namespace fsdp::transport {
namespace {

void check_size(uint32_t size, uint32_t most, const char *where) {
  if (size == 0) fail(FSDP_INVALID_ARGUMENT, "a job of 0 ranks");
  if (size > most) fail(FSDP_UNSUPPORTED, "{} ranks {}; this release has at most {}", size, where, most);
}

class NoLinks final : public Links {
 public:
  bool send(uint32_t, Parcel, const Fd &) override { return false; }
  std::optional<Fd> take(Parcel) override { return std::nullopt; }
  void sleep(uint32_t ms) override { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
  void find_dead(const std::function<void(uint32_t)> &) override {}
  std::optional<Fd> meet(Parcel, std::span<const uint32_t>, const std::function<Fd()> &) override {
    return std::nullopt;
  }
};

// The endpoints that a rank opens before it knows whether other hosts take part.
struct OwnEndpoints {
  std::vector<std::byte> card;  // the rank's card
  LeaderListener listener;
  std::shared_ptr<Net> tcp, ucx;  // the Nets that may be used
};

// Keys are derived from the secret; the nonce makes them different for each job.
std::vector<std::byte> make_job_nonce(const WorldOptions &options) {
  if (options.secret.empty())
    fail(FSDP_INVALID_ARGUMENT,
         "FSDP_NET_ENCRYPTION=on needs a job secret: set FSDP_JOB_SECRET_FILE or FSDP_JOB_SECRET on every rank");
  if (options.rank != 0) return {};
  const Nonce nonce = make_nonce();
  const auto bytes = std::as_bytes(std::span(nonce));
  return {bytes.begin(), bytes.end()};
}

// The UCX Net that may be used, if there is one.
struct UcxOffer {
  std::vector<std::byte> address;
  uint32_t major = 0;
  std::string obstacle;  // reason why UCX cannot be used
};

UcxOffer offer_ucx(OwnEndpoints &own, const WorldOptions &options, NetChoice asked, NetProtection protection) {
  if (protection.any())
    return {{}, 0, "UCX has no FSDP_NET_CHECKSUM and no FSDP_NET_ENCRYPTION; TCP has (FSDP_NET=tcp)"};
  try {
    own.ucx = create_ucx_net(options.rank, asked == NetChoice::automatic);
    return {own.ucx->address(), own.ucx->library_major(), {}};
  } catch (const Error &error) {  // matters only if there are other hosts and the user asked for UCX
    if (error.status != FSDP_UNSUPPORTED) throw;
    return {{}, 0, error.message};
  }
}

std::vector<std::byte> fill_card(OwnEndpoints &own, const WorldOptions &options, const std::string &address) {
  own.listener = open_leader_listener(address);
  RankCard card{.asked = read_net_choice(), .leader = own.listener.address, .descriptors = count_descriptors()};
  card.protection = read_net_protection();
  std::vector<std::byte> nonce, tcp;
  if (card.protection.encryption) card.nonce = nonce = make_job_nonce(options);
  if (card.asked != NetChoice::ucx) {
    own.tcp = create_tcp_net(options.rank, address, card.protection);
    card.tcp = tcp = own.tcp->address();
  }
  if (card.asked == NetChoice::tcp) return write_card(card);
  const UcxOffer offer = offer_ucx(own, options, card.asked, card.protection);
  card.ucx = offer.address;
  card.ucx_major = offer.major;
  card.obstacle = offer.obstacle;
  return write_card(card);
}

std::vector<std::byte> make_card(OwnEndpoints &own, const WorldOptions &options, const std::string &address) {
  return own.card = fill_card(own, options, address);
}

// A rank can check only its own entry of the roster. It has opened endpoints according to its own card, but acts
// according to the roster's.
void check_own_card(const Roster &roster, uint32_t rank, const std::vector<std::byte> &card, const Waiter &waiter) {
  if (roster.card_of(rank) == card) return;
  throw waiter.settle(Error(FSDP_MISMATCH,
                            format_text("rank 0 says of rank {} ({}) what that rank has not brought to the rendezvous",
                                        rank, roster.host_of(rank)),
                            static_cast<int32_t>(rank)));
}

// All ranks read the same cards and find the same errors, so no rank needs to tell the others.
JobCards read_cards(Rendezvous &meeting) {
  try {
    return transport::read_cards(meeting.roster);
  } catch (const Error &) {
    if (meeting.watch) meeting.watch->finish();
    throw;
  }
}

// A label that differs between jobs, made from the addresses of all leaders' sockets. It is short, because each proof
// and each heartbeat includes it.
std::string job_label(const WorldOptions &options, const NodePlan &plan) {
  std::string text = format_text("{} (attempt {})", options.rendezvous, options.attempt);
  for (const NodePlace &place : plan.nodes) text += ' ' + place.address;
  std::string label;
  for (const uint8_t byte : digest_of(std::as_bytes(std::span(text)))) label += format_text("{:02x}", byte);
  return label;
}

NodePlan plan_nodes(const WorldOptions &options, const Roster &roster, std::vector<std::string> leaders) {
  NodePlan plan;
  plan.rank = options.rank;
  plan.secret = options.secret;
  plan.heartbeat_timeout_ms = options.heartbeat_timeout_ms;
  plan.node_of = roster.nodes();
  plan.nodes.reserve(leaders.size());
  roster.for_each([&](const message::RosterEntry &entry, bool leads) {
    if (leads) plan.nodes.push_back({entry.rank, std::string(entry.host), std::move(leaders[entry.node])});
  });
  plan.job = job_label(options, plan);
  return plan;
}

// The lowest rank of a host communicates with those of the other hosts, on its monitor's thread.
std::unique_ptr<Monitor> start_monitor(const std::shared_ptr<Seat> &seat, const NodePlan &plan, LeaderListener listener,
                                       const Waiter &waiter) {
  const bool leads = plan.nodes[plan.node()].leader == plan.rank;
  return std::make_unique<Monitor>(seat, leads ? lead_node(*seat, plan, std::move(listener), waiter)
                                               : std::make_unique<CoreDumpReporter>(*seat, plan));
}

// Waits until all leaders are connected and every rank's memory tells which ranks lead. Only then may a failure be
// blamed on a rank.
void await_all(World &world, bool leaders_alone) {
  std::vector<uint32_t> ranks;
  uint32_t nodes = 0;
  for (uint32_t rank = 0; rank < world.size(); ++rank) {
    const bool leads = world.host_of(rank) == nodes;
    nodes += leads;
    if (leads || !leaders_alone) ranks.push_back(rank);
  }
  world.create_team(ranks, "the start of the job")->barrier("the start of the job");
}

std::unique_ptr<World> join_hosts(const WorldOptions &options, Rendezvous &meeting, JobCards cards, OwnEndpoints &own,
                                  const std::shared_ptr<Seat> &seat, const Waiter &waiter, device::Device &device,
                                  uint32_t limit_ms) {
  NodePlan plan = plan_nodes(options, meeting.roster, std::move(cards.leaders));
  meeting.roster = {};
  plan.forming_ms = limit_ms;
  auto monitor = start_monitor(seat, plan, std::move(own.listener), waiter);
  std::shared_ptr<Net> net = std::move(cards.net.ucx ? own.ucx : own.tcp);
  own = {};
  if (!net) fail(FSDP_INTERNAL, "{}, but rank {} has not opened that", cards.net.reason, options.rank);
  net->join({std::move(cards.addresses), options.secret, plan.job, options.heartbeat_timeout_ms, options.log_later,
             std::move(cards.nonce)},
            seat, device);
  meeting.description += "; " + cards.net.reason;
  auto near = std::make_unique<ShmWorld>(seat, device, std::move(meeting.description), std::move(monitor));
  return std::make_unique<HybridWorld>(std::move(near), std::move(net), std::move(plan.node_of));
}

// Tells the ranks of this host, which may wait in memory for this rank. Has no effect if they know already.
void tell_host(Seat &seat, const Error &error) { seat.control.decide(accusation_of(error, seat.rank)); }

}  // namespace

std::shared_ptr<Seat> create_lone_seat(uint32_t rank, uint32_t size, const Waiter &waiter, Failure &failure) {
  const Fd control = Control::create(size, {1, rank == 0});
  return std::make_shared<Seat>(rank, size, control, std::make_unique<NoLinks>(), waiter, failure);
}

const char *nccl_description() noexcept { return nccl::description(); }

namespace {

// If `obstacle` is NULL, an obstacle is thrown as an error.
std::shared_ptr<Team> create_nccl_team(const std::shared_ptr<Team> &team, device::Device &device, const Waiter &waiter,
                                       Failure &failure, std::string *obstacle) {
  auto made = nccl::create_team(team, device, waiter, failure, obstacle);
  if (made) static_cast<DeviceTeam &>(*made).set_transport(DeviceTransport::nccl);
  return made;
}

Note tell_hosts(const Team &team) {
  return {FSDP_LOG_INFO,
          format_text("memory of GPUs travels through the hosts' between the {} ranks from {} to {}, which are on "
                      "several hosts: NCCL serves the ranks of one host",
                      team.size(), team.world_rank(0), team.world_rank(team.size() - 1))};
}

// One rank warns for all. A single rank sends no bytes, so it does not warn.
Note tell_fallback(const Team &team, const std::string &obstacle) {
  const bool warns = team.rank() == 0 && team.size() > 1;
  return {warns ? FSDP_LOG_WARNING : FSDP_LOG_INFO,
          format_text("device memory travels through the host's, without NCCL, which is slower: {} "
                      "(device_transport FSDP_TRANSPORT_STAGING asks for this and silences the warning)",
                      obstacle)};
}

std::shared_ptr<Team> create_staged_team(std::shared_ptr<Team> team, device::Device &device,
                                         const std::optional<Note> &note) {
  auto staged = std::make_shared<staging::StagedTeam>(std::move(team), device);
  if (note) staged->add_note(*note);
  return staged;
}

// The word that NCCL's communicators sum in a barrier.
constexpr uint64_t nccl_word_bytes = sizeof(float);

}  // namespace

void refuse_nccl_between_hosts(size_t ranks, uint32_t first, uint32_t last) {
  fail(FSDP_UNSUPPORTED,
       "FSDP_TRANSPORT_NCCL: the {} ranks from {} to {} exchange memory of GPUs between hosts, where NCCL is not "
       "offered: its sockets are not guarded by the job's secret. Leave device_transport 0, which is NCCL inside each "
       "host and pinned memory of the host between them, or set FSDP_TRANSPORT_STAGING",
       ranks, first, last);
}

std::shared_ptr<Team> create_device_team(std::shared_ptr<Team> team, device::Device &device, DeviceTransport transport,
                                         const Waiter &waiter, Failure &failure) {
  if (device.traits().host_memory) return team;
  if (transport == DeviceTransport::staging) return create_staged_team(std::move(team), device, {});
  const bool asked = transport == DeviceTransport::nccl;
  if (team->spans_hosts()) {
    if (asked) refuse_nccl_between_hosts(team->size(), team->world_rank(0), team->world_rank(team->size() - 1));
    return create_staged_team(team, device, tell_hosts(*team));
  }
  std::string obstacle;
  if (auto made = create_nccl_team(team, device, waiter, failure, asked ? nullptr : &obstacle)) return made;
  return create_staged_team(team, device, tell_fallback(*team, obstacle));
}

const CollectiveTraits &traits_of(DeviceTransport transport) noexcept {
  if (transport == DeviceTransport::none) return shm_traits;
  return transport == DeviceTransport::staging ? device_traits : nccl::nccl_traits;
}

uint64_t device_team_bytes(uint32_t ranks, DeviceTransport transport, uint64_t longest_call) noexcept {
  if (transport == DeviceTransport::none) return 0;
  if (transport == DeviceTransport::nccl) return 2 * nccl_word_bytes;
  return 2 * staging::communicator_bytes(staging::ConveyorSizes().bounded(longest_call, ranks));
}
uint64_t device_message_bytes(uint32_t ranks, DeviceTransport transport, uint64_t longest_call) noexcept {
  if (transport == DeviceTransport::none) return 0;
  if (transport == DeviceTransport::nccl) return nccl_word_bytes;
  return staging::messages_bytes(staging::ConveyorSizes().bounded(longest_call, ranks));
}

std::shared_ptr<LocalJob> create_local_job(uint32_t size) {
  check_size(size, max_ranks_of_a_host, "on one host");
  return std::make_shared<LocalJob>(size);
}

std::unique_ptr<World> create_local_world(std::shared_ptr<LocalJob> job, uint32_t rank, const Waiter &waiter,
                                          Failure &failure, device::Device &device) {
  job->claim(rank);
  auto seat = std::make_shared<Seat>(rank, job->size(), job->control(), std::make_unique<LocalLinks>(job, rank), waiter,
                                     failure);
  return std::make_unique<ShmWorld>(std::move(seat), device,
                                    format_text("{} ranks as threads of one process", job->size()));
}

std::unique_ptr<World> create_process_world(const WorldOptions &options, const Waiter &waiter, Failure &failure,
                                            device::Device &device) {
  check_size(options.size, max_ranks, "in one job");
  if (options.rank >= options.size)
    fail(FSDP_INVALID_ARGUMENT, "rank {} is outside [0, {})", options.rank, options.size);
  if (options.size == 1) return create_local_world(create_local_job(1), 0, waiter, failure, device);
  const auto since = std::chrono::steady_clock::now();
  OwnEndpoints own;
  Rendezvous meeting =
      meet_processes(options, waiter, [&](const std::string &address) { return make_card(own, options, address); });
  const bool alone = meeting.roster.node_count() <= 1;
  if (!alone) check_own_card(meeting.roster, options.rank, own.card, waiter);
  JobCards cards = alone ? JobCards() : read_cards(meeting);
  std::shared_ptr<Seat> seat;
  std::unique_ptr<World> world;
  try {
    seat = std::make_shared<Seat>(options.rank, options.size, meeting.control, std::move(meeting.links), waiter,
                                  failure, options.heartbeat_timeout_ms);
    if (alone)
      world = std::make_unique<ShmWorld>(seat, device, std::move(meeting.description), std::make_unique<Monitor>(seat));
    else
      world =
          join_hosts(options, meeting, std::move(cards), own, seat, waiter, device, forming_limit_ms(options, since));
    for (const uint32_t rank : options.stand_ins) seat->control.set_membership(rank, Membership::member);
    if (!alone) await_all(*world, !options.stand_ins.empty());
  } catch (const Error &error) {
    const Error end = waiter.settle(error);
    if (seat) tell_host(*seat, end);
    throw end;
  }
  if (meeting.watch) meeting.watch->finish();
  return world;
}

}  // namespace fsdp::transport
