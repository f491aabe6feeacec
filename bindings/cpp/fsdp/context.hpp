// SPDX-License-Identifier: Apache-2.0
// A rank's membership in the job, and meshes of ranks. Included by fsdp.hpp.
#ifndef FSDP_CONTEXT_HPP
#define FSDP_CONTEXT_HPP

#include <fsdp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "options.hpp"
#include "tensor.hpp"

namespace fsdp {

class Context;

/** Ranks arranged as replicate x shard. Models made from it keep what they need. */
class Mesh {
 public:
  Mesh(const Context &context, const MeshOptions &options);
  fsdp_mesh *get() const noexcept { return raw_.get(); }

 private:
  detail::KeptHooks hooks_;
  detail::Handle<fsdp_mesh, fsdp_destroy_mesh> raw_;
};

/** One rank's membership in the job. Its end never waits; a good run ends with close(). */
class Context {
 public:
  /** Joins the job. Without a world_size the launcher's variables describe the job; if none is set, it is a world of
   * one. */
  explicit Context(const ContextOptions &options = {}) {
    create(options, [](const fsdp_context_options *raw, fsdp_context **out) { return fsdp_create_context(raw, out); });
  }
  /** A context that only plans: rank `rank` of an imagined world. */
  static Context plan(std::uint32_t world_size, std::uint32_t rank, const ContextOptions &options = {}) {
    Context made{Nothing{}};
    made.create(options, [&](const fsdp_context_options *raw, fsdp_context **out) {
      return fsdp_create_plan_context(world_size, rank, raw, out);
    });
    return made;
  }
  /** A context for each thread of this process that will act as a rank. */
  static std::vector<Context> local(std::uint32_t world_size, const ContextOptions &options = {}) {
    auto raw = detail::sized<fsdp_context_options>();
    const auto hooks = detail::hand_over(options, raw);
    std::vector<fsdp_context *> handles(world_size);
    detail::check(fsdp_create_local_contexts(world_size, &raw, handles.data()));
    std::vector<Context> made;
    made.reserve(world_size);
    for (fsdp_context *handle : handles) {
      made.push_back(Context{Nothing{}});
      made.back().hooks_ = hooks;
      made.back().raw_ = decltype(raw_)(handle);
    }
    return made;
  }

  void close() { detail::check(fsdp_close_context(get())); }
  /** From any thread: fails the context for good, and wakes its waiting calls here and on other ranks. */
  void abort(const std::string &reason) const { detail::check(fsdp_abort_context(get(), reason.c_str())); }

  std::uint32_t rank() const { return ask(fsdp_get_rank); }
  std::uint32_t world_size() const { return ask(fsdp_get_world_size); }
  /** The error that failed the context for good; its status is FSDP_OK if none did. */
  fsdp_error error() const {
    auto error = detail::sized<fsdp_error>();
    detail::check(fsdp_get_context_error(get(), &error));
    return error;
  }
  /** The detail of the last failing call on this context, on whichever thread. */
  fsdp_error last_error() const {
    auto error = detail::sized<fsdp_error>();
    detail::check(fsdp_get_last_error(get(), &error));
    return error;
  }
  std::vector<std::uint32_t> failed_ranks() const {
    std::uint64_t count = 0;
    detail::check(fsdp_get_failed_ranks(get(), nullptr, &count));
    std::vector<std::uint32_t> ranks(static_cast<std::size_t>(count));
    detail::check(fsdp_get_failed_ranks(get(), ranks.data(), &count));
    return ranks;
  }

  /** Reduces a few doubles over all ranks, or those of a mesh, in place. */
  void all_reduce_values(span<double> values, ValueOp op, const Mesh *mesh = nullptr) {
    detail::check(fsdp_all_reduce_values(get(), mesh ? mesh->get() : nullptr, values.data(), values.size(),
                                         static_cast<fsdp_value_op>(op)));
  }
  double all_reduce_value(double value, ValueOp op, const Mesh *mesh = nullptr) {
    all_reduce_values({&value, 1}, op, mesh);
    return value;
  }
  void wait_stream(fsdp_stream stream, std::uint32_t timeout_ms = 0) {
    detail::check(fsdp_wait_stream(get(), stream, timeout_ms));
  }

  void write_trace(const std::string &path) const { detail::check(fsdp_write_trace(get(), path.c_str())); }
  void write_flight_record(const std::string &path) const {
    detail::check(fsdp_write_flight_record(get(), path.c_str()));
  }
  void begin_span(const std::string &name) { detail::check(fsdp_begin_span(get(), name.c_str())); }
  void end_span() { detail::check(fsdp_end_span(get())); }

  fsdp_context *get() const noexcept { return raw_.get(); }
  const detail::KeptHooks &hooks() const noexcept { return hooks_; }

 private:
  struct Nothing {};
  explicit Context(Nothing) {}
  template <typename Call>
  void create(const ContextOptions &options, Call call) {
    auto raw = detail::sized<fsdp_context_options>();
    hooks_ = detail::hand_over(options, raw);
    fsdp_context *made = nullptr;
    const fsdp_status status = call(&raw, &made);
    raw_ = decltype(raw_)(made);  // before a hook's exception is thrown
    detail::check(status);
  }
  std::uint32_t ask(fsdp_status (*getter)(const fsdp_context *, std::uint32_t *)) const {
    std::uint32_t value = 0;
    detail::check(getter(get(), &value));
    return value;
  }

  detail::KeptHooks hooks_;  // outlives raw_
  detail::Handle<fsdp_context, fsdp_destroy_context> raw_;
};

inline Mesh::Mesh(const Context &context, const MeshOptions &options) : hooks_(context.hooks()) {
  fsdp_mesh *made = nullptr;
  const fsdp_status status = fsdp_create_mesh(context.get(), &options, &made);
  raw_ = decltype(raw_)(made);
  detail::check(status);
}

inline std::string get_version() { return fsdp_get_version(); }
inline std::string get_status_name(Status status) { return fsdp_get_status_name(static_cast<fsdp_status>(status)); }
/** The message of this thread's last failing call, or "". */
inline std::string get_last_message() { return fsdp_get_last_message(); }
inline std::string describe_build() { return detail::read_text(fsdp_describe_build); }
/** The checkpoints of a folder as JSON, the newest first. */
inline std::string list_checkpoints(const std::string &folder) {
  return detail::read_text([&](char *buffer, std::uint64_t *size_bytes) {
    return fsdp_list_checkpoints(folder.c_str(), buffer, size_bytes);
  });
}

}  // namespace fsdp

#endif
