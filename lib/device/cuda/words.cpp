// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/words.h"

#include <new>

namespace fsdp::device::cuda {
namespace {

constexpr size_t page_words = 256;

}  // namespace

Words::~Words() {
  for (const Page &page : pages_)
    if (!page.abandoned) check_.note(cudaFreeHost(page.words), "cudaFreeHost", "words shared with the GPU");
}

// free_ gets its room here, so that give_back cannot fail.
void Words::add_page() {
  pages_.reserve(pages_.size() + 1);
  free_.reserve((pages_.size() + 1) * page_words);
  void *memory = nullptr;
  check_(cudaHostAlloc(&memory, page_words * sizeof(PinnedWord), cudaHostAllocPortable | cudaHostAllocMapped),
         "cudaHostAlloc", "words shared with the GPU");
  auto *words = static_cast<PinnedWord *>(memory);
  pages_.push_back({words, false});
  for (size_t i = page_words; i-- > 0;) free_.push_back(new (words + i) PinnedWord);
}

PinnedWord *Words::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) add_page();
  PinnedWord *word = free_.back();
  free_.pop_back();
  return word;
}

void Words::give_back(PinnedWord *word) noexcept {
  std::lock_guard lock(mutex_);
  free_.push_back(word);
}

void Words::abandon(PinnedWord *word) noexcept {
  std::lock_guard lock(mutex_);
  for (Page &page : pages_)
    if (word >= page.words && word < page.words + page_words) page.abandoned = true;
}

}  // namespace fsdp::device::cuda
