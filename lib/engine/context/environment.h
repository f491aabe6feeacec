// SPDX-License-Identifier: Apache-2.0
// What people set for a run whose program they do not touch. The program's own options win.
#pragma once

#include <string>

#include "fsdp.h"

namespace fsdp::engine {

// Where an option is 0 or NULL: FSDP_LOG, FSDP_DEBUG, FSDP_TIMEOUT and FSDP_TRACE. Texts are the environment's own and
// are read before the call ends. Throws INVALID_ARGUMENT with the variable, its value and what is allowed.
void read_environment(fsdp_context_options &options);

// FSDP_DEBUG_VIEWS: where debug mode says what lies where (debug_views.h); empty: nowhere. No option of the program's
// stands for it, because a user that sets it also preloads what reads it.
std::string debug_views_directory();

// The log hook of a context whose program has none. rank: a uint32_t, which each line begins with.
void log_to_standard_error(void *rank, fsdp_log_level level, const char *message);

}  // namespace fsdp::engine
