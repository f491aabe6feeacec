// SPDX-License-Identifier: Apache-2.0

#include "transport/message/ucx/worker.h"

#include <dlfcn.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "base/error.h"
#include "base/library_thread.h"
#include "base/settings.h"
#include "transport/message/channel/transport.h"

namespace fsdp::transport::ucx {

namespace {

template <class Function>
void find(void *library, const char *path, const char *name, Function &function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!function) fail(FSDP_UNSUPPORTED, "UCX: {} has no {}: UCX 1.13 or later is needed", path, name);
}

// UCX handles SIGSEGV, SIGHUP and others as soon as it is loaded. It reads this setting from the environment, which
// this library must not change. So the signals are restored afterwards, unless UCX's own variables ask for handlers.
void give_signals_back(void *library, const char *path) {
  for (const char *name : {"UCX_HANDLE_ERRORS", "UCX_ERROR_SIGNALS", "UCX_DEBUG_SIGNO"})
    if (std::getenv(name)) return;
  void (*disable)() = nullptr;
  find(library, path, "ucs_debug_disable_signals", disable);
  disable();
}

}  // namespace

Api load_api() {
  const char *named = setting("FSDP_UCX_LIBRARY");
  const char *path = named && *named ? named : "libucp.so.0";
  void *library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    const char *why = ::dlerror();
    fail(FSDP_UNSUPPORTED,
         "messages between hosts need UCX: {}; install it (Debian: libucx0), or name libucp in FSDP_UCX_LIBRARY",
         why ? why : path);
  }
  give_signals_back(library, path);
  Api api;
#define FSDP_UCX_FIND(name) find(library, path, #name, api.name);
  FSDP_UCX_FUNCTIONS(FSDP_UCX_FIND)
#undef FSDP_UCX_FIND
  unsigned major = 0, minor = 0, release = 0;
  api.ucp_get_version(&major, &minor, &release);
  if (major != UCP_API_MAJOR || minor < UCP_API_MINOR)
    fail(FSDP_UNSUPPORTED, "UCX: {} is version {}.{}.{}; this library was built with {}.{} and needs that or later",
         path, major, minor, release, UCP_API_MAJOR, UCP_API_MINOR);
  api.major = major;
  api.version = format_text("{}.{}.{}", major, minor, release);
  return api;
}

namespace {

// Does the transport work only between processes of one host, or to the memory of a device?
bool stays_on_host(std::string_view transport) {
  constexpr std::array<std::string_view, 6> names{"self", "posix", "sysv", "cma", "knem", "xpmem"};
  const std::string_view name = transport.substr(0, transport.find('/'));
  return std::ranges::count(names, name) > 0 || name.ends_with("_copy") || name.ends_with("_ipc");
}

}  // namespace

// The text has one line for each: "#      resource 1  :  md 1  dev 1  flags -- tcp/lo".
std::vector<std::string> transports_of(std::string_view text) {
  std::vector<std::string> found;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1);
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    const size_t slash = line.rfind('/');
    if (line.find(" resource ") == std::string_view::npos || slash == std::string_view::npos) continue;
    found.emplace_back(line.substr(line.rfind(' ', slash) + 1));
  }
  return found;
}

bool may_use_tcp(const std::vector<std::string> &transports) {
  return transports.empty() ||
         std::ranges::any_of(transports, [](const auto &name) { return name.starts_with("tcp"); });
}

bool leaves_host(const std::vector<std::string> &transports) { return !std::ranges::all_of(transports, stays_on_host); }

bool trusts_tcp() {
  const char *text = setting("FSDP_UCX_TCP");
  const std::string_view word(text ? text : "");
  if (!word.empty() && word != "trusted")
    fail(FSDP_INVALID_ARGUMENT, "FSDP_UCX_TCP='{}': 'trusted' is expected, or no such variable", word);
  return !word.empty();
}

namespace {

using Clock = std::chrono::steady_clock;
// More than the bytes that UCX puts before a message in one piece of a TCP connection.
constexpr uint64_t room_for_headers = 4096;
constexpr uint64_t usual_piece = uint64_t{64} << 10;  // UCX_TCP_RX_SEG_SIZE

// Is there an RDMA device? The folder lists InfiniBand, RoCE and similar devices.
bool has_rdma() {
  std::error_code none;
  return !std::filesystem::is_empty("/sys/class/infiniband", none) && !none;
}

// May UCX use RDMA? Not if UCX_TLS lists TCP, unless it is a list of transports to leave out.
bool uses_rdma() {
  const char *text = std::getenv("UCX_TLS");
  const std::string_view transports(text ? text : "");
  return has_rdma() && (transports.starts_with('^') || transports.find("tcp") == std::string_view::npos);
}

// Reads a size as UCX does: 8192, 64K, 1M. A text that is no number ("inf") means no limit.
uint64_t bytes_of(const char *text) {
  char *end = nullptr;
  const uint64_t number = std::strtoull(text, &end, 10);
  if (end == text) return UINT64_MAX;
  const char unit = static_cast<char>(*end & ~0x20);
  return unit == 'K' ? number << 10 : unit == 'M' ? number << 20 : unit == 'G' ? number << 30 : number;
}

}  // namespace

void Worker::check(ucs_status_t status, const char *what) const {
  if (status == UCS_OK) return;
  throw Error(FSDP_SYSTEM, format_text("rank {}: UCX: {}: {}", rank_, what, api_.ucs_status_string(status)),
              static_cast<int32_t>(rank_), FSDP_ORIGIN_UCX, status);
}

Worker::Worker(uint32_t rank, uint64_t chunk_bytes, bool guarded, unsigned message_id, ucp_am_recv_callback_t handler,
               void *self)
    : rank_(rank), trusts_tcp_(!guarded && trusts_tcp()), guarded_(guarded) {
  if (guarded && !has_rdma()) fail(FSDP_UNSUPPORTED, "no RDMA device in /sys/class/infiniband");
  const BlockedSignals blocked;  // UCX starts a thread
  try {
    api_ = load_api();
    create_context(chunk_bytes);
    create_worker(message_id, handler, self);
    read_address();
  } catch (...) {
    end();
    throw;
  }
}

void Worker::end() noexcept {
  if (worker_) api_.ucp_worker_destroy(worker_);
  if (context_) api_.ucp_cleanup(context_);
  worker_ = nullptr;
  context_ = nullptr;
}

// Sets a value unless the user has set it. UCX expects the bare name of a transport's setting here; `of` is the
// transport's prefix in the environment.
void Worker::set(ucp_config_t *config, const char *of, const char *name, const char *value) {
  if (std::getenv(format_text("UCX_{}{}", of, name).c_str())) return;
  const ucs_status_t status = api_.ucp_config_modify(config, name, value);
  if (status != UCS_OK)
    warn(
        format_text("UCX {} does not take {}={} ({}), without which it may be slow, or end this process if a peer dies",
                    api_.version, name, value, api_.ucs_status_string(status)));
}

void Worker::warn(const std::string &text) { warnings_ += format_text("{}{}", warnings_.empty() ? "" : "; ", text); }

// UCX 1.13 ends the process (assertion in uct_iface.h) if a TCP connection breaks while it sends from the caller's own
// memory. So UCX must copy. A chunk is one piece that is sent without a prior request, because requests cost round
// trips.
void Worker::configure(ucp_config_t *config, uint64_t chunk_bytes) {
  // With RDMA, UCX would also open a port for TCP, which is not needed. UCX's transports within a host are not used
  // either: ranks of one host share memory without UCX, and these transports would still take 4.3 MB per rank from
  // /dev/shm.
  without_tcp_ = has_rdma() && !trusts_tcp_ && !std::getenv("UCX_TLS");
  const char *all_but = without_tcp_ ? "^tcp,posix,sysv" : "^posix,sysv";
  set(config, "", "TLS", without_tcp_ && guarded_ ? "rc,dc,self,cuda" : all_but);
  if (uses_rdma()) return;
  const uint64_t piece = std::max(chunk_bytes + room_for_headers, usual_piece);
  const std::string bytes = format_text("{}", piece);
  set(config, "", "RNDV_THRESH", "inf");
  set(config, "", "ZCOPY_THRESH", "inf");
  set(config, "TCP_", "TX_SEG_SIZE", bytes.c_str());
  set(config, "TCP_", "RX_SEG_SIZE", bytes.c_str());
  set(config, "TCP_", "CONN_NB", "y");  // a host that is cut off does not delay others
  const char *copies_up_to = std::getenv("UCX_ZCOPY_THRESH");
  if (copies_up_to && bytes_of(copies_up_to) < chunk_bytes)
    warn(format_text(
        "UCX_ZCOPY_THRESH is '{}': UCX 1.13 may end this process if a peer dies; with {} or more it does not",
        copies_up_to, piece));
}

void Worker::create_context(uint64_t chunk_bytes) {
  ucp_config_t *config = nullptr;
  check(api_.ucp_config_read(nullptr, nullptr, &config), "reading the UCX_* options");
  configure(config, chunk_bytes);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  const ucs_status_t status = api_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  api_.ucp_config_release(config);
  check(status, "ucp_init (is there a transport among UCX_TLS and a device among UCX_NET_DEVICES?)");
  ucp_context_attr_t memory{};
  memory.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  check(api_.ucp_context_query(context_, &memory), "ucp_context_query");
  if (!(memory.memory_types & (uint64_t{1} << UCS_MEMORY_TYPE_HOST)))
    fail(FSDP_UNSUPPORTED, "UCX {} with these transports does not send host memory", api_.version);
  check_trust();
}

// Called before the worker is made, because a worker opens the port. UCX itself is asked which transports it may use,
// because that depends on variables, configuration files and devices.
void Worker::check_trust() const {
  if (trusts_tcp_) return;
  char *text = nullptr;
  size_t length = 0;
  std::FILE *stream = ::open_memstream(&text, &length);
  if (!stream) fail_errno(errno, "open_memstream for UCX's transports");
  api_.ucp_context_print_info(context_, stream);
  std::fclose(stream);
  const auto transports = transports_of({text, length});
  std::free(text);
  const std::string listed =
      transports.empty() ? "that it does not list" : format_text("{}", fmt::join(transports, ", "));
  if (may_use_tcp(transports))
    fail(FSDP_UNSUPPORTED,
         "UCX {} may use TCP here (transports: {}), and any machine that reaches its TCP port can write the memory "
         "of this process without the job's secret: where only trusted machines reach this network set "
         "FSDP_UCX_TCP=trusted on every rank; where there is RDMA leave TCP out, by UCX_TLS=^tcp",
         api_.version, listed);
  if (without_tcp_ && !leaves_host(transports))
    fail(FSDP_UNSUPPORTED,
         "UCX {} reaches no other host without TCP, though there is an RDMA device (transports: {}): make that usable, "
         "or, where "
         "only trusted machines reach this network, set FSDP_UCX_TCP=trusted on every rank",
         api_.version, listed);
}

void Worker::create_worker(unsigned message_id, ucp_am_recv_callback_t callback, void *self) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(api_.ucp_worker_create(context_, &params, &worker_), "ucp_worker_create");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = message_id;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = callback;
  handler.arg = self;
  check(api_.ucp_worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler");
  check(api_.ucp_worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd");
  ucp_worker_attr_t limits{};
  limits.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  check(api_.ucp_worker_query(worker_, &limits), "ucp_worker_query");
  if (limits.max_am_header < sizeof(messages::Header))
    fail(FSDP_UNSUPPORTED, "UCX {} with these transports has message headers of {} bytes; {} are needed", api_.version,
         limits.max_am_header, sizeof(messages::Header));
}

void Worker::read_address() {
  ucp_address_t *address = nullptr;
  size_t length = 0;
  check(api_.ucp_worker_get_address(worker_, &address, &length), "ucp_worker_get_address");
  const auto *bytes = reinterpret_cast<const std::byte *>(address);
  address_.assign(bytes, bytes + length);
  api_.ucp_worker_release_address(worker_, address);
}

void Worker::sleep(int ms) const noexcept {
  pollfd events{event_fd_, POLLIN, 0};
  ::poll(&events, 1, ms);
}

void Worker::await(ucs_status_ptr_t request, int ms) noexcept {
  if (!UCS_PTR_IS_PTR(request)) return;
  const auto end = Clock::now() + std::chrono::milliseconds(ms);
  while (api_.ucp_request_check_status(request) == UCS_INPROGRESS && Clock::now() < end)
    if (!progress() && arm()) sleep(10);
  api_.ucp_request_free(request);
}

}  // namespace fsdp::transport::ucx
