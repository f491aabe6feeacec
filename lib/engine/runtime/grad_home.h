// SPDX-License-Identifier: Apache-2.0
// Main grads of a mesh that are at home in a file. A reduce makes its sums in one of two buffers, which take turns:
//
//   first contribution      reduce -> buffer -> file
//   further ones            file -> buffer, reduce adds -> buffer -> file
//   outer axis, at the end  file -> buffer, outer axis sums in place -> buffer -> file
//
// Each buffer has a lane of its own, so that one is written while sums are made in the other.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "device/device.h"
#include "engine/runtime/file_lane.h"
#include "engine/runtime/group.h"
#include "engine/runtime/storage.h"

namespace fsdp::engine {

class GradHome {
 public:
  // Requires that groups of the mesh have main grads in the file. `parts` are all of the model's.
  GradHome(Context &context, const Storage &storage, std::span<const GradPart> parts, uint32_t mesh);
  GradHome(const GradHome &) = delete;
  GradHome &operator=(const GradHome &) = delete;

  uint32_t next_turn() noexcept { return turn_ ^= 1; }
  // Later work on the stream waits until the buffer of this turn is free. With `adds` it also waits until the earlier
  // sums were read into it. `parts` are parts of one group.
  void open(std::span<const GradPart> parts, uint32_t turn, bool adds, device::Stream &stream);
  // Writes the buffer's sums to the file, after the event.
  void send(std::span<const GradPart> parts, uint32_t turn, const device::Event &summed);
  // Blocks the calling thread until the file has all sums that were sent.
  void await();

 private:
  struct GradTurn {
    std::unique_ptr<FileLane> lane;
    std::unique_ptr<device::Event> sent;
    std::vector<std::vector<HomePages>> pages;  // by part of the model
  };
  void add_pages(const Storage &storage, const GradPart &part);

  std::array<GradTurn, memory::partial_turns> turns_;
  uint32_t turn_ = 0;
};

}  // namespace fsdp::engine
