// SPDX-License-Identifier: Apache-2.0
// _FORTIFY_SOURCE treats longjmp between stacks as an error.
#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#include "launch_simulated.h"

namespace simulated {
namespace {

constexpr size_t stack_bytes = 64 * 1024;

// makecontext makes it once. Later switches use longjmp, because swapcontext makes two system calls.
struct Coroutine {
  ucontext_t first;
  jmp_buf place;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(stack_bytes);
  unsigned thread = 0;  // it runs the kernel of this thread
  bool ended = false;
};

// The stream's thread runs a block of threads. In most kernels threads never await each other. So a coroutine runs one
// thread after the other until one awaits, and another coroutine continues from there.
struct Block {
  jmp_buf scheduler;
  std::vector<std::unique_ptr<Coroutine>> coroutines;
  Coroutine *running = nullptr;
  const std::function<void()> *kernel = nullptr;
  unsigned begun = 0, threads = 0;
};
thread_local Block block;

void yield() {
  if (_setjmp(block.running->place) == 0) _longjmp(block.scheduler, 1);
}

void run_threads() {
  while (block.begun < block.threads) {
    block.running->thread = thread_index.x = block.begun++;
    (*block.kernel)();
  }
}

void run_coroutine() {
  for (;;) {
    run_threads();
    block.running->ended = true;
    yield();  // sleeps until the next block
  }
}

void resume(Coroutine &coroutine) {
  block.running = &coroutine;
  thread_index.x = coroutine.thread;
  if (_setjmp(block.scheduler) == 0) _longjmp(coroutine.place, 1);
}

// Returns when its first thread has reached an await, or all threads have ended.
void create(Coroutine &coroutine) {
  getcontext(&coroutine.first);
  coroutine.first.uc_stack.ss_sp = coroutine.stack.get();
  coroutine.first.uc_stack.ss_size = stack_bytes;
  coroutine.first.uc_link = nullptr;
  makecontext(&coroutine.first, run_coroutine, 0);
  block.running = &coroutine;
  if (_setjmp(block.scheduler) == 0) setcontext(&coroutine.first);
}

void start(size_t number) {
  const bool made = number < block.coroutines.size();
  if (!made) block.coroutines.push_back(std::make_unique<Coroutine>());
  Coroutine &coroutine = *block.coroutines[number];
  coroutine.ended = false;
  made ? resume(coroutine) : create(coroutine);
}

// Runs every thread to its first await or its end. Returns the number of coroutines that this took.
size_t begin_threads() {
  size_t count = 0;
  for (; block.begun < block.threads; ++count) start(count);
  return count;
}

}  // namespace

void run_block(unsigned threads, const std::function<void()> &kernel) {
  block.kernel = &kernel;
  block.begun = 0;
  block.threads = threads;
  const size_t count = begin_threads();
  for (bool any = true; any;) {
    any = false;
    for (size_t i = 0; i < count; ++i) {
      Coroutine &coroutine = *block.coroutines[i];
      if (coroutine.ended) continue;
      resume(coroutine);
      any = any || !coroutine.ended;
    }
  }
}

void await_block() { yield(); }

}  // namespace simulated
