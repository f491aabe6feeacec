// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace fsdp {
namespace {

TEST(WireText, KeepsATextThatFits) {
  const WireText<8> text("seven b");
  EXPECT_EQ(text.view(), "seven b");
  EXPECT_EQ(text.copy(), "seven b");
  EXPECT_EQ(WireText<8>().view(), "");
}

TEST(WireText, CutsALongerTextBehindItsLastWholeCharacter) {
  EXPECT_EQ(WireText<8>("eight by").view(), "eight b");
  EXPECT_EQ(WireText<8>("sixsix\xC3\xA9").view(), "sixsix") << "a character of two bytes does not fit";
  EXPECT_EQ(WireText<9>("sixsix\xC3\xA9").view(), "sixsix\xC3\xA9");
}

// Messages are compared and hashed as bytes.
TEST(WireText, LeavesNothingOfAnEarlierText) {
  WireText<16> text("a longer text");
  text.set("short");
  const WireText<16> fresh("short");
  EXPECT_EQ(std::memcmp(&text, &fresh, sizeof text), 0);
}

TEST(WireText, EndsWhereItsBytesEnd) {
  WireText<8> texts[2];
  std::memset(&texts, 'x', sizeof texts - 1);
  EXPECT_EQ(texts[0].view(), "xxxxxxxx") << "a peer wrote no NUL";
}

TEST(WireError, CarriesWhatAnErrorCarries) {
  const WireError<32> sent(Error(FSDP_SYSTEM, "the disk is full", 7, FSDP_ORIGIN_OS, ENOSPC));
  WireError<32> received;
  std::memcpy(static_cast<void *>(&received), &sent, sizeof sent);
  EXPECT_TRUE(received.failed());
  const Error error = received.to_error();
  EXPECT_EQ(error.status, FSDP_SYSTEM);
  EXPECT_EQ(error.message, "the disk is full");
  EXPECT_EQ(error.rank, 7);
  EXPECT_EQ(error.origin, FSDP_ORIGIN_OS);
  EXPECT_EQ(error.origin_code, ENOSPC);
}

TEST(WireError, KeepsItsHeadIfItsTextIsCut) {
  const Error error = WireError<12>(Error(FSDP_UNSUPPORTED, "this build has no such device", 3)).to_error();
  EXPECT_EQ(error.status, FSDP_UNSUPPORTED);
  EXPECT_EQ(error.rank, 3);
  EXPECT_EQ(error.message, "this build ");
}

TEST(WireError, IsNoFailureUnlessItWasMadeOfAnError) {
  EXPECT_FALSE(WireError<16>().failed());
  EXPECT_EQ(WireError<16>().rank, -1);
  EXPECT_EQ(WireError<16>().origin, FSDP_ORIGIN_FSDP);
}

}  // namespace
}  // namespace fsdp
