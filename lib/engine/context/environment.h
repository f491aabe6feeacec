// SPDX-License-Identifier: Apache-2.0
// Environment variables that configure a program without a change of its code. The program's own options take
// precedence.
#pragma once

#include <string>

#include "fsdp.h"

namespace fsdp::engine {

// Fills options that are 0 or NULL from FSDP_LOG, FSDP_DEBUG, FSDP_TIMEOUT and FSDP_TRACE. Texts point into the
// environment and are read before the call ends. Throws INVALID_ARGUMENT with the variable, its value and the allowed
// values.
void read_environment(fsdp_context_options &options);
// FSDP_DEBUG_VIEWS: the directory in which debug mode lists the views of memory (debug_views.h); empty: none. The
// program has no such option, because a user that sets the variable also preloads the handler that reads the file.
std::string debug_views_directory();
// The log hook of a context for which the program sets none. `rank` points to a uint32_t, with which each line begins.
void log_to_standard_error(void *rank, fsdp_log_level level, const char *message);

}  // namespace fsdp::engine
