// SPDX-License-Identifier: Apache-2.0
#include "membership/launch/name_lookup.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/library_thread.h"

namespace fsdp::membership {
namespace {

constexpr auto slice = std::chrono::milliseconds(20);

// The code of a thread that nobody waits for must not be unloaded under it. Where the library is part of the program
// this finds nothing to keep.
void keep_library_loaded() {
  Dl_info found{};
  if (::dladdr(reinterpret_cast<const void *>(&keep_library_loaded), &found) != 0 && found.dli_fname)
    (void)::dlopen(found.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

}  // namespace

struct NameLookup::Question {
  std::string host;
  uint16_t port = 0;
  std::mutex mutex;
  std::condition_variable answered;
  bool done = false, temporary = false;  // done: the rest is the answer
  std::vector<Endpoint> found;
  std::string problem;
};

NameLookup::~NameLookup() {
  if (!question_) return;
  const std::lock_guard lock(question_->mutex);
  if (!question_->done) keep_library_loaded();
}

void NameLookup::ask(const std::string &host, uint16_t port) {
  auto question = std::make_shared<Question>();
  question->host = host;
  question->port = port;
  try {
    const BlockedSignals blocked;
    std::thread([question, resolver = resolver_] {
      ::pthread_setname_np(::pthread_self(), "fsdp-lookup");
      std::string problem;
      bool temporary = false;
      auto found = resolver(question->host, question->port, problem, &temporary);
      const std::lock_guard lock(question->mutex);
      question->found = std::move(found);
      question->problem = std::move(problem);
      question->temporary = temporary;
      question->done = true;
      question->answered.notify_all();
    }).detach();
  } catch (const std::system_error &error) {
    fail_errno(error.code().value(), "start a thread that asks for the address of a host");
  }
  question_ = std::move(question);
}

std::vector<Endpoint> NameLookup::find(const std::string &host, uint16_t port, const Limit &limit,
                                       std::string &problem) {
  unknown_ = false;
  if (auto found = Endpoint::numeric(host, port, problem); !found.empty()) return found;
  if (!question_ || question_->host != host || question_->port != port) ask(host, port);
  std::unique_lock lock(question_->mutex);
  while (!question_->done) {
    if (limit.over()) {
      problem = format_text("the name service has not answered what the address of '{}' is", host);
      return {};
    }
    question_->answered.wait_for(lock, slice);
    lock.unlock();
    limit.waiter.poll();
    lock.lock();
  }
  auto found = std::move(question_->found);
  if (found.empty()) problem = question_->problem;
  known_ = known_ || !found.empty();
  unknown_ = found.empty() && !question_->temporary && !known_;
  lock.unlock();
  question_.reset();  // asked again at the next try
  return found;
}

}  // namespace fsdp::membership
