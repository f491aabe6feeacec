// SPDX-License-Identifier: Apache-2.0
#include <ucontext.h>

#include <memory>
#include <vector>

#include "launch_simulated.h"

namespace simulated {
namespace {

constexpr size_t stack_bytes = 64 * 1024;

struct Coroutine {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(stack_bytes);
  bool ended = false;
};

// Of the stream's thread.
struct Block {
  ucontext_t scheduler;
  std::vector<std::unique_ptr<Coroutine>> threads;
  const std::function<void()> *kernel = nullptr;
};
thread_local Block block;

void run_thread() {
  (*block.kernel)();
  Coroutine &self = *block.threads[thread_index.x];
  self.ended = true;
  swapcontext(&self.context, &block.scheduler);
}

void start(Coroutine &thread) {
  thread.ended = false;
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = stack_bytes;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, run_thread, 0);
}

}  // namespace

void run_block(unsigned threads, const std::function<void()> &kernel) {
  while (block.threads.size() < threads) block.threads.push_back(std::make_unique<Coroutine>());
  block.kernel = &kernel;
  for (unsigned t = 0; t < threads; ++t) start(*block.threads[t]);
  for (bool any = true; any;) {
    any = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (block.threads[t]->ended) continue;
      thread_index.x = t;
      swapcontext(&block.scheduler, &block.threads[t]->context);
      any = any || !block.threads[t]->ended;
    }
  }
}

void await_block() {
  const unsigned own = thread_index.x;
  swapcontext(&block.threads[own]->context, &block.scheduler);
  thread_index.x = own;
}

}  // namespace simulated
