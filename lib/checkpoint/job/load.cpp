// SPDX-License-Identifier: Apache-2.0

#include "checkpoint/job/load.h"

#include <algorithm>
#include <cerrno>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/weight_files.h"
#include "checkpoint/format/shard_file.h"
#include "checkpoint/job/gather_shares.h"
#include "checkpoint/job/open.h"
#include "transport/exchange.h"

namespace fsdp::checkpoint {

namespace {

// The checkpoint that the first rank has chosen.
struct ChosenName {
  WireText<64> name;         // empty: no candidate is left
  uint64_t passed_over = 0;  // number of newer unreadable checkpoints since the last choice
};

// Joins texts into one; none of them has a NUL.
std::string join_texts(const std::vector<std::string> &texts) {
  std::string all;
  for (const std::string &text : texts) (all += text) += '\0';
  return all;
}

std::vector<std::string> split_texts(std::span<const std::byte> bytes) {
  std::vector<std::string> texts;
  std::string_view left(reinterpret_cast<const char *>(bytes.data()), bytes.size());
  for (size_t end = left.find('\0'); end != left.npos; end = left.find('\0')) {
    texts.emplace_back(left.substr(0, end));
    left.remove_prefix(end + 1);
  }
  return texts;
}

// Removes other models from the manifest. Throws INVALID_ARGUMENT if it is unclear which model is wanted.
void restrict_to_model(Manifest &manifest, const std::optional<std::string> &name, const std::string &shown) {
  const std::vector<ManifestModel> &models = manifest.models;
  if (!name && models.size() <= 1) return;
  const auto found = name ? std::ranges::find(models, *name, &ManifestModel::name) : models.end();
  if (found == models.end()) {
    std::string names;
    for (const ManifestModel &model : models) names += (names.empty() ? "" : ", ") + quote_json(model.name);
    fail(FSDP_INVALID_ARGUMENT, "{}: has {} models ({}){}", shown, models.size(), names,
         name ? format_text(", and none is named {}", quote_json(*name))
              : "; fsdp_load_checkpoint_model loads one of them by its name");
  }
  const auto number = static_cast<uint32_t>(found - models.begin());
  std::erase_if(manifest.tensors, [&](const ManifestTensor &tensor) { return tensor.model != number; });
}

// One load, on this rank.
class Loading {
 public:
  Loading(transport::Team &team, const Waiter &waiter, const std::string &path, const LoadedModel &model,
          const LoadOptions &options)
      : team_(team), waiter_(waiter), path_(path), model_(model), options_(options) {}

  LoadResult run();

 private:
  bool first() const { return team_.rank() == 0; }
  void find_candidates();
  void list_candidates();
  bool choose(size_t number);
  std::vector<std::string> pass_over(size_t number);
  void read_manifest();
  void note_damage(const Error &error);
  LoadPlan plan_to_fit();
  void read(const LoadPlan &plan);
  void share(const LoadPlan &plan);

  transport::Team &team_;
  const Waiter &waiter_;
  const std::string &path_;
  const LoadedModel &model_;
  const LoadOptions &options_;
  std::optional<Folder> folder_;
  Candidates found_;  // set on the first rank
  Fd checkpoint_;
  LoadResult result_;
};

// Finds the candidates: the checkpoint itself, or those in the folder. Only the first rank decides that there are none,
// because other ranks may see its folder later.
void Loading::find_candidates() {
  transport::agree_on(
      team_, "what is loaded",
      format_text("layout {:016x}, states {}, allow_missing {}, allow_unexpected {}, fall_back {}, if_any {}, "
                  "one_replica {}, model {}",
                  model_.layout_hash, options_.states, options_.allow_missing, options_.allow_unexpected,
                  options_.fall_back, options_.if_any, options_.one_replica,
                  options_.model ? quote_json(*options_.model) : "any"));
  transport::attempt_together(team_, "a load's folder", [&] {
    if (model_.shards.ranks() != team_.size())
      fail(FSDP_INVALID_ARGUMENT, "the model is of {} ranks, and {} load it", model_.shards.ranks(), team_.size());
    if (first()) list_candidates();
  });
  compare_folders(team_, path_, found_);
}

void Loading::list_candidates() {
  try {
    folder_.emplace(path_);
  } catch (const Error &error) {
    if (options_.if_any && error.origin_code == ENOENT) return;
    throw;
  }
  found_ = candidates_of(*folder_);
  if (found_.names.empty() && !(options_.if_any && found_.unreadable.empty())) refuse_empty(path_, found_.unreadable);
  if (!options_.fall_back) require_newest_is_known(path_, found_.unreadable, ", or allow FSDP_LOAD_FALLBACK");
}

// On the first rank: returns the reasons for skipping unreadable checkpoints that may be newer than this candidate, but
// not newer than the previous candidate.
std::vector<std::string> Loading::pass_over(size_t number) {
  std::vector<std::string> texts;
  for (const UnreadableCheckpoint &one : found_.unreadable)
    if (one.newer == number) texts.push_back(one.why.message);
  return texts;
}

// Returns false if no candidate is left.
bool Loading::choose(size_t number) {
  ChosenName mine;
  if (number < found_.names.size()) mine.name.set(found_.names[number]);
  const std::vector<std::string> texts = pass_over(number);
  mine.passed_over = texts.size();
  std::vector<ChosenName> all(team_.size());
  team_.all_gather(&mine, sizeof mine, all.data(), "a load's checkpoint");
  result_.name = all[0].name.copy();
  if (all[0].passed_over) {
    const std::string text = join_texts(texts);
    const auto told = team_.all_gather(std::as_bytes(std::span(text)), "what a load passes over");
    for (std::string &one : split_texts(told[0])) result_.passed_over.push_back(std::move(one));
  }
  return !result_.name.empty();
}

void Loading::read_manifest() {
  std::string sum;
  transport::attempt_together(team_, "a load's manifest", [&] {
    if (!folder_) folder_.emplace(path_);
    checkpoint_ = open_folder(folder_->fd(), result_.name, folder_->shown(result_.name));
    result_.manifest = folder_->read_manifest(result_.name, &sum);
  });
  transport::agree_on(team_, "the manifest of " + result_.name, sum);
}

// The list may be too long to exchange between ranks, so each rank throws its own.
LoadPlan Loading::plan_to_fit() {
  LoadPlan plan;
  std::string text;
  transport::attempt_together(team_, "a load's plan", [&] {
    restrict_to_model(result_.manifest, options_.model, folder_->shown(result_.name));
    plan = plan_load(model_.shards, result_.manifest, team_.rank(), {options_.states, options_.one_replica});
    text = list_misfits(plan, options_);
  });
  if (!text.empty()) fail(FSDP_INVALID_ARGUMENT, "{} does not fit the model{}", folder_->shown(result_.name), text);
  return plan;
}

void Loading::read(const LoadPlan &plan) {
  const std::function<void()> poll = [&] { waiter_.poll(); };
  RowTaker taker(model_.shards, model_.write, poll);
  model_.begin();
  for (const LoadedFile &rows : plan.files) {
    const ManifestFile &file = result_.manifest.files[rows.file];
    taker.take(open_shard(checkpoint_.get(), file, folder_->shown(result_.name) + "/" + file.name), rows.rows);
  }
  result_.wanted_bytes = taker.wanted_bytes(), result_.read_bytes = taker.read_bytes();
}

// All ranks share the reads of whole tensors. Other tensors are shared by the ranks at one place on the inner axis.
void Loading::share(const LoadPlan &plan) {
  std::vector<const KeptTensor *> of_all, of_outer;
  for (const uint32_t number : plan.shared) {
    const KeptTensor &tensor = model_.shards.tensors()[number];
    (tensor.owned() == memory::Extent::whole ? of_all : of_outer).push_back(&tensor);
  }
  std::vector<std::byte> staging;
  transport::attempt_together(team_, "a load's memory", [&] { staging.resize(gather_bytes(team_.size())); });
  const KeptAccess shared{model_.shards, team_.rank(), model_.read, model_.write, staging};
  std::optional<Error> failure;
  if (!of_all.empty()) failure = gather_shares(team_, shared, of_all);
  if (!of_outer.empty()) {
    const auto outer = gather_shares(*model_.outer, shared, of_outer);
    if (!failure) failure = outer;
  }
  transport::attempt_together(team_, "a load's shared rows", [&] {
    if (failure) throw Error(*failure);
  });
}

// Another checkpoint is tried only after errors that a rank has found in its files, not after the loss of the job.
void Loading::note_damage(const Error &error) {
  const bool damaged = error.status == FSDP_INVALID_ARGUMENT || error.status == FSDP_SYSTEM;
  if (!options_.fall_back || !damaged || waiter_.failure().failed()) throw;
  result_.passed_over.push_back(error.message);
}

LoadResult Loading::run() {
  find_candidates();
  for (size_t number = 0; choose(number); ++number) {
    try {
      read_manifest();
    } catch (const Error &error) {
      note_damage(error);
      continue;
    }
    const LoadPlan plan = plan_to_fit();
    try {
      transport::attempt_together(team_, "a load's files", [&] { read(plan); });
      if (options_.one_replica) share(plan);
    } catch (const Error &error) {
      note_damage(error);
      continue;
    }
    result_.tensors = plan;
    for (const UnreadableCheckpoint &one : found_.unreadable)
      if (one.newer > number) result_.older_unreadable.push_back(one.why.message);
    return std::move(result_);
  }
  transport::attempt_together(team_, "a load's checkpoints", [&] {
    if (first() && !result_.passed_over.empty())
      fail(FSDP_INVALID_ARGUMENT, "{}: no checkpoint in this folder is whole: {}", path_,
           fmt::join(result_.passed_over, "; "));
  });
  return std::move(result_);  // there was no checkpoint
}

}  // namespace

LoadResult load(transport::Team &team, const Waiter &waiter, const std::string &folder, const LoadedModel &model,
                const LoadOptions &options) {
  return Loading(team, waiter, folder, model, options).run();
}

namespace {

std::string text_of(std::span<const Rename> renames) {
  std::string text;
  for (const Rename &rename : renames)
    text += format_text("{} {} {} {} {} {}\n", quote_json(rename.theirs), quote_json(rename.ours), rename.from_row,
                        rename.to_row, rename.row_count, rename.transposed);
  return long_sum_of(text);
}

}  // namespace

LoadResult load_weights(transport::Team &team, const Waiter &waiter, const std::string &path, const LoadedModel &model,
                        std::span<const Rename> renames, const LoadOptions &options) {
  LoadResult result;
  transport::agree_on(
      team, "what is loaded",
      format_text("layout {:016x}, renames {}, allow_missing {}, allow_unexpected {}, if_any {}", model.layout_hash,
                  text_of(renames), options.allow_missing, options.allow_unexpected, options.if_any));
  std::optional<WeightFiles> files;
  std::string sum, misfits;
  LoadPlan plan;
  transport::attempt_together(team, "a load's plan", [&] {
    files.emplace(path);
    plan = plan_weights(model.shards, files->list(sum), renames, team.rank());
    misfits = list_misfits(plan, options);
  });
  transport::agree_on(team, "what the files have", sum);
  if (!misfits.empty()) fail(FSDP_INVALID_ARGUMENT, "{} does not fit the model{}", path, misfits);
  transport::attempt_together(team, "a load's files", [&] {
    const std::function<void()> poll = [&] { waiter.poll(); };
    RowTaker taker(model.shards, model.write, poll);
    model.begin();
    for (const LoadedFile &file : plan.files) taker.take(files->open(file.file), file.rows);
    result.wanted_bytes = taker.wanted_bytes(), result.read_bytes = taker.read_bytes();
  });
  result.tensors = std::move(plan);
  return result;
}

}  // namespace fsdp::checkpoint
