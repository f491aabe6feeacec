// SPDX-License-Identifier: Apache-2.0
// UCX on a host with the devices that a test names. It reports these devices and its version, and reads UCX_TLS as UCX
// does. It sends over TCP through the real libucp behind it. On standard error it says when it is opened, and which
// transports it may use.
//   FAKE_UCP_DEVICES  "rc_mlx5/mlx5_0:1 tcp/eth0 self/memory"
//   FAKE_UCP_VERSION  "1.13.1"
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

static char transports[256];  // UCX_TLS; empty: all

// The linker keeps libucp only if one of its functions is used; programs find its functions by way of this library.
void (*const fake_ucp_needs)(ucp_context_h) = ucp_cleanup;

// function: the address of a pointer to it.
static void find(const char *name, void *function) {
  void *found = dlsym(RTLD_NEXT, name);
  if (!found) abort();
  memcpy(function, &found, sizeof found);
}

static void say(const char *format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(stderr, "fake libucp: %.*s\n", length, line);
}

__attribute__((constructor)) static void begin(void) {
  const char *text = getenv("UCX_TLS");
  snprintf(transports, sizeof transports, "%s", text ? text : "");
  say("opened");
}

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) {
  void (*usual)(unsigned *, unsigned *, unsigned *);
  find("ucp_get_version", &usual);
  const char *text = getenv("FAKE_UCP_VERSION");
  if (!text || sscanf(text, "%u.%u.%u", major, minor, release) != 3) usual(major, minor, release);
}

static ucs_status_t modify(ucp_config_t *config, const char *name, const char *value) {
  ucs_status_t (*usual)(ucp_config_t *, const char *, const char *);
  find("ucp_config_modify", &usual);
  return usual(config, name, value);
}

ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value) {
  if (strcmp(name, "TLS") != 0) return modify(config, name, value);
  snprintf(transports, sizeof transports, "%s", value);
  return UCS_OK;
}

// Messages over TCP need these settings to survive the death of a peer. The library leaves them out if it sees devices
// for RDMA.
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config,
                              ucp_context_h *context) {
  static const char *const settings[][2] = {
      {"TLS", "tcp,self"}, {"NET_DEVICES", "eth0"}, {"RNDV_THRESH", "inf"}, {"ZCOPY_THRESH", "inf"}};
  for (size_t i = 0; i < sizeof settings / sizeof *settings; ++i)
    modify((ucp_config_t *)config, settings[i][0], settings[i][1]);
  ucs_status_t (*usual)(unsigned, unsigned, const ucp_params_t *, const ucp_config_t *, ucp_context_h *);
  find("ucp_init_version", &usual);
  return usual(major, minor, params, config, context);
}

// "rc" is each transport that begins so. "^tcp": all others.
static int allowed(const char *device) {
  if (!*transports) return 1;
  const int others = *transports == '^';
  char list[sizeof transports], *rest = list;
  snprintf(list, sizeof list, "%s", transports + others);
  int named = 0;
  for (const char *name; (name = strtok_r(rest, ",", &rest));) named |= strncmp(device, name, strlen(name)) == 0;
  return named != others;
}

void ucp_context_print_info(const ucp_context_h context, FILE *stream) {
  (void)context;
  const char *text = getenv("FAKE_UCP_DEVICES");
  char list[256], *rest = list, found[256] = "";
  snprintf(list, sizeof list, "%s", text ? text : "");
  int number = 0;
  for (const char *device; (device = strtok_r(rest, " ", &rest));)
    if (allowed(device)) {
      fprintf(stream, "#      resource %d  :  md 0  dev 0  flags -- %s\n", number++, device);
      snprintf(found + strlen(found), sizeof found - strlen(found), " %s", device);
    }
  say("UCX_TLS=%s:%s", transports, found);
}
