// SPDX-License-Identifier: Apache-2.0
// The table of live handles: the one process-wide structure of the library. A handle is a number and never an address.
// Any value that a caller passes is only compared, and no memory is read through it:
//
//   bits 63-28 generation | 27-4 slot | 3-1 kind | 0 is 1
//
// A slot is reused with the next generation, so a destroyed handle stays invalid. After its last generation a slot is
// not reused. No call waits for a lock, so a forked child may use the table, whatever the parent's threads were doing.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace fsdp::abi {

enum class HandleKind : uint64_t { none, context, mesh, model, group, capture, checkpoint };
inline constexpr HandleKind last_handle_kind = HandleKind::checkpoint;

class HandleTable {
 public:
  static constexpr uint64_t slot_bits = 24, generation_bits = 36;
  static constexpr uint64_t max_generation = (uint64_t{1} << generation_bits) - 1;
  static constexpr uint64_t max_slots = uint64_t{1} << slot_bits;

  // Only tests pass a smaller last_generation.
  constexpr explicit HandleTable(uint64_t last_generation = max_generation) : last_generation_(last_generation) {}
  ~HandleTable();
  HandleTable(const HandleTable &) = delete;
  HandleTable &operator=(const HandleTable &) = delete;

  struct FoundObject {
    std::shared_ptr<void> object;  // NULL: no such handle is alive
    uint32_t number = 0;
  };
  // Keeps an object alive even if its handle is destroyed during the call. A call uses a Pin because it costs less than
  // a shared_ptr.
  class Pin;

  // Returns a handle, which is never 0. Throws OUT_OF_MEMORY. `number` is stored with the object, for example a group's
  // index.
  uint64_t add(HandleKind kind, std::shared_ptr<void> object, uint32_t number = 0);
  FoundObject find(uint64_t handle, HandleKind kind) const noexcept;
  Pin pin(uint64_t handle, HandleKind kind) noexcept;
  // Makes the handle invalid. If several calls do this, only the one that made it invalid gets the object; the others
  // get NULL.
  std::shared_ptr<void> remove(uint64_t handle, HandleKind kind) noexcept;
  // Makes the handle invalid, too, but keeps the object forever, for cases in which nothing may be freed.
  void forget(uint64_t handle, HandleKind kind) noexcept;

  // The kind of a live handle; `none` for any other value.
  HandleKind kind_of(uint64_t handle) const noexcept;
  // Was this value a handle that has been destroyed?
  bool destroyed(uint64_t handle) const noexcept;
  uint64_t slot_count() const noexcept { return slot_count_.load(); }

 private:
  struct HandleSlot {
    std::atomic<uint64_t> handle{0};  // if its kind is `none`, no handle of the slot is alive
    std::atomic<uint32_t> pins{0};    // number of calls that use the object now, and the flag `removed`
    std::atomic<uint32_t> next{0};    // the next free slot + 1
    uint32_t number = 0;
    std::shared_ptr<void> object;
  };
  // Chunk c has 64 << c slots. Slots never move.
  static constexpr uint64_t first_chunk_bits = 6;
  static constexpr uint64_t chunk_count = slot_bits - first_chunk_bits + 1;

  static constexpr uint32_t removed = uint32_t{1} << 31;  // flag in `pins`: the last unpin() clears the slot

  HandleSlot *pin_slot(uint64_t handle, HandleKind kind) const noexcept;
  void unpin(HandleSlot &slot) const noexcept;
  void clear(HandleSlot &slot) const noexcept;
  HandleSlot &slot_at(uint64_t index) const noexcept;
  HandleSlot *slot_of(uint64_t handle) const noexcept;
  uint64_t take_slot();
  uint64_t pop_free() noexcept;
  void push_free(uint64_t index) const noexcept;
  bool end(HandleSlot &slot, uint64_t handle, HandleKind kind) noexcept;

  uint64_t last_generation_;
  std::array<std::atomic<HandleSlot *>, chunk_count> chunks_{};
  std::atomic<uint64_t> slot_count_{0};
  // turn << 32 | slot + 1. The turn distinguishes a list from an earlier list with the same head.
  mutable std::atomic<uint64_t> free_{0};
};

class HandleTable::Pin {
 public:
  Pin() = default;
  Pin(const HandleTable &table, HandleSlot *slot) noexcept : table_(&table), slot_(slot) {}
  Pin(Pin &&other) noexcept : table_(other.table_), slot_(std::exchange(other.slot_, nullptr)) {}
  Pin &operator=(Pin &&other) noexcept {
    std::swap(table_, other.table_);
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~Pin() {
    if (slot_) table_->unpin(*slot_);
  }
  void *object() const noexcept { return slot_ ? slot_->object.get() : nullptr; }  // NULL: no such handle was alive
  uint32_t number() const noexcept { return slot_ ? slot_->number : 0; }

 private:
  const HandleTable *table_ = nullptr;
  HandleSlot *slot_ = nullptr;
};

inline HandleTable::Pin HandleTable::pin(uint64_t handle, HandleKind kind) noexcept {
  return {*this, pin_slot(handle, kind)};
}

}  // namespace fsdp::abi
