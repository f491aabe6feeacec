// SPDX-License-Identifier: Apache-2.0
#include "abi/handle_table.h"

#include <bit>
#include <new>

#include "base/error.h"

namespace fsdp::abi {
namespace {

constexpr uint64_t kind_shift = 1, slot_shift = 4, generation_shift = slot_shift + HandleTable::slot_bits;
constexpr uint64_t kind_mask = uint64_t{7} << kind_shift;
static_assert(generation_shift + HandleTable::generation_bits == 64 && sizeof(void *) == 8);

uint64_t encode(uint64_t generation, uint64_t index, HandleKind kind) {
  return generation << generation_shift | index << slot_shift | static_cast<uint64_t>(kind) << kind_shift | 1;
}
uint64_t index_of(uint64_t handle) { return handle >> slot_shift & (HandleTable::max_slots - 1); }
uint64_t generation_of(uint64_t handle) { return handle >> generation_shift; }
HandleKind kind_in(uint64_t handle) { return static_cast<HandleKind>((handle & kind_mask) >> kind_shift); }

}  // namespace

HandleTable::~HandleTable() {
  for (std::atomic<HandleSlot *> &chunk : chunks_) delete[] chunk.load();
}

HandleTable::HandleSlot &HandleTable::slot_at(uint64_t index) const noexcept {
  const uint64_t chunk = std::bit_width((index >> first_chunk_bits) + 1) - 1;
  const uint64_t first = ((uint64_t{1} << chunk) - 1) << first_chunk_bits;
  return chunks_[chunk].load(std::memory_order_acquire)[index - first];
}

HandleTable::HandleSlot *HandleTable::slot_of(uint64_t handle) const noexcept {
  const uint64_t index = index_of(handle);
  if (!(handle & 1) || index >= slot_count_.load(std::memory_order_acquire)) return nullptr;
  return &slot_at(index);
}

uint64_t HandleTable::pop_free() noexcept {
  uint64_t head = free_.load();
  while (const uint32_t first = static_cast<uint32_t>(head)) {
    const uint64_t rest = ((head >> 32) + 1) << 32 | slot_at(first - 1).next.load();
    if (free_.compare_exchange_weak(head, rest)) return first;
  }
  return 0;
}

void HandleTable::push_free(uint64_t index) const noexcept {
  uint64_t head = free_.load(), mine = 0;
  do {
    slot_at(index).next.store(static_cast<uint32_t>(head));
    mine = ((head >> 32) + 1) << 32 | (index + 1);
  } while (!free_.compare_exchange_weak(head, mine));
}

// Takes a free slot, or a new one. If two threads allocate the same chunk, one of them frees its own.
uint64_t HandleTable::take_slot() {
  if (const uint64_t found = pop_free()) return found - 1;
  for (uint64_t index = slot_count_.load();;) {
    if (index == max_slots) fail(FSDP_OUT_OF_MEMORY, "{} handles are alive, which is the most", max_slots);
    const uint64_t chunk = std::bit_width((index >> first_chunk_bits) + 1) - 1;
    if (!chunks_[chunk].load()) {
      auto made = std::make_unique<HandleSlot[]>(uint64_t{1} << (first_chunk_bits + chunk));
      HandleSlot *none = nullptr;
      if (chunks_[chunk].compare_exchange_strong(none, made.get())) made.release();
    }
    if (slot_count_.compare_exchange_weak(index, index + 1)) return index;
  }
}

uint64_t HandleTable::add(HandleKind kind, std::shared_ptr<void> object, uint32_t number) {
  const uint64_t index = take_slot();
  HandleSlot &slot = slot_at(index);
  slot.object = std::move(object);
  slot.number = number;
  const uint64_t handle = encode(generation_of(slot.handle.load()) + 1, index, kind);
  slot.handle.store(handle);
  return handle;
}

// A call first counts itself as a pin and then checks whether the handle is alive; remove() does these steps in the
// opposite order. So at least one of the two sees the other.
HandleTable::HandleSlot *HandleTable::pin_slot(uint64_t handle, HandleKind kind) const noexcept {
  HandleSlot *const slot = slot_of(handle);
  if (!slot || kind_in(handle) != kind) return nullptr;
  slot->pins.fetch_add(1);
  if (slot->handle.load() == handle) return slot;
  unpin(*slot);
  return nullptr;
}

// The last thread that unpins a removed slot clears it. A late call with the dead handle may come here at the same time
// as that thread; only one of them can clear the slot.
void HandleTable::unpin(HandleSlot &slot) const noexcept {
  if (slot.pins.fetch_sub(1) != (removed | 1)) return;
  uint32_t last = removed;
  if (slot.pins.compare_exchange_strong(last, 0)) clear(slot);
}

void HandleTable::clear(HandleSlot &slot) const noexcept {
  const uint64_t handle = slot.handle.load();
  const std::shared_ptr<void> object = std::move(slot.object);
  if (generation_of(handle) < last_generation_) push_free(index_of(handle));
}

HandleTable::FoundObject HandleTable::find(uint64_t handle, HandleKind kind) const noexcept {
  const Pin pinned(*this, pin_slot(handle, kind));
  return pinned.object() ? FoundObject{slot_of(handle)->object, pinned.number()} : FoundObject{};
}

bool HandleTable::end(HandleSlot &slot, uint64_t handle, HandleKind kind) noexcept {
  return kind_in(handle) == kind && slot.handle.compare_exchange_strong(handle, handle & ~kind_mask);
}

std::shared_ptr<void> HandleTable::remove(uint64_t handle, HandleKind kind) noexcept {
  const Pin pinned(*this, pin_slot(handle, kind));
  HandleSlot *const slot = pinned.object() ? slot_of(handle) : nullptr;
  if (!slot || !end(*slot, handle, kind)) return nullptr;
  slot->pins.fetch_or(removed);
  return slot->object;
}

void HandleTable::forget(uint64_t handle, HandleKind kind) noexcept {
  if (HandleSlot *const slot = slot_of(handle)) end(*slot, handle, kind);
}

HandleKind HandleTable::kind_of(uint64_t handle) const noexcept {
  const HandleSlot *const slot = slot_of(handle);
  return slot && slot->handle.load() == handle ? kind_in(handle) : HandleKind::none;
}

bool HandleTable::destroyed(uint64_t handle) const noexcept {
  const HandleSlot *const slot = slot_of(handle);
  if (!slot || kind_in(handle) == HandleKind::none || kind_in(handle) > last_handle_kind) return false;
  const uint64_t now = slot->handle.load();
  const uint64_t dead = generation_of(now) - (kind_in(now) != HandleKind::none);  // the last dead generation
  return generation_of(handle) > 0 && generation_of(handle) <= dead;
}

}  // namespace fsdp::abi
