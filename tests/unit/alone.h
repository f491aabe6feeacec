// SPDX-License-Identifier: Apache-2.0
#pragma once

// A function that computes on memory of its own, element by element, and calls nothing: ThreadSanitizer would make it
// ten times as long, and see nothing. What others write is compared by memcmp, which it sees.
#define FSDP_TEST_ALONE __attribute__((no_sanitize("thread")))
