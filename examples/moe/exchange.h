/* SPDX-License-Identifier: Apache-2.0 */
/* The all-to-all of tokens, which libfsdp has nothing to do with: boxes in memory that the ranks share, whether they
 * are threads or processes of this host. */
#ifndef MOE_EXCHANGE_H
#define MOE_EXCHANGE_H

#include <fsdp.h>
#include <stdint.h>

#include "moe.h"

/** Forward and backward pass take turns in no fixed order, so each has boxes and a count of its own. */
enum exchange_lane { LANE_FORWARD, LANE_BACKWARD, LANES };

/** Rows of tokens that one rank sends to another. Expert and part are sent with the tokens, not with what comes back.
 */
struct box {
  int32_t count, expert[TOKENS], part[TOKENS];
  float rows[TOKENS][WIDTH];
};

struct exchange;

/** Each run of `members` neighbouring ranks exchanges tokens. Collective over the ranks of the context. */
struct exchange *exchange_open(fsdp_context *context, int members);
void exchange_close(struct exchange *exchange);

/** The box to write for a member before the next post on this lane. */
struct box *exchange_box(struct exchange *exchange, enum exchange_lane lane, int member);
/** Sends all boxes of the lane. Each post is followed by a wait before the next one. */
void exchange_post(struct exchange *exchange, enum exchange_lane lane);
/** Waits until every member has posted as often as this rank. */
void exchange_wait(struct exchange *exchange, enum exchange_lane lane);
/** What a member has sent, until this rank's next post. */
const struct box *exchange_received(struct exchange *exchange, enum exchange_lane lane, int member);

#endif
