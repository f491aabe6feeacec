// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/load_weights.h"

#include <optional>

#include "base/json.h"
#include "checkpoint/files/weight_files.h"
#include "checkpoint/format/block_sums.h"
#include "checkpoint/job/misfits.h"
#include "checkpoint/job/row_taker.h"
#include "transport/exchange.h"

namespace fsdp::checkpoint {
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
