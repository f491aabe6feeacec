/* SPDX-License-Identifier: Apache-2.0 */
/* What the calls of a rank use: words of the line, handles by name, arrays, and the values that calls give. */
#include "rank.h"

#include <stdlib.h>
#include <string.h>

uint32_t crc32_of(uint32_t before, const void *data, size_t size_bytes) {
  uint32_t crc = ~before;
  for (size_t i = 0; i < size_bytes; ++i) {
    crc ^= ((const unsigned char *)data)[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

/* ---- words --------------------------------------------------------------------------------------------------- */

const char *word(const line *words, int index) { return index < words->word_count ? words->words[index] : ""; }
int64_t integer(const line *words, int index) { return strtoll(word(words, index), NULL, 10); }
double number(const line *words, int index) { return strtod(word(words, index), NULL); }

const char *find_key(const line *words, const char *key) {
  for (int i = 0; i < words->key_count; ++i)
    if (strcmp(words->keys[i], key) == 0) return words->key_values[i];
  return NULL;
}
int64_t key_or(const line *words, const char *key, int64_t otherwise) {
  const char *text = find_key(words, key);
  return text ? strtoll(text, NULL, 10) : otherwise;
}
double key_number(const line *words, const char *key) {
  const char *text = find_key(words, key);
  return text ? strtod(text, NULL) : 0;
}

/* ---- names and values ---------------------------------------------------------------------------------------- */

named *find_name(rank_state *state, const char *name, char kind) {
  for (size_t i = 0; i < state->name_count; ++i)
    if (state->names[i].kind == kind && strcmp(state->names[i].name, name) == 0) return &state->names[i];
  return NULL;
}
void *handle(rank_state *state, const line *words, int index, char kind) {
  const named *found = find_name(state, word(words, index), kind);
  return found ? found->handle : NULL;
}
named *bind_name(rank_state *state, const char *name, char kind, void *handle_made) {
  named *entry = find_name(state, name, kind);
  if (!entry && state->name_count < MOST_NAMES) entry = &state->names[state->name_count++];
  if (!entry) abort();
  *entry = (named){.kind = kind, .handle = handle_made};
  snprintf(entry->name, sizeof entry->name, "%s", name);
  return entry;
}

uint64_t element_count(rank_state *state, const line *words, uint64_t index) {
  const named *group = find_name(state, word(words, 1), 'g');
  return group && index < group->param_count ? group->params[index].element_count : 1;
}

/* Element i of the five integers that begin with this word. */
double value_at(const rank_state *state, const line *words, int first, int64_t shift, uint64_t i) {
  const int64_t a = integer(words, first), b = integer(words, first + 1) + shift, c = integer(words, first + 2);
  const int64_t m = integer(words, first + 3), k = integer(words, first + 4);
  return (double)((a * (int64_t)i + b + c * state->rank) % m - m / 2) / (double)((int64_t)1 << k);
}
/* The bits of an IEEE half for a number that is exact in it, and normal or zero. */
static uint16_t half_bits(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  return (uint16_t)((bits >> 16 & 0x8000u) | (magnitude ? (magnitude >> 13) - (112u << 10) : 0));
}

void *make_array(const rank_state *state, const line *words, int first, int64_t shift, uint64_t count,
                 fsdp_dtype dtype) {
  float *array = calloc(count, sizeof *array);
  for (uint64_t i = 0; i < count; ++i) {
    const float value = (float)value_at(state, words, first, shift, i);
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == FSDP_BFLOAT16)
      ((uint16_t *)array)[i] = (uint16_t)(bits >> 16);
    else if (dtype == FSDP_FLOAT16)
      ((uint16_t *)array)[i] = half_bits(bits);
    else
      array[i] = value;
  }
  return array;
}

void give_crc(rank_state *state, uint32_t crc) { snprintf(state->value, sizeof state->value, "%08x", crc); }
void give_integer(rank_state *state, uint64_t value) {
  snprintf(state->value, sizeof state->value, "%llu", (unsigned long long)value);
}
void give_double(rank_state *state, double value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  snprintf(state->value, sizeof state->value, "%016llx", (unsigned long long)bits);
}
