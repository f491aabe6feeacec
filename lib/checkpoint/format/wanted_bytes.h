// SPDX-License-Identifier: Apache-2.0
// Which bytes of a file are read so that boxes of its tensors can be taken out of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/safetensors.h"

namespace fsdp::checkpoint {

// A box that the reader needs of a tensor, all of which the file has.
struct WantedBox {
  uint32_t tensor;  // in the file's header
  Box box;          // in the whole tensor
  Box to;           // where it is kept: a box that contains it
};

// Bytes of a file's data, those of one run of a box: they lie next to each other in the file and where they are kept.
struct WantedRun {
  uint32_t wanted;      // number of the box
  uint64_t begin, end;  // in the file's data
  uint64_t to;          // element, in the box where it is kept
};

struct ByteRange {
  uint64_t begin, end;

  bool operator==(const ByteRange &) const = default;
};

// The runs of boxes, in the order of the file: the boxes are given in the order of the header's tensors, and those of
// one tensor in the order of its rows, without common ones.
class WantedRuns {
 public:
  // `offsets`: where each of the file's tensors lies in the whole one.
  WantedRuns(const SafetensorsHeader &header, std::span<const std::vector<uint64_t>> offsets,
             std::span<const WantedBox> wanted);

  uint64_t bytes() const { return bytes_; }
  // From the first byte of the first run to the last one of the last: there is one at least.
  ByteRange span() const;
  template <class Visit>
  void for_each(Visit visit) const {
    for (uint32_t w = 0; w < walks_.size(); ++w)
      for (uint64_t i = 0; i < walks_[w].runs.run_count(); ++i) visit(run(w, i));
  }

 private:
  struct Walk {
    RunWalk runs;
    uint64_t begin;    // of the tensor, in the file's data
    uint32_t element;  // bytes
  };
  WantedRun run(uint32_t wanted, uint64_t number) const;

  std::vector<Walk> walks_;
  uint64_t bytes_ = 0;
};

// The fewest ranges of whole blocks that contain all runs; the last block ends with the data. Those of one run and the
// next are one where they touch.
std::vector<ByteRange> blocks_of(const WantedRuns &runs, uint64_t block, uint64_t data_bytes);

}  // namespace fsdp::checkpoint
