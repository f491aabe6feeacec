// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/words.h"

#include <algorithm>
#include <new>

#include "device/cuda/core.h"

namespace fsdp::device::cuda {
namespace {

constexpr size_t page_words = 256;
constexpr size_t page_bytes = page_words * sizeof(PinnedWord);

}  // namespace

// The lists reserve their memory here, so that give_back() cannot fail.
void WordPool::add_page() {
  pages_.reserve(pages_.size() + 1);
  free_.reserve((pages_.size() + 1) * page_words);
  late_.reserve((pages_.size() + 1) * page_words);
  const ObjectScope scope(core_);
  void *memory = nullptr;
  core_.check(cudaHostAlloc(&memory, page_bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc",
              "words shared with the GPU");
  auto *words = static_cast<PinnedWord *>(memory);
  pages_.push_back({words, false});
  for (size_t i = page_words; i-- > 0;) free_.push_back(new (words + i) PinnedWord);
}

void WordPool::take_back_late() {
  const auto still_late = std::partition(late_.begin(), late_.end(), [](auto *word) { return !word->written(); });
  free_.insert(free_.end(), still_late, late_.end());
  late_.erase(still_late, late_.end());
}

PinnedWord *WordPool::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) take_back_late();
  if (free_.empty()) add_page();
  PinnedWord *word = free_.back();
  free_.pop_back();
  word->expected.store(0, std::memory_order_relaxed);
  return word;
}

void WordPool::give_back(PinnedWord *word) noexcept {
  std::lock_guard lock(mutex_);
  if (word->last() >= PinnedWord::most || word->value.load(std::memory_order_relaxed) >= PinnedWord::most) return;
  (word->written() ? free_ : late_).push_back(word);
}

void WordPool::abandon(PinnedWord *word) noexcept {
  std::lock_guard lock(mutex_);
  for (Page &page : pages_)
    if (word >= page.words && word < page.words + page_words) page.abandoned = true;
}

std::vector<AwaitedWord> WordPool::unwritten() {
  std::lock_guard lock(mutex_);
  std::vector<AwaitedWord> found;
  for (const Page &page : pages_)
    for (const PinnedWord *word = page.words; word < page.words + page_words; ++word)
      if (!word->written()) found.push_back({word, word->last()});
  return found;
}

bool WordPool::all_written() noexcept {
  std::lock_guard lock(mutex_);
  const auto written = [](const Page &page) {
    return std::all_of(page.words, page.words + page_words, [](const PinnedWord &word) { return word.written(); });
  };
  return std::all_of(pages_.begin(), pages_.end(), written);
}

uint64_t WordPool::bytes() noexcept {
  std::lock_guard lock(mutex_);
  return pages_.size() * page_bytes;
}

void WordPool::hand_over(Core &core) noexcept {
  std::vector<Page> pages;
  {
    std::lock_guard lock(mutex_);
    pages.swap(pages_);
    free_.clear();
  }
  for (const Page &page : pages)
    if (!page.abandoned) core.keep({Remnant::pinned_memory, page.words, page_bytes});
}

}  // namespace fsdp::device::cuda
