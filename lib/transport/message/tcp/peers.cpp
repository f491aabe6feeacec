// SPDX-License-Identifier: Apache-2.0

#include "transport/message/tcp/peers.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <set>

#include <fmt/format.h>

#include "base/error.h"
#include "base/settings.h"

namespace fsdp::transport::tcp {

namespace {

Endpoint numeric(const std::string &address) {
  std::string problem;
  const auto found = Endpoint::numeric(address, 0, problem);
  if (found.empty()) fail(FSDP_INVALID_ARGUMENT, "the interface '{}': {}", address, problem);
  return found.front();
}

// Checks that another host can connect to this address.
Endpoint checked(const Endpoint &place) {
  in6_addr six{};
  uint32_t four = 1;
  if (place.family() == AF_INET6) six = reinterpret_cast<const sockaddr_in6 *>(place.get())->sin6_addr;
  if (place.family() == AF_INET) four = ntohl(reinterpret_cast<const sockaddr_in *>(place.get())->sin_addr.s_addr);
  const bool none = place.family() == AF_INET6 ? IN6_IS_ADDR_UNSPECIFIED(&six) || IN6_IS_ADDR_MULTICAST(&six)
                                               : four == INADDR_ANY || IN_MULTICAST(four);
  if (none)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_NET_INTERFACE is '{}': that is the address of no interface", place.address());
  return place;
}

// A link-local address is of no use to a peer that does not know the link.
bool is_usable(const sockaddr *address) noexcept {
  if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return false;
  return address->sa_family == AF_INET ||
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6 *>(address)->sin6_addr);
}

}  // namespace

Endpoint find_interface(const std::string &address) {
  const char *wanted = setting("FSDP_NET_INTERFACE");
  const Endpoint usual = numeric(address);
  if (!wanted || !*wanted) return usual;
  std::string problem;
  if (const auto found = Endpoint::numeric(wanted, 0, problem); !found.empty()) return checked(found.front());
  ifaddrs *list = nullptr;
  if (::getifaddrs(&list) != 0) fail_errno(errno, "the interfaces of this host");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> guard(list, ::freeifaddrs);
  const ifaddrs *best = nullptr;
  std::set<std::string> names;
  for (const ifaddrs *entry = list; entry; entry = entry->ifa_next) {
    if (!(entry->ifa_flags & IFF_UP) || !is_usable(entry->ifa_addr)) continue;
    names.insert(entry->ifa_name);
    if (std::string(wanted) == entry->ifa_name &&
        (!best || (best->ifa_addr->sa_family != usual.family() && entry->ifa_addr->sa_family == usual.family())))
      best = entry;
  }
  if (!best)
    fail(FSDP_INVALID_ARGUMENT,
         "FSDP_NET_INTERFACE is '{}': this host has no such interface with an address (it has {})", wanted,
         fmt::join(names, ", "));
  return Endpoint(best->ifa_addr);
}

}  // namespace fsdp::transport::tcp
