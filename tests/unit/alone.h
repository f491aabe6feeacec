// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks a function that computes on its own memory, element by element, and calls nothing. ThreadSanitizer would make
// it ten times slower and find nothing. Memory that others write is compared by memcmp, which ThreadSanitizer sees.
#define FSDP_TEST_ALONE __attribute__((no_sanitize("thread")))
