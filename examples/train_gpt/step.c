/* SPDX-License-Identifier: Apache-2.0 */
#include "step.h"

#include <math.h>

#include "check.h"

/* What happens between the two calls is a span of the timeline that --trace writes. */
static void begin_span(struct trainer *trainer, const char *name) {
  CHECK(trainer->context, fsdp_begin_span(trainer->context, name));
}
static void end_span(struct trainer *trainer) { CHECK(trainer->context, fsdp_end_span(trainer->context)); }

static size_t count_rows(const struct trainer *trainer) { return trainer->shape.sequences * trainer->shape.tokens; }

/* This rank's rows of a micro-batch: the global batch is cut by micro-batch first, then by rank. */
static void load_rows(struct trainer *trainer, uint64_t step, uint64_t microbatch) {
  const struct gpt_shape *shape = &trainer->shape;
  struct workspace *work = &trainer->workspace;
  const size_t rows = count_rows(trainer);
  const uint64_t part = microbatch * trainer->world_size + trainer->rank;
  begin_span(trainer, "load rows");
  for (size_t i = 0; i < shape->sequences; ++i) {
    corpus_get_row(trainer->corpus, trainer->options->seed, step, part * shape->sequences + i, shape->tokens,
                   work->rows + i * shape->tokens, work->rows + rows + i * shape->tokens);
  }
  device_upload(shape->device, work->tokens + microbatch * rows, work->rows, rows);
  device_upload(shape->device, work->targets + microbatch * rows, work->rows + rows, rows);
  end_span(trainer);
}

/* Leaves the gradient of the loss in the logits. */
static void forward(struct trainer *trainer, const uint8_t *tokens, const uint8_t *targets) {
  struct model *model = &trainer->model;
  struct workspace *work = &trainer->workspace;
  const struct gpt_shape *shape = &trainer->shape;
  struct gpt_weights weights;

  model_unshard(model, PART_EMBEDDING, 0, FSDP_FORWARD, &weights);
  begin_span(trainer, "forward embedding");
  embedding_forward(work->x[0], tokens, &weights, shape);
  end_span(trainer);
  model_reshard(model, PART_EMBEDDING, 0, FSDP_FORWARD);

  for (size_t i = 0; i < shape->layers; ++i) {
    model_unshard(model, PART_BLOCK, i, FSDP_FORWARD, &weights);
    begin_span(trainer, "forward block");
    block_forward(work->x[i + 1], work->x[i], &weights, &work->kept[i], shape);
    end_span(trainer);
    model_reshard(model, PART_BLOCK, i, FSDP_FORWARD);
  }

  model_unshard(model, PART_HEAD, 0, FSDP_FORWARD, &weights);
  begin_span(trainer, "forward head");
  head_forward(work->norm, work->logits, work->x[shape->layers], &weights, shape);
  end_span(trainer);
  model_reshard(model, PART_HEAD, 0, FSDP_FORWARD);
  begin_span(trainer, "loss");
  head_loss(work->loss, work->logits, targets, &work->scratch, shape);
  end_span(trainer);
}

static void reduce(struct trainer *trainer, enum model_part part, size_t layer, int last) {
  struct parameter_group *group = model_get_group(&trainer->model, part, layer);
  CHECK(trainer->context, fsdp_reduce_grad(group->handle, last ? FSDP_LAST : 0, trainer->stream));
}

static void backward_block(struct trainer *trainer, size_t layer, int last) {
  struct model *model = &trainer->model;
  struct workspace *work = &trainer->workspace;
  struct gpt_weights weights;
  struct gpt_gradients gradients;
  if (trainer->options->recompute) { /* the output is not needed again: its place is free for any use */
    model_unshard(model, PART_BLOCK, layer, FSDP_RECOMPUTE, &weights);
    begin_span(trainer, "recompute block");
    block_forward(work->x[layer + 1], work->x[layer], &weights, &work->kept[layer], &trainer->shape);
    end_span(trainer);
    model_reshard(model, PART_BLOCK, layer, FSDP_RECOMPUTE);
  }
  model_unshard(model, PART_BLOCK, layer, FSDP_BACKWARD, &weights); /* of MXFP8 other codes than a recompute reads */
  model_acquire_grads(model, PART_BLOCK, layer, &gradients);
  begin_span(trainer, "backward block");
  block_backward(work->d, work->x[layer], &weights, &gradients, &work->kept[layer], &work->scratch, &trainer->shape);
  end_span(trainer);
  model_reshard(model, PART_BLOCK, layer, FSDP_BACKWARD);
  reduce(trainer, PART_BLOCK, layer, last);
}

static void backward(struct trainer *trainer, const uint8_t *tokens, int last) {
  struct model *model = &trainer->model;
  struct workspace *work = &trainer->workspace;
  const struct gpt_shape *shape = &trainer->shape;
  struct gpt_weights weights;
  struct gpt_gradients gradients;

  model_unshard(model, PART_HEAD, 0, FSDP_BACKWARD, &weights);
  model_acquire_grads(model, PART_HEAD, 0, &gradients);
  begin_span(trainer, "backward head");
  head_backward(work->d, work->x[shape->layers], work->norm, work->logits, &weights, &gradients, &work->scratch, shape);
  end_span(trainer);
  model_reshard(model, PART_HEAD, 0, FSDP_BACKWARD);
  /* A tied head's gradient belongs to the embedding's group, whose other half is yet to come. */
  if (!model->tied) reduce(trainer, PART_HEAD, 0, last);

  for (size_t i = shape->layers; i-- > 0;) backward_block(trainer, i, last);

  model_unshard(model, PART_EMBEDDING, 0, FSDP_BACKWARD, &weights);
  model_acquire_grads(model, PART_EMBEDDING, 0, &gradients);
  begin_span(trainer, "backward embedding");
  embedding_backward(&gradients, work->d, tokens, shape);
  end_span(trainer);
  model_reshard(model, PART_EMBEDDING, 0, FSDP_BACKWARD);
  reduce(trainer, PART_EMBEDDING, 0, last);
}

/* Linear warmup, then a cosine down to a tenth. */
static double learning_rate(const struct options *options, uint64_t step) {
  const uint64_t warmup = options->steps / 10 < 20 ? options->steps / 10 : 20;
  if (step < warmup) return options->lr * (double)(step + 1) / (double)warmup;
  const double progress = (double)(step - warmup) / (double)(options->steps - warmup);
  return options->lr * (0.55 + 0.45 * cos(3.141592653589793 * progress));
}

/* Forward and backward of all micro-batches, and their gradients' mean in the main grads. */
static void run_passes(struct trainer *trainer) {
  const uint64_t microbatches = trainer->options->microbatches;
  for (uint64_t i = 0; i < microbatches; ++i) {
    const size_t first = i * count_rows(trainer);
    forward(trainer, trainer->workspace.tokens + first, trainer->workspace.targets + first);
    backward(trainer, trainer->workspace.tokens + first, i + 1 == microbatches);
  }
  /* Each pass's gradient is a mean over its tokens; libfsdp takes the mean over ranks, the scale that over passes. */
  CHECK(trainer->context, fsdp_finish_grads(trainer->model.handle, 1.0 / (double)microbatches, 0, trainer->stream));
}

static void capture_passes(struct trainer *trainer) {
  device_capture_begin(trainer->shape.device);
  CHECK(trainer->context, fsdp_begin_capture(trainer->model.handle, trainer->stream));
  run_passes(trainer);
  CHECK(trainer->context, fsdp_end_capture(trainer->model.handle, trainer->stream, &trainer->capture));
  trainer->graph = device_capture_end(trainer->shape.device);
}

/* Runs the same passes in one launch. The graph has no clipping, because the host decides by the norm. */
static void replay_passes(struct trainer *trainer) {
  if (!trainer->graph) capture_passes(trainer);
  CHECK(trainer->context, fsdp_prepare_replay(trainer->capture, 0.0, trainer->stream));
  device_launch(trainer->shape.device, trainer->graph);
  CHECK(trainer->context, fsdp_commit_replay(trainer->capture, trainer->stream));
}

static void update(struct trainer *trainer, struct step_result *result) {
  const struct options *options = trainer->options;
  fsdp_model *model = trainer->model.handle;
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  adamw.beta2 = 0.95;
  adamw.weight_decay = options->weight_decay;
  if (options->clip > 0.0) {
    CHECK(trainer->context, fsdp_clip_grads(model, NULL, options->clip, trainer->stream, &result->grad_norm));
  } else {
    CHECK(trainer->context, fsdp_get_grad_norm(model, NULL, trainer->stream, &result->grad_norm));
  }
  CHECK(trainer->context, fsdp_step_adamw(model, result->lr, &adamw, trainer->stream));
}

void train_step(struct trainer *trainer, uint64_t step, struct step_result *result) {
  const uint64_t microbatches = trainer->options->microbatches;
  struct device *device = trainer->shape.device;
  double loss = 0.0;
  begin_span(trainer, "step");
  for (uint64_t i = 0; i < microbatches; ++i) load_rows(trainer, step, i);
  device_zero(device, trainer->workspace.loss, sizeof loss);
  /* The first step is not captured, because libraries prepare things in their first calls that cannot be captured. */
  if (trainer->options->graph && step > trainer->first_step) {
    replay_passes(trainer);
  } else {
    run_passes(trainer);
  }
  device_download(device, &loss, trainer->workspace.loss, sizeof loss);
  CHECK(trainer->context, fsdp_all_reduce_values(trainer->context, NULL, &loss, 1, FSDP_VALUE_SUM));
  result->loss = loss / (double)(microbatches * trainer->world_size);
  result->lr = learning_rate(trainer->options, step);
  update(trainer, result);
  end_span(trainer);
}

void trainer_create(struct trainer *trainer, fsdp_context *context, const struct options *options,
                    const struct corpus *corpus) {
  struct device *device = device_create(context);
  *trainer =
      (struct trainer){.options = options, .corpus = corpus, .context = context, .stream = device_stream(device)};
  CHECK(context, fsdp_get_rank(context, &trainer->rank));
  CHECK(context, fsdp_get_world_size(context, &trainer->world_size));
  trainer->shape = (struct gpt_shape){.layers = options->layers,
                                      .width = options->width,
                                      .heads = options->heads,
                                      .sequences = options->batch / (options->microbatches * trainer->world_size),
                                      .tokens = options->context,
                                      .device = device};
  workspace_create(&trainer->workspace, &trainer->shape, options->microbatches, options->recompute != 0);
  model_create(&trainer->model, context, device, options);
}

void trainer_destroy(struct trainer *trainer) {
  fsdp_destroy_capture(trainer->capture);
  device_destroy_graph(trainer->graph);
  model_destroy(&trainer->model);
  workspace_destroy(&trainer->workspace);
  device_destroy(trainer->shape.device);
}
