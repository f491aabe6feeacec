// SPDX-License-Identifier: Apache-2.0
// Which gathered weights have which of the buffers of FSDP_SCHEDULE_ANY: pure bookkeeping. Weights whose last hold was
// returned keep their buffer until others need it, those that have waited longest first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::engine {

class HeldBuffers {
 public:
  struct Buffer {
    std::optional<uint32_t> key;  // of the slot whose weights are in it
    uint64_t idle_since = 0;      // counts gathers and returned holds; counts while nothing holds it
  };

  explicit HeldBuffers(size_t count) : buffers_(count) {}

  size_t count() const { return buffers_.size(); }
  const std::vector<Buffer> &buffers() const { return buffers_; }
  // One without weights, else the one of those that may go which has been idle longest.
  template <class MayGo>
  std::optional<uint32_t> choose(MayGo may_go) const {
    std::optional<uint32_t> chosen;
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      if (!buffers_[b].key) return b;
      if (may_go(*buffers_[b].key) && (!chosen || buffers_[b].idle_since < buffers_[*chosen].idle_since)) chosen = b;
    }
    return chosen;
  }
  void take(uint32_t buffer, uint32_t key) { buffers_[buffer] = {key, ++clock_}; }
  void set_idle(uint32_t key) {
    if (Buffer *const own = find(key)) own->idle_since = ++clock_;
  }
  void give_back(uint32_t key) {
    if (Buffer *const own = find(key)) own->key.reset();
  }

 private:
  Buffer *find(uint32_t key) {
    const auto found = std::ranges::find(buffers_, std::optional(key), &Buffer::key);
    return found == buffers_.end() ? nullptr : &*found;
  }

  std::vector<Buffer> buffers_;
  uint64_t clock_ = 0;
};

}  // namespace fsdp::engine
