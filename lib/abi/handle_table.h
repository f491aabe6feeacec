// SPDX-License-Identifier: Apache-2.0
// Which handles are alive: the one process-wide structure of the library. A handle is a number and never an address, so
// that whatever a caller passes is compared and not read:
//
//   bits 63-28 generation | 27-4 slot | 3-1 kind | 0 is 1
//
// Slots are used again with the next generation, so a destroyed handle stays refused; one that has had its last
// generation is used no more. No call waits for a lock: a forked child may use the table whatever the parent's threads
// were doing.
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
  static constexpr uint64_t most_generation = (uint64_t{1} << generation_bits) - 1;
  static constexpr uint64_t most_slots = uint64_t{1} << slot_bits;

  // last_generation: smaller in tests only.
  constexpr explicit HandleTable(uint64_t last_generation = most_generation) : last_generation_(last_generation) {}
  ~HandleTable();
  HandleTable(const HandleTable &) = delete;
  HandleTable &operator=(const HandleTable &) = delete;

  struct FoundObject {
    std::shared_ptr<void> object;  // NULL: no such handle is alive
    uint32_t number = 0;
  };
  // An object that lives as long as this, also if its handle is destroyed meanwhile: what a call has, for less than a
  // reference of its own would cost.
  class Pin;

  // Never 0. Throws OUT_OF_MEMORY, and then the object is the caller's as before. number: what else the handle stands
  // for.
  uint64_t add(HandleKind kind, std::shared_ptr<void> object, uint32_t number = 0);
  FoundObject find(uint64_t handle, HandleKind kind) const noexcept;
  Pin pin(uint64_t handle, HandleKind kind) noexcept;
  // From here on the handle is refused. What it held goes to the one call that took it.
  std::shared_ptr<void> remove(uint64_t handle, HandleKind kind) noexcept;
  // The same where nothing may be given back: what it held stays for ever.
  void forget(uint64_t handle, HandleKind kind) noexcept;

  // The kind of a handle that is alive; none for any other value.
  HandleKind kind_of(uint64_t handle) const noexcept;
  // Was it a handle, and is it destroyed?
  bool destroyed(uint64_t handle) const noexcept;
  uint64_t slot_count() const noexcept { return slot_count_.load(); }

 private:
  struct HandleSlot {
    std::atomic<uint64_t> handle{0};  // kind none: the slot is free
    std::atomic<uint32_t> pins{0};    // calls that use the object now, and `removed`
    std::atomic<uint32_t> next{0};    // free slot + 1
    uint32_t number = 0;
    std::shared_ptr<void> object;
  };
  // Chunk c has 64 << c slots; none ever moves.
  static constexpr uint64_t first_chunk_bits = 6;
  static constexpr uint64_t chunk_count = slot_bits - first_chunk_bits + 1;

  static constexpr uint32_t removed = uint32_t{1} << 31;  // in pins: the last one clears the slot

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
  // turn << 32 | slot + 1: the turn tells a list from an earlier one with the same head
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
