// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/wanted_bytes.h"

#include <algorithm>

#include "base/checked.h"
#include "base/json.h"

namespace fsdp::checkpoint {

WantedRuns::WantedRuns(const SafetensorsHeader &header, std::span<const std::vector<uint64_t>> offsets,
                       std::span<const WantedBox> wanted) {
  for (const WantedBox &box : wanted) {
    const StoredTensor &tensor = header.tensors[box.tensor];
    if (tensor.type->bits < 8)
      fail(FSDP_UNSUPPORTED, "tensor {} has elements of {} bits, which cannot be read", quote_json(tensor.name),
           tensor.type->bits);
    const Box stored{offsets[box.tensor], tensor.shape};
    walks_.push_back({RunWalk(box.box, stored, box.to), tensor.begin, tensor.type->bits / 8});
    bytes_ += box.box.count() * walks_.back().element;
  }
}

WantedRun WantedRuns::run(uint32_t wanted, uint64_t number) const {
  const Walk &walk = walks_[wanted];
  const CopyRun run = walk.runs[number];
  const uint64_t begin = walk.begin + run.from * walk.element;
  return {wanted, begin, begin + run.count * walk.element, run.to};
}

ByteRange WantedRuns::span() const {
  const auto last = static_cast<uint32_t>(walks_.size() - 1);
  return {run(0, 0).begin, run(last, walks_[last].runs.run_count() - 1).end};
}

std::vector<ByteRange> blocks_of(const WantedRuns &runs, uint64_t block, uint64_t data_bytes) {
  std::vector<ByteRange> ranges;
  runs.for_each([&](const WantedRun &run) {
    const ByteRange blocks{run.begin / block * block, std::min(round_up(run.end, block), data_bytes)};
    if (!ranges.empty() && blocks.begin <= ranges.back().end)
      ranges.back().end = std::max(ranges.back().end, blocks.end);
    else
      ranges.push_back(blocks);
  });
  return ranges;
}

}  // namespace fsdp::checkpoint
