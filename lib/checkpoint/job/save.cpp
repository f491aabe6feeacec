// SPDX-License-Identifier: Apache-2.0
// The part of a save that runs in the callers: until all ranks have seen the folder and know what they write.
#include "checkpoint/job/save.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/job/save_keeper.h"
#include "transport/exchange.h"

namespace fsdp::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

// The first rank's message about the checkpoint that it has begun.
struct Beginning {
  WireText<40> id;
  uint64_t sequence = 0;
};

// Begins a save on this rank.
class Beginner {
 public:
  Beginner(const SaveRanks &ranks, const SaveOrder &order, SaveTask &task)
      : team_(ranks.team), world_(ranks.world), waiter_(ranks.waiter), order_(order), task_(task) {
    for (uint32_t place = 0; place < team_.size(); ++place) places_[team_.world_rank(place)] = place;
  }

  void run() {
    transport::agree_on(team_, "what is saved", said());
    make_folder();
    see_folder();
    describe();
    transport::attempt_together(team_, "a save's files", [&] { plan_files(); });
  }

 private:
  bool first() const { return team_.rank() == 0; }
  uint32_t rank() const { return team_.world_rank(team_.rank()); }
  std::string said() const;
  std::string given_name() const { return order_.choice.commit_manifest ? task_.name : ""; }
  void check_ranks(const SavedModel &model) const;
  void check_free(const Folder &folder) const;
  void poll() const;
  std::chrono::milliseconds patience() const;
  void make_folder();
  void see_folder();
  void describe();
  void plan_files();
  uint32_t count_files(ShardKind kind) const;
  ShardToWrite plan_file(const SavedFile &which, std::vector<ShardTensor> tensors, std::vector<ReadRows> rows) const;
  void add_models(const SavedFile &which, std::vector<ShardTensor> &tensors, std::vector<ReadRows> &rows) const;
  void add_bytes(std::vector<ShardTensor> &tensors, std::vector<ReadRows> &rows) const;

  transport::Team &team_;
  transport::World &world_;
  const Waiter &waiter_;
  const SaveOrder &order_;
  SaveTask &task_;
  std::map<uint32_t, uint32_t> places_;  // key: rank of the job; value: its place
};

// A text that must be the same on all ranks, because they would otherwise write parts of different checkpoints.
std::string Beginner::said() const {
  std::string models;
  // A model of all ranks is known to be the same on them. A model of some ranks may differ from those of other ranks.
  for (const SavedModel &model : order_.models)
    if (model.ranks.size() == team_.size())
      models +=
          format_text(", model {} of layout {:016x}", quote_json(model.described.name), model.described.layout_hash);
  for (const SavedBytes &some : order_.bytes)
    models += format_text(", bytes {} {}", quote_json(some.name), some.per_rank ? "of each rank" : "of the first");
  return format_text("step {}, replace {}, commit_manifest {}, keep {}{}", order_.step, order_.choice.replace,
                     order_.choice.commit_manifest, order_.choice.keep, models);
}

void Beginner::check_ranks(const SavedModel &model) const {
  if (model.ranks.size() > team_.size())
    fail(FSDP_INVALID_ARGUMENT, "the model is of {} ranks, and {} save it", model.ranks.size(), team_.size());
  for (const uint32_t rank : model.ranks)
    if (!places_.contains(rank))
      fail(FSDP_INVALID_ARGUMENT, "the model is also of rank {}, which is not among those that save it", rank);
}

// Throws unless the name is free, or the name of a checkpoint, complete or not, that may be replaced.
void Beginner::check_free(const Folder &folder) const {
  if (!folder.has(task_.name)) return;
  if (!folder.has(task_.name + "/" + manifest_name))
    fail(FSDP_INVALID_STATE, "{}: something of that name is there, and it is no checkpoint", folder.shown(task_.name));
  if (!order_.choice.replace)
    fail(FSDP_INVALID_STATE, "{}: there is a checkpoint of that name already; FSDP_SAVE_REPLACE replaces it",
         folder.shown(task_.name));
}

void Beginner::make_folder() {
  Beginning beginning;
  transport::attempt_together(team_, "a save's folder", [&] {
    for (const SavedModel &model : order_.models) check_ranks(model);
    if (!first()) return;
    SaveFolder &there = *task_.folder;
    there.folder = Folder::make(order_.folder);
    there.folder->remove_leftovers();
    // The commit would also find that the name is in use, but only after everything is written.
    if (!order_.choice.commit_manifest) check_free(*there.folder);
    beginning.sequence = there.folder->next_sequence();
    there.made.emplace(*there.folder, given_name());
    beginning.id.set(there.made->id());
  });
  std::vector<Beginning> all(team_.size());
  team_.all_gather(&beginning, sizeof beginning, all.data(), "a save's name");
  task_.id = all[0].id.copy();
  task_.manifest.sequence = all[0].sequence;
}

// Also throws if the job has ended because of other ranks.
void Beginner::poll() const {
  waiter_.poll();
  world_.check();
}

// Shorter than the time for which other ranks wait for this one.
std::chrono::milliseconds Beginner::patience() const {
  return std::chrono::milliseconds(
      std::min<uint64_t>(order_.choice.patience_ms, waiter_.timeout_ms() * uint64_t{3} / 4));
}

// A name that another host has made may appear late.
void Beginner::see_folder() {
  transport::attempt_together(team_, "a save's folder, seen by all", [&] {
    if (first()) return;
    SaveFolder &there = *task_.folder;
    const auto start = Clock::now();
    const auto waited = [&] { return Clock::now() - start; };
    while (!there.folder) try {
        there.folder = Folder(order_.folder);
      } catch (const Error &error) {
        if (error.origin_code != ENOENT) throw;
        if (waited() >= patience())
          fail(FSDP_INVALID_STATE,
               "{}: the folder is not shared: this rank does not see it, and the first one has made it", order_.folder);
        poll();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    there.made.emplace(
        *there.folder, task_.id, static_cast<uint32_t>(patience().count()), [&] { poll(); }, given_name());
  });
}

// The first rank knows the models whose mesh it leads. The first ranks of other meshes describe the other models.
void Beginner::describe() {
  Manifest mine;
  transport::attempt_together(team_, "a save's description", [&] {
    mine = describe_part(order_.models, order_.bytes, rank(), [&](uint32_t of) { return places_.at(of); });
  });
  // If all ranks have a model, the first rank knows that all of them save it.
  bool of_some = false;
  for (const SavedModel &model : order_.models) of_some = of_some || model.ranks.size() < team_.size();
  const uint8_t tells = of_some || (!first() && !mine.bytes.empty());
  std::vector<uint8_t> all(team_.size());
  team_.all_gather(&tells, 1, all.data(), "which ranks describe what is saved");
  std::vector<std::vector<std::byte>> told;
  if (std::ranges::find(all, 1) != all.end()) {
    const std::string text = write_manifest(mine);
    told = team_.all_gather(std::as_bytes(std::span(text)), "what is saved by others than the first rank");
  }
  transport::attempt_together(team_, "a save's manifest", [&] {
    if (!first()) return;
    Manifest &whole = task_.manifest;
    whole.step = order_.step, whole.ranks = team_.size(), whole.keys = order_.keys;
    add_part(whole, mine);
    std::map<uint32_t, std::map<std::string, std::string>> keys{{rank(), mine.keys}};
    for (uint32_t r = 1; r < told.size(); ++r) {
      const std::string_view text(reinterpret_cast<const char *>(told[r].data()), told[r].size());
      const Manifest part = parse_manifest(text, format_text("what rank {} saves", team_.world_rank(r)));
      keys[team_.world_rank(r)] = part.keys;
      add_part(whole, part);
    }
    if (!told.empty()) check_members(keys);
    // A manifest that this refuses could not be loaded: names come twice, or parts are missing.
    parse_manifest(write_manifest(whole), task_.folder->made->shown(manifest_name));
  });
}

ShardToWrite Beginner::plan_file(const SavedFile &which, std::vector<ShardTensor> tensors,
                                 std::vector<ReadRows> rows) const {
  std::set<std::string_view> names;
  for (const ShardTensor &tensor : tensors)
    if (!names.insert(tensor.name).second)
      fail(FSDP_INVALID_ARGUMENT, "this rank saves two tensors {}; a checkpoint has each name once",
           quote_json(tensor.name));
  const NewCheckpoint &made = *task_.folder->made;
  const std::string path = saved_file_name(which.kind, rank(), team_.rank(), which.number);
  const size_t slash = path.rfind('/');
  const std::string folder = slash == path.npos ? "" : path.substr(0, slash);
  ShardToWrite shard{made.make_folder(folder),
                     path.substr(slash == path.npos ? 0 : slash + 1),
                     made.shown(path),
                     plan_shard_file(tensors),
                     {}};
  for (const uint32_t index : shard.file.order) shard.rows.push_back(std::move(rows[index]));
  return shard;
}

void Beginner::add_models(const SavedFile &which, std::vector<ShardTensor> &tensors,
                          std::vector<ReadRows> &rows) const {
  for (const SavedModel &model : order_.models)
    for (WrittenBox &written : model.shards->written_by(model.rank, which.kind, which.number)) {
      const KeptTensor &tensor = *written.tensor;
      const uint64_t skipped = *stored_bytes(*tensor.type, written.first);
      tensors.push_back({tensor.name, tensor.type, std::move(written.box)});
      rows.push_back([&tensor, skipped, &read = model.read](uint64_t at, std::span<std::byte> to) {
        read(tensor, skipped + at, to);
      });
    }
}

void Beginner::add_bytes(std::vector<ShardTensor> &tensors, std::vector<ReadRows> &rows) const {
  for (const SavedBytes &some : order_.bytes) {
    if (!some.per_rank && !first()) continue;
    tensors.push_back({some.per_rank ? bytes_name(some.name, rank()) : bytes_name(some.name),
                       find_element_type("U8"),
                       {{0}, {some.data.size()}}});
    rows.push_back(
        [&some](uint64_t at, std::span<std::byte> to) { std::memcpy(to.data(), some.data.data() + at, to.size()); });
  }
}

uint32_t Beginner::count_files(ShardKind kind) const {
  uint32_t count = kind == ShardKind::bytes;
  for (const SavedModel &model : order_.models) count = std::max(count, model.shards->files(kind));
  return count;
}

void Beginner::plan_files() {
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer, ShardKind::bytes})
    for (SavedFile which{kind, 0}; which.number < count_files(kind); ++which.number) {
      std::vector<ShardTensor> tensors;
      std::vector<ReadRows> rows;
      if (kind == ShardKind::bytes)
        add_bytes(tensors, rows);
      else
        add_models(which, tensors, rows);
      if (tensors.empty()) continue;
      task_.shards.push_back(plan_file(which, std::move(tensors), std::move(rows)));
      task_.files.push_back(which);
    }
}

}  // namespace

Save::Save(const SaveRanks &ranks, SaveOrder order) {
  auto task = std::make_unique<SaveTask>();
  task->order = std::move(order);
  task->name = step_name(task->order.step);
  Beginner(ranks, task->order, *task).run();
  transport::attempt_together(ranks.team, "a save's start",
                              [&] { keeper_ = std::make_unique<Keeper>(ranks, std::move(task)); });
}

Save::~Save() = default;

const std::string &Save::name() const noexcept { return keeper_->name(); }
SaveProgress Save::progress() const noexcept { return keeper_->progress(); }
void Save::await_packed(std::chrono::milliseconds longest) const { keeper_->await_packed(longest); }
void Save::await_end(std::chrono::milliseconds longest) const { keeper_->await_end(longest); }
SaveResult Save::result() const { return keeper_->result(); }
void Save::give_up(fsdp_status status, const char *why) noexcept { keeper_->give_up(status, why); }

SaveResult save(const SaveRanks &ranks, SaveOrder order) {
  Save one(ranks, std::move(order));
  try {
    while (!one.progress().ended) {
      ranks.waiter.poll();
      one.await_end(std::chrono::milliseconds(20));
    }
  } catch (Error &error) {  // this rank's caller stops waiting; the ranks still agree on how to go on
    one.give_up(error.status, error.what());
    error.ends_context = error.status != FSDP_INTERRUPTED;
    throw;
  }
  return one.result();
}

}  // namespace fsdp::checkpoint
