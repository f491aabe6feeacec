/* SPDX-License-Identifier: Apache-2.0 */
/* Options structs that are shorter (an older client) or longer (a newer one) than this release's, and the INIT macros.
 */
#include <stddef.h>

#include "check.h"

/* An INIT macro sets the size and zeros everything else. */
#define CHECK_INIT(type, init)                                                            \
  do {                                                                                    \
    const type value = init;                                                              \
    type zero;                                                                            \
    memset(&zero, 0, sizeof zero);                                                        \
    zero.struct_size = sizeof zero;                                                       \
    CHECK(value.struct_size == sizeof value && memcmp(&value, &zero, sizeof value) == 0); \
  } while (0)

/* Holds the bytes of a struct and eight more behind it, one of which may be set. */
typedef struct {
  uint64_t words[32];
} room;

static void *newer(room *space, const void *known, size_t size, int set) {
  CHECK(size % 8 == 0 && size + 8 <= sizeof *space);
  memset(space, 0, sizeof *space);
  memcpy(space, known, size);
  space->words[0] = size + 8;
  ((unsigned char *)space)[size + 5] = (unsigned char)set;
  return space;
}

/* Writes "byte 93 of" for the byte behind the struct that `newer` sets. */
static const char *byte_text(size_t size) {
  static char text[32];
  snprintf(text, sizeof text, "byte %d of", (int)size + 5);
  return text;
}

static void check_macros(void) {
  CHECK_INIT(fsdp_error, FSDP_ERROR_INIT);
  CHECK_INIT(fsdp_tensor, FSDP_TENSOR_INIT);
  CHECK_INIT(fsdp_context_options, FSDP_CONTEXT_OPTIONS_INIT);
  CHECK_INIT(fsdp_mesh_options, FSDP_MESH_OPTIONS_INIT);
  CHECK_INIT(fsdp_model_options, FSDP_MODEL_OPTIONS_INIT);
  CHECK_INIT(fsdp_schedule_options, FSDP_SCHEDULE_OPTIONS_INIT);
  CHECK_INIT(fsdp_model_info, FSDP_MODEL_INFO_INIT);
  CHECK_INIT(fsdp_group_info, FSDP_GROUP_INFO_INIT);
  CHECK_INIT(fsdp_stats, FSDP_STATS_INIT);
  CHECK_INIT(fsdp_param, FSDP_PARAM_INIT);
  CHECK_INIT(fsdp_group_options, FSDP_GROUP_OPTIONS_INIT);
  CHECK_INIT(fsdp_chunk, FSDP_CHUNK_INIT);
  CHECK_INIT(fsdp_shard, FSDP_SHARD_INIT);
  CHECK_INIT(fsdp_adamw_options, FSDP_ADAMW_OPTIONS_INIT);
}

/* The first release of this ABI knows no shorter structs but that of an error; descriptors may lie further apart than
 * they are long. */
static void check_older(void) {
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *group = NULL;
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.struct_size -= 8;
  REFUSED(FSDP_INVALID_ARGUMENT, "fsdp_context_options.struct_size is",
          fsdp_create_local_contexts(1, &options, &context));
  OK(fsdp_create_local_contexts(1, NULL, &context));
  OK(fsdp_create_model(context, NULL, &model));

  /* The descriptors lie further apart than they are long. */
  room params[2];
  const uint64_t shape[] = {6};
  for (int i = 0; i < 2; ++i) {
    fsdp_param param = FSDP_PARAM_INIT;
    param.name = i ? "second" : "first";
    param.shape = shape;
    param.dimension_count = 1;
    newer(&params[i], &param, sizeof param, 0);
  }
  OK(fsdp_create_group(model, "group", (const fsdp_param *)params, 2, sizeof *params, NULL, &group));
  fsdp_param info = FSDP_PARAM_INIT;
  OK(fsdp_get_param_info(group, 1, &info));
  CHECK(strcmp(info.name, "second") == 0);
  OK(fsdp_seal_model(model));

  /* A shorter output struct is filled up to its end: the message is cut, and still has its NUL. */
  fsdp_error error = FSDP_ERROR_INIT, cut;
  memset(&cut, 0xAB, sizeof cut);
  cut.struct_size = 40;
  REFUSED(FSDP_INVALID_STATE, "sealed", fsdp_seal_model(model));
  OK(fsdp_get_last_error(NULL, &error));
  OK(fsdp_get_last_error(NULL, &cut));
  CHECK(cut.struct_size == 40 && cut.status == FSDP_INVALID_STATE && strlen(cut.message) == 7);
  CHECK(strncmp(cut.message, error.message, 7) == 0 && (unsigned char)cut.message[8] == 0xAB);
  cut.struct_size = 39;
  REFUSED(FSDP_INVALID_ARGUMENT, "fsdp_error.struct_size is 39", fsdp_get_last_error(NULL, &cut));

  /* A longer output struct keeps its size, and the bytes behind the known fields are not written. */
  room space;
  memset(&space, 0xAB, sizeof space);
  space.words[0] = sizeof(fsdp_chunk) + 8;
  OK(fsdp_get_chunk(group, 0, 0, (fsdp_chunk *)&space));
  CHECK(space.words[offsetof(fsdp_chunk, element_count) / 8] == 6 && space.words[0] == sizeof(fsdp_chunk) + 8);
  CHECK(space.words[sizeof(fsdp_chunk) / 8 + 1] == 0xABABABABABABABABu);
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
}

/* A newer client: bytes that this release does not know must be zero, and the message names a byte that is not. */
static void check_newer(void) {
  room space;
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_mesh *mesh = NULL;
  fsdp_group *group = NULL;
  const fsdp_context_options context_options = FSDP_CONTEXT_OPTIONS_INIT;
  REFUSED(FSDP_UNSUPPORTED, byte_text(sizeof context_options),
          fsdp_create_local_contexts(1, newer(&space, &context_options, sizeof context_options, 1), &context));
  CHECK(context == NULL);
  OK(fsdp_create_local_contexts(1, newer(&space, &context_options, sizeof context_options, 0), &context));

  const fsdp_mesh_options mesh_options = FSDP_MESH_OPTIONS_INIT;
  REFUSED(FSDP_UNSUPPORTED, byte_text(sizeof mesh_options),
          fsdp_create_mesh(context, newer(&space, &mesh_options, sizeof mesh_options, 2), &mesh));
  OK(fsdp_create_mesh(context, newer(&space, &mesh_options, sizeof mesh_options, 0), &mesh));

  const fsdp_model_options model_options = FSDP_MODEL_OPTIONS_INIT;
  REFUSED(FSDP_UNSUPPORTED, byte_text(sizeof model_options),
          fsdp_create_model(context, newer(&space, &model_options, sizeof model_options, 3), &model));
  OK(fsdp_create_model(context, newer(&space, &model_options, sizeof model_options, 0), &model));

  const fsdp_group_options group_options = FSDP_GROUP_OPTIONS_INIT;
  REFUSED(FSDP_UNSUPPORTED, byte_text(sizeof group_options),
          fsdp_create_group(model, "g", NULL, 0, sizeof(fsdp_param),
                            newer(&space, &group_options, sizeof group_options, 4), &group));
  OK(fsdp_create_group(model, "g", NULL, 0, sizeof(fsdp_param), newer(&space, &group_options, sizeof group_options, 0),
                       &group));

  fsdp_param param = FSDP_PARAM_INIT;
  param.name = "scalar";
  REFUSED(FSDP_UNSUPPORTED, byte_text(sizeof param),
          fsdp_create_group(model, "h", newer(&space, &param, sizeof param, 5), 1, sizeof space, NULL, &group));

  const fsdp_schedule_options schedule = FSDP_SCHEDULE_OPTIONS_INIT;
  REFUSED(FSDP_UNSUPPORTED, byte_text(sizeof schedule),
          fsdp_set_schedule(model, FSDP_SCHEDULE_SEQUENTIAL, newer(&space, &schedule, sizeof schedule, 6)));
  OK(fsdp_set_schedule(model, FSDP_SCHEDULE_SEQUENTIAL, newer(&space, &schedule, sizeof schedule, 0)));

  OK(fsdp_seal_model(model));
  OK(fsdp_publish_weights(model, NULL));
  OK(fsdp_finish_grads(model, 1, 0, NULL));
  const fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  REFUSED(FSDP_UNSUPPORTED, byte_text(sizeof adamw),
          fsdp_step_adamw(model, 0.1, newer(&space, &adamw, sizeof adamw, 7), NULL));
  OK(fsdp_step_adamw(model, 0.1, newer(&space, &adamw, sizeof adamw, 0), NULL));
  fsdp_destroy_model(model);
  fsdp_destroy_mesh(mesh);
  fsdp_destroy_context(context);
}

int main(void) {
  check_macros();
  check_older();
  check_newer();
  printf("options: ok\n");
  return 0;
}
