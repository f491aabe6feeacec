// SPDX-License-Identifier: Apache-2.0
// Tests TLS with a key that both ends already have. Bytes arrive unchanged, and keys change during the connection. An
// end that has another key, names other ranks or changes a bit is refused.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <random>

#include "../own_folder.h"
#include "base/error.h"
#include "membership/wire/secret.h"
#include "transport/message/tcp/link.h"
#include "transport/message/tcp/tls.h"
#include "transport/names.h"
#include "transport/net.h"

namespace {

thread_local bool starving = false;
int sizes_set = 0;

}  // namespace

// Replaces the C library's function, and counts threads that request another stack size.
extern "C" int pthread_attr_setstacksize(pthread_attr_t *attributes, size_t bytes) noexcept {
  ++sizes_set;
  static const auto usual =
      reinterpret_cast<int (*)(pthread_attr_t *, size_t)>(::dlsym(RTLD_NEXT, "pthread_attr_setstacksize"));
  return usual(attributes, bytes);
}

#if defined(__GNUC__) && !defined(__clang__)
// GCC sees free() where it inlines the operator below, and mistakes the operator above for the library's.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

// libssl has an allocator of its own.
void *operator new(size_t bytes) {
  void *memory = starving ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, size_t) noexcept { std::free(memory); }

namespace fsdp::transport::tcp {
namespace {

using State = IoState;

Digest key_of(uint8_t first) {
  Digest key;
  std::iota(key.begin(), key.end(), first);
  return key;
}

struct Ends {
  Ends(const Digest &guest_key, const Digest &host_key, const std::string &guest_name, const std::string &host_name,
       uint64_t key_bytes = Tls::usual_key_bytes)
      : library(load_tls_library()),
        guest(library, Role::guest, guest_key, guest_name, key_bytes),
        host(library, Role::host, host_key, host_name, key_bytes) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) throw std::bad_alloc();
    of_guest = Fd(ends[0]);
    of_host = Fd(ends[1]);
  }
  void shake_hands() {
    for (int i = 0; i < 100 && (guest_state == State::waiting || host_state == State::waiting); ++i) {
      if (guest_state == State::waiting) guest_state = guest.shake_hands(of_guest);
      if (host_state == State::waiting) host_state = host.shake_hands(of_host);
    }
  }
  TlsLibrary library;
  Tls guest, host;
  Fd of_guest, of_host;
  State guest_state = State::waiting, host_state = State::waiting;
};

std::vector<std::byte> noise(size_t count, uint32_t seed) {
  std::minstd_rand random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte &byte : bytes) byte = static_cast<std::byte>(random() >> 8 & 0xff);
  return bytes;
}

// Both directions run at once, in parts of many lengths.
struct Stream {
  explicit Stream(size_t count, uint32_t seed) : bytes(noise(count, seed)), came(count) {}
  void move(Tls &from, const Fd &out, Tls &to, const Fd &in, std::minstd_rand &random) {
    if (gone < bytes.size() || from.unsent()) {
      const size_t first = std::min<size_t>(random() % 200, bytes.size() - gone);
      const size_t second = std::min<size_t>(random() % 90'000, bytes.size() - gone - first);
      const iovec parts[2] = {{bytes.data() + gone, first}, {bytes.data() + gone + first, second}};
      const ssize_t count = from.send(out, parts, 2);
      if (count > 0) gone += static_cast<size_t>(count);
      ASSERT_TRUE(count >= 0 || errno == EAGAIN) << from.problem();
      full += count < 0;
    }
    do {
      const size_t first = std::min<size_t>(random() % 50'000, came.size() - got), second = came.size() - got - first;
      const iovec parts[2] = {{came.data() + got, first}, {came.data() + got + first, second}};
      const ssize_t count = to.receive(in, parts, got == came.size() ? 0 : 2);
      if (count > 0) got += static_cast<size_t>(count);
      ASSERT_TRUE(count >= 0 || errno == EAGAIN) << to.problem();
    } while (to.has_more() && got < came.size());
  }
  std::vector<std::byte> bytes, came;
  size_t gone = 0, got = 0;
  int full = 0;
};

TEST(TcpTls, CarriesBytesBothWaysAndChangesKeys) {
  Ends ends(key_of(1), key_of(1), "rank 0 to rank 1", "rank 0 to rank 1", 300'000);
  ends.shake_hands();
  ASSERT_EQ(ends.guest_state, State::done) << ends.guest.problem();
  ASSERT_EQ(ends.host_state, State::done) << ends.host.problem();
  EXPECT_EQ(ends.guest.exported(), ends.host.exported());
  std::minstd_rand random(7);
  Stream forth(3'000'000, 1), back(1'000'000, 2);
  for (int i = 0; i < 100'000 && (forth.got < forth.bytes.size() || back.got < back.bytes.size()); ++i) {
    forth.move(ends.guest, ends.of_guest, ends.host, ends.of_host, random);
    back.move(ends.host, ends.of_host, ends.guest, ends.of_guest, random);
  }
  EXPECT_EQ(forth.came, forth.bytes);
  EXPECT_EQ(back.came, back.bytes);
  EXPECT_GE(ends.guest.key_updates(), 8u);
  EXPECT_GE(ends.host.key_updates(), 2u);
}

// The reader receives nothing that comes afterwards.
TEST(TcpTls, AChangedBitEndsIt) {
  for (const size_t at : {size_t{0}, size_t{6}, size_t{500}, size_t{20'000}}) {
    Ends ends(key_of(1), key_of(1), "a", "a");
    ends.shake_hands();
    std::vector<std::byte> bytes = noise(40'000, 3);
    const iovec part{bytes.data(), bytes.size()};
    ASSERT_EQ(ends.guest.send(ends.of_guest, &part, 1), static_cast<ssize_t>(bytes.size()));
    std::vector<std::byte> records(100'000);
    const ssize_t length = ::recv(ends.of_host.get(), records.data(), records.size(), MSG_DONTWAIT);
    ASSERT_GT(length, 40'000);
    records[at] ^= std::byte{1};
    ASSERT_EQ(::send(ends.of_guest.get(), records.data(), static_cast<size_t>(length), MSG_NOSIGNAL), length);
    std::vector<std::byte> came(40'000);
    size_t got = 0;
    ssize_t count = 1;
    for (int i = 0; i < 10 && (count > 0 || errno == EAGAIN); ++i) {
      const iovec place{came.data() + got, came.size() - got};
      count = ends.host.receive(ends.of_host, &place, 1);
      if (count > 0) got += static_cast<size_t>(count);
    }
    EXPECT_EQ(count, -1);
    EXPECT_EQ(errno, EBADMSG) << at;
    EXPECT_NE(ends.host.problem(), "") << at;
    EXPECT_LE(got, at) << "only records before it";
    EXPECT_TRUE(std::equal(came.begin(), came.begin() + static_cast<std::ptrdiff_t>(got), bytes.begin()));
    const iovec place{came.data(), came.size()};
    EXPECT_EQ(ends.host.receive(ends.of_host, &place, 1), -1);
    EXPECT_EQ(errno, EBADMSG);
  }
}

TEST(TcpTls, AnotherKeyAndOtherRanksAreRefused) {
  Ends other_key(key_of(1), key_of(2), "a", "a"),
      other_ranks(key_of(1), key_of(1), "rank 0 to rank 1", "rank 0 to rank 2");
  for (Ends *ends : {&other_key, &other_ranks}) {
    ends->shake_hands();
    EXPECT_EQ(ends->host_state, State::failed);
    EXPECT_EQ(ends->guest_state, State::failed);
    EXPECT_TRUE(ends->guest.problem().starts_with("TLS: ")) << ends->guest.problem();
    EXPECT_FALSE(ends->guest.hung_up()) << "it was refused, which is no matter of the network";
  }
}

// However libssl is configured, the handshake must use the job's key and also a key of this connection.
TEST(TcpTls, AHandshakeWithoutTheKeyIsRefused) {
  Ends ends(key_of(1), key_of(1), "a", "a");
  ends.library.SSL_session_reused = [](const SSL *) { return 0; };
  ends.shake_hands();
  for (Tls *end : {&ends.guest, &ends.host}) {
    EXPECT_EQ(end->problem(), "TLS: the handshake has not used the key that both ends have beforehand");
    EXPECT_FALSE(end->hung_up());
  }
  EXPECT_TRUE(ends.guest_state == State::failed && ends.host_state == State::failed);
}

TEST(TcpTls, KeysNeverComeOfTheSecretAlone) {
  TlsLibrary library = load_tls_library();
  static uint64_t cleared = 0;
  library.SSL_CTX_clear_options = [](SSL_CTX *, uint64_t options) { return cleared |= options; };
  const Tls made(library, Role::guest, key_of(1), "a");
  EXPECT_TRUE(cleared & SSL_OP_ALLOW_NO_DHE_KEX);
}

TEST(TcpTls, APlainConnectionIsRefused) {
  Ends ends(key_of(1), key_of(1), "a", "a");
  const std::string words(300, 'x');
  ASSERT_GT(::send(ends.of_guest.get(), words.data(), words.size(), MSG_NOSIGNAL), 0);
  EXPECT_EQ(ends.host.shake_hands(ends.of_host), State::failed);
  EXPECT_TRUE(ends.host.problem().starts_with("TLS: ")) << ends.host.problem();
}

// This end has these bytes for the other one.
ssize_t send_all(Tls &from, const Fd &out, std::vector<std::byte> &bytes) {
  const iovec part{bytes.data(), bytes.size()};
  return from.send(out, &part, 1);
}
std::vector<std::byte> receive_all(Tls &to, const Fd &in) {
  std::vector<std::byte> bytes(200'000);
  size_t got = 0;
  for (int i = 0; i < 10; ++i) {
    const iovec place{bytes.data() + got, bytes.size() - got};
    if (const ssize_t count = to.receive(in, &place, 1); count > 0) got += static_cast<size_t>(count);
  }
  bytes.resize(got);
  return bytes;
}

// libssl has taken the bytes when memory runs out. The sender must not think that they were not sent.
TEST(TcpTls, WhatWasTakenIsNotSentTwice) {
  Ends ends(key_of(1), key_of(1), "a", "a");
  ends.shake_hands();
  ASSERT_EQ(ends.guest_state, State::done) << ends.guest.problem();
  static const auto usual = ends.library.SSL_write_ex;
  ends.library.SSL_write_ex = [](SSL *ssl, const void *bytes, size_t count, size_t *written) {
    const int result = usual(ssl, bytes, count, written);
    starving = true;
    return result;
  };
  auto bytes = noise(60'000, 3);
  ssize_t count = -1;
  EXPECT_NO_THROW(count = send_all(ends.guest, ends.of_guest, bytes));
  starving = false;
  EXPECT_EQ(count, static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(receive_all(ends.host, ends.of_host), bytes);
}

// Two ranks have set up TLS, and have their links.
struct Linked {
  Linked() : library(load_tls_library()) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) throw std::bad_alloc();
    Fd sockets[2] = {Fd(ends[0]), Fd(ends[1])};
    std::unique_ptr<Tls> tls[2] = {std::make_unique<Tls>(library, Role::guest, key_of(1), "a"),
                                   std::make_unique<Tls>(library, Role::host, key_of(1), "a")};
    for (int i = 0; i < 6; ++i) tls[i % 2]->shake_hands(sockets[i % 2]);
    for (uint32_t r = 0; r < 2; ++r)
      links[r] = std::make_unique<Link>(std::move(sockets[r]), LinkOptions{1 - r, r}, std::move(tls[r]));
  }
  // A word without a payload.
  void say(uint32_t rank) {
    messages::Header header{};
    header.magic = messages::header_magic;
    header.kind = messages::Kind::credit;
    header.from = rank;
    std::vector<OutFrame> frames{make_frame(header, said[rank]++, 0)};
    std::vector<messages::Header> sent;
    links[rank]->take(frames);
    links[rank]->write(sent);
  }
  TlsLibrary library;
  std::unique_ptr<Link> links[2];
  uint64_t said[2] = {0, 0};
};

class Words final : public Sink {
 public:
  bool control(const messages::Header &, const std::byte *, uint64_t) override { return ++count > 0; }
  messages::Place place(const messages::Header &) override { return {}; }
  void arrived(const messages::Header &) override {}
  int count = 0;
};

// The socket has given bytes, and there is no memory for them. Later bytes cannot be read without them.
TEST(TcpTls, WhatIsLostIsTheEnd) {
  Linked ends;
  Words words;
  ends.say(0);
  for (int i = 0; i < 2; ++i) ends.links[1]->read(words);  // the first read handles bytes that came with the handshake
  EXPECT_EQ(words.count, 1) << ends.links[1]->problem();
  const auto usual = ends.library.BIO_write;
  ends.library.BIO_write = [](BIO *, const void *, int) { return -1; };
  ends.say(0);
  ends.links[1]->read(words);
  ends.library.BIO_write = usual;
  ends.say(0);
  ends.links[1]->read(words);
  EXPECT_EQ(words.count, 1);
  EXPECT_FALSE(ends.links[1]->open());
  EXPECT_EQ(ends.links[1]->code(), ENOMEM) << ends.links[1]->problem();
}

TEST(TcpTls, WhatCannotBeEncryptedEndsTheLinkAndIsNoFaultOfWhatComes) {
  Linked ends;
  Words words;
  ends.say(1);
  ends.library.SSL_write_ex = [](SSL *, const void *, size_t, size_t *) { return 0; };
  ends.say(0);
  EXPECT_FALSE(ends.links[0]->open());
  EXPECT_EQ(ends.links[0]->code(), EPROTO);
  EXPECT_EQ(ends.links[0]->problem(), "what goes from rank 0 to rank 1 cannot be encrypted: TLS: it cannot go on");

  Ends pair(key_of(1), key_of(1), "a", "a");
  pair.shake_hands();
  auto bytes = noise(100, 1);
  const auto usual = pair.library.SSL_write_ex;
  pair.library.SSL_write_ex = ends.library.SSL_write_ex;
  EXPECT_EQ(send_all(pair.guest, pair.of_guest, bytes), -1);
  pair.library.SSL_write_ex = usual;
  EXPECT_EQ(pair.guest.problem(), "");
  EXPECT_EQ(send_all(pair.host, pair.of_host, bytes), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(receive_all(pair.guest, pair.of_guest), bytes);
}

TEST(TcpTls, ItsLibraryIsOpenedWhenItIsAskedFor) {
  const auto refusal_over = [](const char *path) {
    ::setenv("FSDP_SSL_LIBRARY", path, 1);
    std::string text;
    try {
      create_tcp_net(0, "127.0.0.1", {.encryption = true});
    } catch (const Error &error) {
      EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
      text = error.message;
    }
    EXPECT_NO_THROW(create_tcp_net(0, "127.0.0.1")) << "who does not encrypt needs none";
    ::unsetenv("FSDP_SSL_LIBRARY");
    return text;
  };
  const fsdp::test::OwnFolder folder;
  const std::string library = folder / "libssl.so.3";
  const std::string missing = refusal_over(library.c_str()), other = refusal_over("libm.so.6");
  EXPECT_NE(missing.find(library), std::string::npos) << missing;
  EXPECT_NE(missing.find("name it in FSDP_SSL_LIBRARY"), std::string::npos) << missing;
  EXPECT_NE(other.find("libm.so.6 has no OPENSSL_init_ssl: libssl of OpenSSL 3.0 or later is needed"),
            std::string::npos)
      << other;
  EXPECT_NO_THROW(create_tcp_net(0, "127.0.0.1", {.encryption = true}));
}

// exit() runs handlers in reverse order, so one that was registered before libcrypto's sees the state after libcrypto's
// cleanup.
[[noreturn]] void exit_and_look(void (*use)()) {
  std::atexit([] {
    try {
      authenticate("secret", "label", {});
      ::_exit(0);
    } catch (const Error &) {
      ::_exit(7);
    }
  });
  use();
  std::exit(1);
}

TEST(TcpTlsDeathTest, NothingIsCleanedUpAtExit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // libcrypto has not been used there
  EXPECT_EXIT(exit_and_look([] { authenticate("secret", "label", {}); }), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exit_and_look([] { load_tls_library(); }), testing::ExitedWithCode(0), "");
}

// libssl's code is not ours, so it gets the stack size that threads of this system have.
TEST(TcpTls, ItsThreadHasTheUsualStack) {
  sizes_set = 0;
  create_tcp_net(0, "127.0.0.1", {.encryption = true});
  EXPECT_EQ(sizes_set, 0);
  create_tcp_net(0, "127.0.0.1");
  EXPECT_GE(sizes_set, 1);  // ThreadSanitizer enlarges a small stack
}

// The values are from RFC 5869, A.1 and A.3 (the first 32 bytes of each).
TEST(TcpTls, ItsKeyIsThatOfHkdf) {
  std::vector<uint8_t> salt(13);
  std::iota(salt.begin(), salt.end(), 0);
  std::string use(10, '\0');
  std::iota(use.begin(), use.end(), static_cast<char>(0xf0));
  const std::string secret(22, '\x0b');
  const Digest first{0x3c, 0xb2, 0x5f, 0x25, 0xfa, 0xac, 0xd5, 0x7a, 0x90, 0x43, 0x4f, 0x64, 0xd0, 0x36, 0x2f, 0x2a,
                     0x2d, 0x2d, 0x0a, 0x90, 0xcf, 0x1a, 0x5a, 0x4c, 0x5d, 0xb0, 0x2d, 0x56, 0xec, 0xc4, 0xc5, 0xbf};
  const Digest third{0x8d, 0xa4, 0xe7, 0x75, 0xa5, 0x63, 0xc1, 0x8f, 0x71, 0x5f, 0x80, 0x2a, 0x06, 0x3c, 0x5a, 0x31,
                     0xb8, 0xa1, 0x1f, 0x5c, 0x5e, 0xe1, 0x87, 0x9e, 0xc3, 0x45, 0x4e, 0x5f, 0x3c, 0x73, 0x8d, 0x2d};
  EXPECT_EQ(derive_key(secret, salt, use), first);
  EXPECT_EQ(derive_key(secret, {}, ""), third);
}

}  // namespace
}  // namespace fsdp::transport::tcp
