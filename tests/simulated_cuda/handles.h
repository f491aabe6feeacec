// SPDX-License-Identifier: Apache-2.0
// Handles stand for objects. A handle is never reused and points nowhere, so that use after destruction is noticed; the
// objects live until the reset. Lookups create no edges between threads that only look up.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace simulated {

template <class T, class Handle>
class Handles {
 public:
  explicit Handles(uintptr_t first) : next_(first) {}

  template <class... Args>
  std::pair<Handle, T *> create(Args &&...args) {
    const std::unique_lock lock(mutex_);
    T *object = objects_.emplace_back(std::make_unique<T>(std::forward<Args>(args)...)).get();
    const Handle handle = reinterpret_cast<Handle>(next_ += 16);
    live_[handle] = object;
    return {handle, object};
  }

  T *find(Handle handle) const {
    const std::shared_lock lock(mutex_);
    const auto found = live_.find(handle);
    return found == live_.end() ? nullptr : found->second;
  }

  T *remove(Handle handle) {
    const std::unique_lock lock(mutex_);
    const auto found = live_.find(handle);
    if (found == live_.end()) return nullptr;
    T *object = found->second;
    live_.erase(found);
    return object;
  }

  template <class Visit>
  void for_each_live(Visit visit) const {
    for_each([&](Handle, T &object) { visit(object); });
  }

  template <class Visit>
  void for_each(Visit visit) const {
    const std::shared_lock lock(mutex_);
    for (const auto &[handle, object] : live_) visit(handle, *object);
  }

  void clear() {
    const std::unique_lock lock(mutex_);
    live_.clear();
    objects_.clear();
  }

 private:
  mutable std::shared_mutex mutex_;
  uintptr_t next_;
  std::unordered_map<Handle, T *> live_;
  std::deque<std::unique_ptr<T>> objects_;
};

}  // namespace simulated
