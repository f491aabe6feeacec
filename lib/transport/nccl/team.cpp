// SPDX-License-Identifier: Apache-2.0

#include "transport/nccl/team.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/settings.h"
#include "transport/exchange.h"
#include "transport/nccl/collectives.h"
#include "transport/nccl/library.h"
#include "transport/team.h"

namespace fsdp::transport::nccl {
namespace {

// The data that a rank sends to the others.
struct NcclCard {
  GpuIdentity gpu;
  int32_t version;         // 0: no NCCL was found
  int32_t gpu_generation;  // the major number of the GPU's compute capability
  uint64_t copied_bytes;   // the value of NCCL_SYM_CE_THRESHOLD
  uint8_t may_share_gpu;
  // Values of the environment, which must be the same on all ranks.
  uint8_t windows, no_windows, copy_engines, ordered, splits;
  uint8_t blocks_all;  // calls block even while communicators are made
  BlockLimits blocks;
  WireText<480> why;
};

bool same_settings(const NcclCard &a, const NcclCard &b) {
  return a.windows == b.windows && a.no_windows == b.no_windows && a.copy_engines == b.copy_engines &&
         a.ordered == b.ordered && a.splits == b.splits && a.blocks == b.blocks;
}

// From this compute capability on, NCCL automatically uses copy engines for gathers over windows, if they have more
// bytes than its variable says, or than 8 MiB. No gather has as many bytes as `max_bytes`.
constexpr int32_t copying_generation = 10;
constexpr uint64_t max_bytes = uint64_t{1} << 40;

// The result is the same on all ranks, because it is computed from all cards.
bool copies_unasked(const Library &library, const std::vector<NcclCard> &cards) {
  const auto copies = [](const NcclCard &card) {
    return card.gpu_generation >= copying_generation && card.copied_bytes < max_bytes;
  };
  return library.since(Library::copies_unasked) && std::any_of(cards.begin(), cards.end(), copies);
}

bool equals(const char *value, const char *expected) { return value && std::strcmp(value, expected) == 0; }

// Reads a variable of NCCL in NCCL's way: a text that is no number is 0. These variables override a communicator's
// configuration.
std::optional<int64_t> nccl_number(const char *name) {
  const char *text = std::getenv(name);
  if (!text || !*text) return std::nullopt;
  errno = 0;
  const long long value = std::strtoll(text, nullptr, 0);
  return errno ? std::nullopt : std::optional<int64_t>(value);
}

NcclCard make_card(const device::Device &device, const BlockLimits &blocks, Choice &choice) {
  NcclCard card{};
  card.blocks = blocks;
  try {
    card.gpu = gpu_identity(device.index());
    card.gpu_generation = gpu_generation(device.index());
    choice.library = load_library();
    card.version = choice.library->version;
  } catch (const Error &error) {
    card.why.set(error.message);
  }
  card.may_share_gpu = nccl_number("NCCL_MULTI_RANK_GPU_ENABLE").value_or(0) != 0;
  card.windows = equals(setting("FSDP_NCCL_WINDOWS"), "1");
  card.no_windows = equals(setting("FSDP_NCCL_WINDOWS"), "0");
  card.copy_engines = equals(setting("FSDP_NCCL_COPY_ENGINES"), "1");
  card.copied_bytes = static_cast<uint64_t>(nccl_number("NCCL_SYM_CE_THRESHOLD").value_or(0));
  const std::optional<int64_t> blocking = nccl_number("NCCL_COMM_BLOCKING");
  card.splits = !equals(setting("FSDP_NCCL_BLOCKING"), "0") && blocking != 0 &&
                nccl_number("NCCL_COMM_SPLIT_SHARE_RESOURCES").value_or(1) == 1;
  card.blocks_all = blocking == 1;
  card.ordered = nccl_number("NCCL_LAUNCH_ORDER_IMPLICIT").value_or(0) != 0;
  return card;
}

// NCCL identifies a GPU by its PCI address, so two slices of one GPU count as one GPU with two ranks.
std::string find_shared_gpu(const Team &host, const std::vector<NcclCard> &cards, uint32_t other, uint32_t r) {
  const NcclCard &card = cards[r];
  if (card.version >= Library::ranks_share_gpu && card.may_share_gpu) return {};
  const std::string need = format_text("needs NCCL {} or later (this is {}) and NCCL_MULTI_RANK_GPU_ENABLE=1 ({})",
                                       version_text(Library::ranks_share_gpu), version_text(card.version),
                                       card.may_share_gpu ? "set" : "not set");
  if (cards[other].gpu == card.gpu)
    return format_text(
        "ranks {} and {} share a GPU, which {}; give each rank one of its own: fsdp_context_options.device_index, "
        "cudaSetDevice before the context is created, or CUDA_VISIBLE_DEVICES",
        host.world_rank(other), host.world_rank(r), need);
  return format_text("ranks {} and {} have slices (MIG) of one GPU ({}), which {}; give each rank a whole GPU",
                     host.world_rank(other), host.world_rank(r), card.gpu.place(), need);
}

// Returns the first obstacle, and advice.
std::string find_obstacle(Team &host, const std::vector<NcclCard> &cards, bool &share) {
  for (uint32_t r = 0; r < cards.size(); ++r) {
    if (cards[r].version == 0) return format_text("rank {}: {}", host.world_rank(r), cards[r].why.view());
    if (cards[r].version != cards[0].version)
      return format_text(
          "rank {} has NCCL {}, rank {} has {}: they must be the same; name one file in FSDP_NCCL_LIBRARY on all of "
          "them",
          host.world_rank(0), version_text(cards[0].version), host.world_rank(r), version_text(cards[r].version));
    if (!same_settings(cards[r], cards[0]))
      return format_text(
          "FSDP_NCCL_WINDOWS, FSDP_NCCL_COPY_ENGINES, FSDP_NCCL_BLOCKING (or NCCL_COMM_BLOCKING or "
          "NCCL_COMM_SPLIT_SHARE_RESOURCES), NCCL_LAUNCH_ORDER_IMPLICIT or a number of blocks "
          "(FSDP_NCCL_..._CTAS, FSDP_NCCL_CGA_CLUSTER_SIZE) differs between rank {} and rank {}: set them alike",
          host.world_rank(0), host.world_rank(r));
    if (cards[r].blocks_all)
      return format_text(
          "rank {} has NCCL_COMM_BLOCKING=1: a rank that waits while communicators are made could not be freed when "
          "another one fails; unset it",
          host.world_rank(r));
    for (uint32_t other = 0; other < r; ++other) {
      if (!cards[other].gpu.same_gpu(cards[r].gpu)) continue;
      share = true;
      if (std::string obstacle = find_shared_gpu(host, cards, other, r); !obstacle.empty()) return obstacle;
    }
  }
  return {};
}

// Features that do not notice an abort are used only on request, because a failure of one rank must free the GPUs of
// all ranks. NCCL's own order of launches is not used if ranks are threads of one process and share a GPU, because the
// ranks would race for the GPU.
Features choose_features(const Library &library, const NcclCard &card, bool share, bool unasked) {
  Features features;
  const bool asked = card.windows || (card.copy_engines && library.since(Library::copy_engines));
  features.windows = !card.no_windows && library.since(asked ? Library::windows : Library::windows_abort) &&
                     (asked || !unasked) && library.ncclCommWindowRegister;
  features.copy_engines = features.windows && card.copy_engines && library.since(Library::copy_engines);
  const bool by_environment = card.ordered && library.since(Library::launch_order_by_environment);
  features.order_implicit = !share && (library.since(Library::launch_order_in_config) || by_environment);
  features.splits = card.splits && library.since(Library::children_block);
  features.blocks = card.blocks;
  return features;
}

// NCCL's own variable overrides a communicator's configuration, and accepts a sum of bits, or names.
bool environment_wants_copies() {
  const char *policy = std::getenv("NCCL_CTA_POLICY");
  if (!policy) return false;
  char *end = nullptr;
  const long bits = std::strtol(policy, &end, 0);
  return (end != policy && (bits & cta_policy_zero) != 0) || ::strcasestr(policy, "ZERO");
}

std::string deaf_to_aborts(const Library &library, const Features &features, bool unasked) {
  if (features.copy_engines || (features.windows && environment_wants_copies())) return "gathers by copy engines";
  if (features.windows && !library.since(Library::windows_abort))
    return format_text("kernels over windows before NCCL {}", version_text(Library::windows_abort));
  if (features.windows && unasked)
    return format_text(
        "the copy engines that NCCL takes for large gathers over windows on GPUs of compute capability {}",
        copying_generation);
  return {};
}

// Says why windows are not used although this version has them.
std::string no_windows(const Features &features, const NcclCard &card, bool unasked) {
  if (features.windows || !unasked || card.no_windows) return {};
  return format_text(
      " (over windows NCCL would take copy engines for large gathers on GPUs of compute capability {} and later, which "
      "notice no abort; NCCL_SYM_CE_THRESHOLD={} keeps it from that)",
      copying_generation, max_bytes);
}

void note(Choice &choice, const NcclCard &card, bool unasked) {
  const Library &library = *choice.library;
  const Features &features = choice.features;
  const std::string blocks = text_of(features.blocks);
  choice.notes.push_back(
      {FSDP_LOG_INFO, format_text("NCCL {} ({}, {}): memory is registered as {}{}, gathers are by {}, launches are "
                                  "ordered by {} and made by {}{}{}",
                                  version_text(library.version), library.path, library.found,
                                  features.windows ? "windows" : "buffers", no_windows(features, card, unasked),
                                  features.copy_engines ? "copy engines where NCCL can" : "kernels",
                                  features.order_implicit ? "NCCL" : "events",
                                  features.splits ? "the thread that calls" : "threads of NCCL's",
                                  blocks.empty() ? "" : ", ", blocks)});
  if (const std::string what = deaf_to_aborts(library, features, unasked); !what.empty())
    choice.notes.push_back(
        {FSDP_LOG_WARNING,
         format_text("{} do not notice when a job has failed: a rank whose peers are gone may hang until its process "
                     "is killed",
                     what)});
  for (const std::string &other : library.others)
    choice.notes.push_back(
        {FSDP_LOG_WARNING,
         format_text("this process has two NCCLs, {} and {}: what one launches on a GPU the other does not "
                     "know of, and both may wait for ever; name one of them in FSDP_NCCL_LIBRARY",
                     library.path, other)});
}

}  // namespace

Choice choose(Team &host, const device::Device &device) {
  Choice choice;
  BlockLimits blocks;
  attempt_together(host, "NCCL's thread blocks", [&] { blocks = read_block_limits(); });
  const NcclCard mine = make_card(device, blocks, choice);
  std::vector<NcclCard> cards(host.size());
  host.all_gather(&mine, sizeof mine, cards.data(), "NCCL of all ranks");
  bool share = false;
  choice.obstacle = find_obstacle(host, cards, share);
  if (!choice.obstacle.empty()) return choice;
  attempt_together(host, "NCCL's thread blocks", [&] { check_block_limits(blocks, *choice.library); });
  const bool unasked = copies_unasked(*choice.library, cards);
  choice.features = choose_features(*choice.library, mine, share, unasked);
  note(choice, mine, unasked);
  return choice;
}

namespace {

// An arena that is registered with NCCL as long as it exists.
class NcclArena final : public PartArena {
 public:
  NcclArena(std::shared_ptr<Communicators> communicators, uint64_t part_bytes, const std::string &what)
      : PartArena(communicators->device(), part_bytes, communicators->rank(), communicators->size(), what),
        communicators_(std::move(communicators)) {}
  ~NcclArena() override { communicators_->drop_memory(own().data()); }

 private:
  std::shared_ptr<Communicators> communicators_;
};

class NcclTeam final : public DeviceTeam {
 public:
  NcclTeam(std::shared_ptr<Team> host, std::shared_ptr<Communicators> communicators)
      : DeviceTeam(std::move(host), communicators->device()), communicators_(std::move(communicators)) {}

  const CollectiveTraits &traits() const noexcept override { return nccl_traits; }

  std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what, View) override {
    std::unique_ptr<NcclArena> arena;
    attempt_together(*host_, what, [&] { arena = std::make_unique<NcclArena>(communicators_, part_bytes, what); });
    communicators_->add_memory(arena->own().data(), arena->own().size_bytes());
    return arena;
  }

  // NCCL always sums all ranks as one block. That is allowed for messages, whose order of additions is not promised.
  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override {
    if (shape.arenas && shape.block && shape.block < size())
      fail(
          FSDP_UNSUPPORTED,
          "{}: sums in blocks of {} ranks by NCCL, which adds fp32 in an order of its own; FSDP_TRANSPORT_STAGING does "
          "it",
          what, shape.block);
    std::unique_ptr<Collectives> made;
    auto launches = communicators_->open(what, what.starts_with("gather"));
    attempt_together(*host_, what,
                     [&] { made = std::make_unique<NcclCollectives>(communicators_, std::move(launches), shape); });
    return made;
  }

  void register_memory(std::byte *data, uint64_t bytes, const std::string &) override {
    communicators_->add_memory(data, bytes);
  }
  std::vector<Note> take_news() override { return communicators_->take_news(); }
  bool ends_alike() override { return communicators_->ends_alike(); }
  void cut() noexcept override { communicators_->cut(); }
  void renew() override { communicators_->renew(); }

 private:
  std::shared_ptr<Communicators> communicators_;
};

}  // namespace

std::shared_ptr<Team> create_team(std::shared_ptr<Team> host, device::Device &device, const Waiter &waiter,
                                  Failure &failure, std::string *obstacle) {
  Choice choice = choose(*host, device);
  if (!choice.obstacle.empty()) {
    if (!obstacle) {
      await_readers(*host);
      fail(FSDP_UNSUPPORTED, "NCCL cannot serve these ranks: {}", choice.obstacle);
    }
    *obstacle = std::move(choice.obstacle);
    return nullptr;
  }
  std::shared_ptr<Communicators> communicators;
  attempt_together(*host, "NCCL", [&] {
    communicators =
        std::make_shared<Communicators>(host, device, std::move(choice.library), choice.features, waiter, failure);
  });
  auto team = std::make_shared<NcclTeam>(std::move(host), std::move(communicators));
  for (Note &note : choice.notes) team->add_note(std::move(note));
  return team;
}

const char *description() noexcept { return "opened at run time (2.19 or later)"; }

}  // namespace fsdp::transport::nccl
