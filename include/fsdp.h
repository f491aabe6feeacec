/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsdp.h - fully sharded data parallel training as a library.
 *
 * The caller's framework does the math. libfsdp owns the memory of parameters, gradients and optimizer state,
 * the communication, and the order of events, and it checks every call.
 *
 * The words (docs/glossary.md has all of them):
 *   group      a PARAMETER group: the parameters that are gathered and reduced as one, say a transformer layer.
 *              Not a process group and not an optimizer's group of hyper-parameters.
 *   context    one rank's membership in the job. Everything hangs off it; nothing is global.
 *   mesh       the ranks arranged as replicate x shard.
 *   model      the ordered set of groups that train together.
 *   full       a whole tensor.               shard       this rank's part of it.
 *   compute weights  what the math reads, in the descriptor's dtype.
 *   main weights, main grads  the fp32 shards that the optimizer owns.
 *   unshard / reshard  make the full compute weights readable / give them back.
 *   hold       one claim on an unsharded group, counted per phase.
 *   update window  the time between fsdp_finish_grads and fsdp_publish_weights (or a step that publishes):
 *              the only time when main weights may be written. A sealed model starts inside it.
 *   publish    turn updated main weights into compute weights and raise their version.
 *
 * One training step, for every micro-batch and then once:
 *
 *   forward:   for each group   fsdp_unshard(g, FSDP_FORWARD) .. compute .. fsdp_reshard(g, FSDP_FORWARD)
 *   backward:  for each group   fsdp_unshard(g, FSDP_BACKWARD) .. fsdp_acquire_grad per parameter .. compute ..
 *              in reverse       fsdp_reshard(g, FSDP_BACKWARD), fsdp_reduce_grad(g, FSDP_LAST on the last micro-batch)
 *   then       fsdp_finish_grads(model), fsdp_step_adamw(model)
 *
 * Rules that hold for every call, so that no docstring repeats them (docs/contracts/ has a page for each):
 *   Errors     Every call returns fsdp_status; FSDP_OK is 0. fsdp_get_last_error tells exactly what was wrong.
 *              On failure out-handles are set to NULL and other outputs are left untouched.
 *   Options    A NULL options pointer means all defaults. In an options struct, struct_size is sizeof the struct and a
 *              zero in any other field means the default. FSDP_X_OPTIONS_INIT is zero plus the size.
 *   Threads    One thread at a time inside a context; a second one gets FSDP_BUSY. Getters that say so, abort and
 *              destroy may be called from any thread at any time.
 *   Streams    fsdp_stream is a cudaStream_t on a CUDA device (NULL: the legacy default stream). On the host device it
 *              must be NULL, which means the calling thread. See fsdp_device_kind.
 *   Strings    UTF-8, copied in. Returned pointers belong to the object they came from and live as long as it does.
 *   Fork       A context does not survive fork(): calls in the child return FSDP_INVALID_STATE.
 *
 * In the docstrings, "Collective: X" says that all ranks of X must make the call, in the same order; "Blocks" is one of
 * no, local work, peers. "Window" says whether the call belongs inside or outside the update window.
 */
#ifndef FSDP_H
#define FSDP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

#if defined(__GNUC__) || defined(__clang__)
#define FSDP_API __attribute__((visibility("default")))
#define FSDP_CHECKED __attribute__((warn_unused_result))
#else
#define FSDP_API
#define FSDP_CHECKED
#endif

/* ---- handles ------------------------------------------------------------------------------------------------- */

typedef struct fsdp_context fsdp_context;
typedef struct fsdp_mesh fsdp_mesh;
typedef struct fsdp_model fsdp_model;
typedef struct fsdp_group fsdp_group; /* belongs to its model and ends with it */

/** The very type of cudaStream_t, without its header. */
typedef struct CUstream_st *fsdp_stream;

/* ---- status and errors --------------------------------------------------------------------------------------- */

typedef int32_t fsdp_status;
enum {
  FSDP_OK = 0,
  FSDP_INVALID_ARGUMENT = 1, /* a value that can never be right here */
  FSDP_INVALID_HANDLE = 2,   /* NULL, of another type, of another context, or destroyed */
  FSDP_INVALID_STATE = 3,    /* right call, wrong moment; the message names the call expected */
  FSDP_UNSUPPORTED = 4,      /* this build, backend or release cannot do it */
  FSDP_OUT_OF_MEMORY = 5,
  FSDP_BUSY = 6,           /* another thread is inside this context */
  FSDP_MISMATCH = 7,       /* ranks called or declared different things */
  FSDP_PEER_FAILED = 8,    /* a rank died, left or aborted; the error names it */
  FSDP_TIMEOUT = 9,        /* an operation outlasted its timeout_ms */
  FSDP_ABORTED = 10,       /* fsdp_abort_context was called on this context */
  FSDP_INTERRUPTED = 11,   /* the caller's interrupted hook asked to stop waiting */
  FSDP_SYSTEM = 12,        /* the operating system or a backend failed; origin and origin_code say which */
  FSDP_INTERNAL = 13       /* a bug in libfsdp: please report the message */
};

typedef int32_t fsdp_origin;
enum { FSDP_ORIGIN_FSDP = 1, FSDP_ORIGIN_OS = 2, FSDP_ORIGIN_CUDA = 3, FSDP_ORIGIN_NCCL = 4, FSDP_ORIGIN_UCX = 5 };

/** Detail of a failed call. Output only: set struct_size before the call. */
typedef struct fsdp_error {
  uint64_t struct_size;
  fsdp_status status;
  fsdp_origin origin;
  int64_t origin_code;    /* errno, cudaError_t, ... of that origin; 0 if none */
  int32_t rank;           /* the rank to blame, -1 if none */
  int32_t context_failed; /* 1 if the context has failed for good and can only be destroyed */
  char message[1024];     /* NUL-terminated; cut at the end if longer */
} fsdp_error;
#define FSDP_ERROR_INIT {sizeof(fsdp_error), 0, 0, 0, 0, 0, {0}}

/**
 * The detail of the last failing call: with a context, of that context (whichever thread made the call); with NULL, of
 * the calling thread (any context, or none). status is FSDP_OK if there was none.
 * Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.1.
 */
FSDP_API fsdp_status fsdp_get_last_error(const fsdp_context *context, fsdp_error *error);

/** A short English name of a status, such as "FSDP_TIMEOUT"; static, never NULL. Threads: any. Since 0.1. */
FSDP_API const char *fsdp_get_status_name(fsdp_status status);

/** The library's version, "0.1.0"; static. Threads: any. Since 0.1. */
FSDP_API const char *fsdp_get_version(void);

/**
 * What this build contains, as text lines of "key: value": version, backends, instruction set in use.
 * buffer/size_bytes: see fsdp_describe_model. Threads: any. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_describe_build(char *buffer, uint64_t *size_bytes);

/* ---- numbers ------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_dtype;
enum { FSDP_FLOAT32 = 1, FSDP_BFLOAT16 = 2, FSDP_FLOAT16 = 3 };

/** Bytes of one element, 0 for an unknown dtype. Threads: any. Since 0.1. */
FSDP_API uint64_t fsdp_get_dtype_size(fsdp_dtype dtype);

/** A view of memory that libfsdp owns. Output only: set struct_size before the call. */
typedef struct fsdp_tensor {
  uint64_t struct_size;
  void *data;               /* first element, contiguous in C order */
  const uint64_t *shape;    /* dimension_count sizes, outermost first; lives as long as the model */
  uint64_t element_count;
  uint32_t dimension_count;
  fsdp_dtype dtype;
} fsdp_tensor;
#define FSDP_TENSOR_INIT {sizeof(fsdp_tensor), 0, 0, 0, 0, 0}

/* ---- context ------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_log_level;
enum { FSDP_LOG_ERROR = 1, FSDP_LOG_WARNING = 2, FSDP_LOG_INFO = 3, FSDP_LOG_DEBUG = 4 };

/** Returns non-zero to give up the wait. Runs on the thread that waits, about every 20 ms. */
typedef int32_t (*fsdp_interrupted_hook)(void *user_data);
/** Runs on the caller's thread only: lines of library threads are handed over in the caller's next call. */
typedef void (*fsdp_log_hook)(void *user_data, fsdp_log_level level, const char *message);

enum {
  /** Catch use after reshard: copied views are filled with NaN, mapped ones lose PROT_READ. A seal checks its plan. */
  FSDP_CONTEXT_DEBUG = 1u << 0,
  /** Do the library's gather and reduce work on the calling thread, in call order. Same bits, easier to debug; calls that
   *  do not block otherwise then wait for peers. */
  FSDP_CONTEXT_NO_OVERLAP = 1u << 1,
  /** Keep a timeline of calls, waits and collectives for fsdp_write_trace, and give them to NVTX tools as ranges. */
  FSDP_CONTEXT_TRACE = 1u << 2
};

/**
 * Where a context keeps the memory of its models.
 *
 * On a CUDA device everything that a call names (weights, gradients, states) lies in the GPU's memory, and calls enqueue
 * their work: fsdp_unshard makes the stream given wait for the weights and returns, fsdp_reduce_grad takes the gradients
 * in that stream's order and returns. So far as docstrings say "Blocks: peers on the host device", they do not block here.
 *   Streams      A call may name any stream of the device; what it enqueues comes after what earlier calls enqueued that it
 *                needs, also on other streams. A stream named by fsdp_acquire_grad must live until fsdp_reduce_grad.
 *                Ranks that are threads of one process and share a GPU each need streams of their own: NULL, the legacy default
 *                stream, is one for all of them, and the work of one would wait behind that of another which waits for it.
 *                Only calls that return values wait for the GPU: fsdp_get_grad_norm, fsdp_get_param_grad_norms, fsdp_clip_grads,
 *                fsdp_check_grads, fsdp_apply_grads with a norm, and fsdp_load_param, fsdp_read_param, fsdp_discard_step. Ranks
 *                still meet on the host where a call says "Blocks: peers".
 *   Gathers      are collective: the ranks of a shard axis must make the same fsdp_unshard, fsdp_reshard, fsdp_prefetch and
 *                fsdp_reduce_grad calls in the same order. Calls that differ are MISMATCH at the latest at the end of the step.
 *   Unshard      always copies (FSDP_UNSHARD_COPIED), unless one rank has all: a GPU does not map the memory of others.
 *   Pointers     given to fsdp_put_grad and fsdp_apply_grads must be readable by the GPU, those of fsdp_set_arena its own memory;
 *                fsdp_load_param and fsdp_read_param take host or device memory.
 */
typedef int32_t fsdp_device_kind;
enum { FSDP_DEVICE_HOST = 1, FSDP_DEVICE_CUDA = 2 };

/** How ranks exchange what lies in the memory of GPUs. */
typedef int32_t fsdp_device_transport;
enum {
  FSDP_TRANSPORT_NCCL = 1,   /* libnccl.so.2, opened at run time; each rank needs a GPU of its own before NCCL 2.30.3 */
  FSDP_TRANSPORT_STAGING = 2 /* through pinned memory of the host, summed there: the bits of the host device; ranks may share a GPU */
};

/** For fsdp_context_options.device_index: GPU `index` as CUDA counts them. */
#define FSDP_DEVICE_INDEX(index) ((index) + 1)

typedef struct fsdp_context_options {
  uint64_t struct_size;
  uint32_t flags;          /* FSDP_CONTEXT_*; 0: none */
  uint32_t world_size;     /* 0: from the launcher's variables; else rank and rendezvous count */
  uint32_t rank;           /* counts only with world_size */
  uint32_t timeout_ms;     /* longest wait for peers in one operation; 0: 300,000 */
  const char *rendezvous;  /* counts only with world_size: where the ranks of the job meet: a name (ranks of one host), tcp://HOST:PORT or file:///DIRECTORY; NULL: FSDP_RENDEZVOUS, else the launcher's */
  fsdp_interrupted_hook interrupted; /* NULL: none */
  void *interrupted_data;
  fsdp_log_hook log;       /* NULL: none */
  void *log_data;
  fsdp_log_level log_level; /* 0: FSDP_LOG_WARNING */
  uint32_t debug_delay_us; /* longest random delay put before every piece of library work, to shake out races; 0: none */
  uint64_t debug_delay_seed;
  uint64_t debug_failed_allocation; /* make the n-th allocation of memory roles fail, n from 1; 0: none */
  uint64_t trace_events;   /* counts only with FSDP_CONTEXT_TRACE: how many events are kept, of 64 bytes; 0: 65,536 */
  uint32_t heartbeat_timeout_ms; /* a rank or host that is silent for so long counts as lost; at least 1,000; 0: 8,000 */
  uint32_t flight_events;  /* recent calls and collectives that the flight recorder keeps, of 64 bytes; 0: 1,024 */
  const char *flight_directory; /* flight-RANK.json is written into it if the context fails (an earlier one becomes flight-RANK.json.1, and so on); NULL: FSDP_FLIGHT_DIRECTORY, else nowhere */
  uint32_t ranks_per_host; /* so many neighbouring ranks count as a host: for plans, and to try on one host what runs on several; 0: as it is */
  fsdp_device_kind device; /* 0: FSDP_DEVICE_HOST */
  int32_t device_index;    /* counts only with FSDP_DEVICE_CUDA: FSDP_DEVICE_INDEX(i) for GPU i; 0: the calling thread's current one */
  fsdp_device_transport device_transport; /* counts only with FSDP_DEVICE_CUDA; 0: NCCL where it can serve the ranks, else staging */
} fsdp_context_options;
#define FSDP_CONTEXT_OPTIONS_INIT \
  {sizeof(fsdp_context_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * Join the job. Without a world_size in the options the launcher's variables decide, the first of these that are set:
 *   torchrun, fsdp-run  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, with LOCAL_RANK and LOCAL_WORLD_SIZE; the port is
 *                       MASTER_PORT + 1 where TORCHELASTIC_USE_AGENT_STORE is True, since torch's store has the other
 *   Open MPI            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
 *   Slurm               SLURM_PROCID and SLURM_STEP_ID, with SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID
 *   MPICH (Hydra)       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
 * None of them set: a world of one. Some variables of a launcher without the others: INVALID_ARGUMENT, and the message
 * names what is missing. FSDP_RENDEZVOUS (as rendezvous in the options) says where to meet instead of MASTER_ADDR and
 * MASTER_PORT; ranks of several hosts need it under Open MPI and MPICH, which give no address. Ranks with different
 * FSDP_RESTART_COUNT (fsdp-run --max-restarts) do not meet. The log line at FSDP_LOG_INFO says what was used.
 *
 * Ranks that the launcher says are all on one host meet on a unix socket: same user, and the same job secret if
 * FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE is set. Otherwise they meet by TCP: rank 0 listens at the rendezvous until all
 * have come, both ends of a connection prove the job secret before anything else is read, and without a secret only
 * loopback addresses are served. At most 16,384 ranks, 1,024 on one host. See docs/guides/launchers.md.
 * Collective: the job. Blocks: peers. Threads: any. Since 0.1.
 * Errors: INVALID_ARGUMENT, TIMEOUT, PEER_FAILED, SYSTEM, OUT_OF_MEMORY, UNSUPPORTED (several hosts without UCX).
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_context(const fsdp_context_options *options, fsdp_context **context);

/**
 * Make world_size contexts in this process, one for each thread that will act as a rank. contexts is an array of
 * world_size. Each context is then used by one thread at a time, and collective calls must be made from different
 * threads. world_size and rank in the options are ignored.
 * Collective: no. Blocks: local work. Threads: any. Errors: INVALID_ARGUMENT, SYSTEM, OUT_OF_MEMORY. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_local_contexts(uint32_t world_size, const fsdp_context_options *options,
                                                            fsdp_context **contexts);

/**
 * Make a context that only plans: rank `rank` of an imagined world. Meshes, models and groups are declared and sealed
 * by the very calls of a real run, but nothing is allocated and nobody is contacted; fsdp_get_memory (but see there),
 * fsdp_get_chunk and fsdp_describe_model answer as they would in that run, to the byte. Calls that would touch
 * data return INVALID_STATE. Good for a job of 16,384 ranks on a laptop.
 * Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_plan_context(uint32_t world_size, uint32_t rank,
                                                          const fsdp_context_options *options, fsdp_context **context);

/**
 * Leave the job in good order: waits until every rank has called it. Destroy the context afterwards, also on failure.
 * Collective: the job. Blocks: peers. Errors: INVALID_STATE (a model has unfinished work), PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_close_context(fsdp_context *context);

/**
 * Fail the context for good and wake its waiting calls, here and on the other ranks of the job. Sets a flag and returns.
 * reason may be NULL. Collective: no. Blocks: no. Threads: any, also while another call runs. Since 0.1.
 */
FSDP_API fsdp_status fsdp_abort_context(fsdp_context *context, const char *reason);

/**
 * Give the handle back. Never waits for peers; models and meshes of the context become invalid to use but must still
 * be destroyed, in any order. NULL is allowed. A rank that leaves without fsdp_close_context looks failed to peers
 * that wait for it. Collective: no. Blocks: local work. Threads: any, also while another call runs. Since 0.1.
 */
FSDP_API void fsdp_destroy_context(fsdp_context *context);

/** This context's rank, from 0. Threads: any. Since 0.1. */
FSDP_API fsdp_status fsdp_get_rank(const fsdp_context *context, uint32_t *rank);
/** The number of ranks of the job. Threads: any. Since 0.1. */
FSDP_API fsdp_status fsdp_get_world_size(const fsdp_context *context, uint32_t *world_size);
/** The error that failed the context for good, or status FSDP_OK. Threads: any. Since 0.1. */
FSDP_API fsdp_status fsdp_get_context_error(const fsdp_context *context, fsdp_error *error);

typedef int32_t fsdp_value_op;
enum { FSDP_VALUE_SUM = 1, FSDP_VALUE_MIN = 2, FSDP_VALUE_MAX = 3 };

/**
 * Reduce a few doubles (at most 512) over all ranks, in rank order, in place: say, the global loss.
 * Collective: the job. Blocks: peers. Errors: INVALID_ARGUMENT, MISMATCH (counts or ops differ), PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_all_reduce_values(fsdp_context *context, double *values, uint64_t value_count,
                                                        fsdp_value_op op);

/* ---- mesh ---------------------------------------------------------------------------------------------------- */

typedef struct fsdp_mesh_options {
  uint64_t struct_size;
  uint32_t replicate_size; /* 0: 1 */
  uint32_t shard_size;     /* 0: ranks / replicate_size */
  const uint32_t *ranks;   /* the ranks of the mesh in its order; NULL: the world */
  uint32_t rank_count;     /* counts only with ranks */
  uint32_t reduction_block_size; /* 0: see below */
} fsdp_mesh_options;
#define FSDP_MESH_OPTIONS_INIT {sizeof(fsdp_mesh_options), 0, 0, 0, 0, 0}

/**
 * Arrange ranks as replicate x shard; rank r of the mesh is replica r / shard_size, shard r % shard_size. With a list of
 * ranks every rank of it passes the same list, and a rank may be in several meshes (say, one for dense and one for expert
 * parameters).
 *
 * Replicas are joined by sums of gradients alone (HSDP; see fsdp_outer_strategy): they may be on different hosts, while
 * each one's shard axis shares a host. A mesh of one replica may lie on several hosts, with the same number of
 * neighbouring ranks on each: every host then keeps one copy of the compute weights, which are gathered over hosts once a
 * step, and everything else is sharded over all ranks.
 *
 * Gradients of the shard axis are added in rank order. With reduction_block_size B, a divisor of shard_size, ranks [0, B) are
 * added and scaled, then [B, 2 B), ...; then the blocks' sums in order. An axis over hosts is added so, a host being
 * a block; an axis on one host that declares the same blocks gets the same bits.
 *
 * Collective: the ranks of the mesh. Blocks: no.
 * Errors: INVALID_ARGUMENT (sizes do not multiply to the ranks), UNSUPPORTED (hosts cut an axis unevenly). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_mesh(fsdp_context *context, const fsdp_mesh_options *options,
                                                  fsdp_mesh **mesh);
/** Give the handle back; models made from it keep what they need. NULL is allowed. Threads: any. Since 0.1. */
FSDP_API void fsdp_destroy_mesh(fsdp_mesh *mesh);

/* ---- model --------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_strategy;
enum {
  FSDP_NO_SHARD = 1,           /* DDP: everything whole on every rank */
  FSDP_OPTIM = 2,              /* ZeRO-1: optimizer state and main weights sharded; one delayed reduce a step */
  FSDP_OPTIM_GRADS = 3,        /* ZeRO-2: and main grads */
  FSDP_OPTIM_GRADS_PARAMS = 4  /* ZeRO-3, FSDP: and compute weights */
};

typedef int32_t fsdp_grad_op;
enum {
  FSDP_GRAD_MEAN = 1,  /* (1 / data-parallel ranks) times the sum */
  FSDP_GRAD_SUM = 2,
  FSDP_GRAD_FACTOR = 3 /* grad_factor times the sum */
};

typedef int32_t fsdp_unshard_mode;
enum {
  FSDP_UNSHARD_MAPPED = 1, /* full weights are a read-only mapping of every rank's shard: no bytes move, one copy a node */
  FSDP_UNSHARD_COPIED = 2  /* full weights are copied into private buffers of a pool */
};

typedef int32_t fsdp_reduce_policy;
enum {
  FSDP_REDUCE_EACH = 1, /* every contribution is reduced and added to the main grads */
  FSDP_REDUCE_LAST = 2  /* contributions add up in a full local buffer; the last one is reduced (no_sync) */
};

/** What replicas divide among them. */
typedef int32_t fsdp_outer_strategy;
enum {
  FSDP_OUTER_NO_SHARD = 1, /* HSDP: nothing; one all-reduce over replicas per group and step */
  FSDP_OUTER_OPTIM = 2     /* HFSDP: main weights and optimizer state; one reduce-scatter per group and step, one gather at publish */
};

typedef int32_t fsdp_optimizer;
enum {
  FSDP_OPTIMIZER_ADAMW = 1, /* fp32 states "exp_avg" and "exp_avg_sq", for fsdp_step_adamw */
  FSDP_OPTIMIZER_CALLER = 2 /* the caller's own, with states from fsdp_add_optimizer_state */
};

enum {
  FSDP_MODEL_NO_PREFETCH = 1u << 0,        /* gather a group only when it is unsharded */
  FSDP_MODEL_FORCE_COMMUNICATION = 1u << 1 /* run the collectives also in a world of one, for tests */
};

typedef struct fsdp_model_options {
  uint64_t struct_size;
  const fsdp_mesh *mesh;           /* NULL: 1 x world */
  uint32_t flags;                  /* FSDP_MODEL_* */
  fsdp_strategy strategy;          /* 0: FSDP_OPTIM_GRADS_PARAMS */
  fsdp_dtype grad_dtype;           /* of full gradients; 0: the parameter's dtype */
  fsdp_dtype reduce_dtype;         /* what gradients are rounded to before they are summed in fp32; 0: grad_dtype */
  fsdp_grad_op grad_op;            /* 0: FSDP_GRAD_MEAN */
  fsdp_unshard_mode unshard_mode;  /* 0: FSDP_UNSHARD_MAPPED, on a CUDA device FSDP_UNSHARD_COPIED, which is the only one there */
  double grad_factor;              /* counts only with FSDP_GRAD_FACTOR */
  fsdp_reduce_policy reduce_policy; /* 0: EACH; FSDP_OPTIM is always LAST, FSDP_NO_SHARD defaults to LAST */
  fsdp_optimizer optimizer;        /* 0: FSDP_OPTIMIZER_ADAMW */
  uint32_t prefetch_depth;         /* groups gathered ahead; 0: 1 (see FSDP_MODEL_NO_PREFETCH) */
  uint32_t max_pending_groups;     /* transient full gradient buffers alive at once; 0: 2 */
  uint64_t prefetch_bytes;         /* do not prefetch beyond so many gathered bytes ahead; 0: no limit */
  fsdp_outer_strategy outer_strategy; /* 0: FSDP_OUTER_NO_SHARD; the other one needs a mesh with replicas */
  uint32_t reserved;               /* 0 */
} fsdp_model_options;
#define FSDP_MODEL_OPTIONS_INIT {sizeof(fsdp_model_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * An empty model. Collective: the mesh. Blocks: no. Memory: none until the seal.
 * Errors: INVALID_ARGUMENT, INVALID_HANDLE, UNSUPPORTED. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_model(fsdp_context *context, const fsdp_model_options *options,
                                                   fsdp_model **model);

/**
 * Give the handle back, with its groups and memory. NULL is allowed. Never waits for peers; peers that are in a collective of
 * this model, or enter one, get TIMEOUT naming this rank unless they destroy theirs too. Threads: any. Since 0.1.
 */
FSDP_API void fsdp_destroy_model(fsdp_model *model);

typedef int32_t fsdp_phase;
enum {
  FSDP_FORWARD = 1,
  FSDP_BACKWARD = 2,
  FSDP_RECOMPUTE = 3, /* a forward pass run again inside backward (activation checkpointing) */
  FSDP_EVAL = 4       /* a forward pass without backward, between steps */
};

typedef int32_t fsdp_schedule_kind;
enum {
  FSDP_SCHEDULE_SEQUENTIAL = 1,  /* groups in declared order forward, reversed backward; one address per group for ever */
  FSDP_SCHEDULE_INTERLEAVED = 2, /* 1F1B: a forward and a backward pass run at once; one address per (group, direction) */
  FSDP_SCHEDULE_VISITS = 3       /* the list of visits below */
};

/** One stop of an explicit schedule: group_index counts groups in the order of their creation. */
typedef struct fsdp_visit {
  uint32_t group_index;
  fsdp_phase phase; /* FSDP_FORWARD or FSDP_BACKWARD */
} fsdp_visit;

typedef struct fsdp_schedule_options {
  uint64_t struct_size;
  const fsdp_visit *visits; /* counts only with FSDP_SCHEDULE_VISITS; every trainable group needs a BACKWARD visit */
  uint64_t visit_count;
} fsdp_schedule_options;
#define FSDP_SCHEDULE_OPTIONS_INIT {sizeof(fsdp_schedule_options), 0, 0}

/**
 * The order in which groups will be visited. It decides prefetch and plans the buffers; the default is SEQUENTIAL.
 * A training step may deviate from it: an unused prefetch is dropped, and a hold that does not fit is an error that
 * names both groups. Collective: the mesh. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (sealed). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_set_schedule(fsdp_model *model, fsdp_schedule_kind kind,
                                                   const fsdp_schedule_options *options);

/**
 * Add a named state tensor for the caller's own optimizer: as long as each main weight shard, zeroed at the seal.
 * The model must have FSDP_OPTIMIZER_CALLER. Collective: the mesh. Blocks: no.
 * Errors: INVALID_ARGUMENT (name taken or not UTF-8 of 1-63 bytes), INVALID_STATE. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_add_optimizer_state(fsdp_model *model, const char *name, fsdp_dtype dtype);

typedef int32_t fsdp_role;
enum {
  FSDP_ROLE_COMPUTE = 1,   /* compute weights at rest (this rank's part; whole where the strategy keeps them whole) */
  FSDP_ROLE_MAIN = 2,      /* fp32 main weights; 0 bytes where the compute weights are fp32, which are then the same */
  FSDP_ROLE_GRAD = 3,      /* fp32 main grads */
  FSDP_ROLE_OPTIMIZER = 4, /* optimizer state */
  FSDP_ROLE_GATHER = 5,    /* pool of gathered full weights; 0 when mapped */
  FSDP_ROLE_REDUCE = 6,    /* pool of full gradients */
  FSDP_ROLE_STAGING = 7,   /* scratch for norms, and a small buffer for exchanges with peers */
  FSDP_ROLE_COUNT = 7
};

/**
 * Hand in the memory of a role, aligned to 4096 bytes and at least as large as fsdp_get_memory of a planning context
 * says. Only roles that peers do not read can be handed in: MAIN, OPTIMIZER, GATHER, and GRAD where no group is NO_SHARD or
 * reduced once a step. Others are UNSUPPORTED. On a CUDA device it must be memory of that device. The memory must outlive the
 * model. Collective: no. Blocks: no.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (sealed), UNSUPPORTED. A size too small is found by the seal. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_set_arena(fsdp_model *model, fsdp_role role, void *data, uint64_t size_bytes);

/**
 * Fix the layout, plan and allocate all memory, and compare what every rank declared (names, order, shapes, dtypes,
 * flags, policy, layout hash). The first difference is reported on every rank with both ranks' values. Afterwards
 * the model is in its update window: load parameters, then fsdp_publish_weights.
 * Collective: the mesh. Blocks: peers. Memory: all that the model will ever use.
 * Errors: MISMATCH, INVALID_STATE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, PEER_FAILED, TIMEOUT; what fails one rank
 * fails all of them with its status. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_seal_model(fsdp_model *model);

typedef struct fsdp_memory {
  uint64_t struct_size;
  uint64_t role_bytes[8];            /* indexed by fsdp_role; [0] is the sum */
  uint64_t gather_lower_bound_bytes; /* the schedule's live bytes at its peak: no pool can be smaller */
  uint64_t reduce_lower_bound_bytes;
  uint64_t parameter_count;          /* elements of all parameters, without padding, whole */
  uint64_t padding_count;            /* elements of padding, whole */
} fsdp_memory;
#define FSDP_MEMORY_INIT {sizeof(fsdp_memory), {0}, 0, 0, 0, 0}

/**
 * The memory of a rank of a sealed model. rank counts in its mesh. With a planning context on a GPU whose options name no transport,
 * STAGING is the most that the seal may choose. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_memory(fsdp_model *model, uint32_t rank, fsdp_memory *memory);

typedef struct fsdp_stats {
  uint64_t struct_size;
  uint64_t version;             /* of the published weights, from 1; 0: none yet */
  uint64_t step;                /* AdamW steps taken */
  uint64_t gathers;             /* transitions to gathered; without all_gathers: those that moved no bytes */
  uint64_t reduces;             /* contributions reduced */
  uint64_t all_gathers;         /* collectives that moved bytes, by kind */
  uint64_t reduce_scatters;
  uint64_t all_reduces;
  uint64_t gathered_bytes;      /* bytes that gathers copied on this rank: those of all_gathers */
  uint64_t reduced_bytes;       /* bytes of full gradients, of all ranks, that reduces read on this rank */
  uint64_t prefetches;          /* gathers started ahead */
  uint64_t dropped_prefetches;  /* of these, given back unused */
  uint64_t gathered_groups;     /* now */
  uint64_t peak_gathered_groups;
  uint64_t pending_grad_groups; /* full transient gradient buffers now in use */
  uint64_t peak_pending_grad_groups;
  uint64_t wait_ns;             /* the caller's time spent waiting, exposed communication: the sum of the three *_wait_ns */
  uint64_t allocated_bytes[8];  /* by fsdp_role, as counted by the allocator; [0] is the sum */
  uint64_t gather_wait_ns;      /* for copies of weights */
  uint64_t reduce_wait_ns;      /* for reduces to end, or for a gradient buffer to be free */
  uint64_t peer_wait_ns;        /* for peers to publish, to end the step, to exchange norms and parameters */
  uint64_t reduce_scatter_bytes; /* bytes that collectives read on this rank, by kind */
  uint64_t all_reduce_bytes;     /* both halves: the sum's and the gather's */
  uint64_t allocations;         /* of memory for roles, shared or not, by all models of the context since it began */
  uint64_t gather_pool_bytes;   /* the pools, and the bytes alive at the schedule's peak: no pool can be smaller */
  uint64_t gather_lower_bound_bytes;
  uint64_t reduce_pool_bytes;
  uint64_t reduce_lower_bound_bytes;
  uint64_t outer_all_reduces; /* collectives over the outer axis (replicas, or hosts of a shard axis), not counted above */
  uint64_t outer_reduce_scatters;
  uint64_t outer_all_gathers;
  uint64_t outer_sent_bytes;  /* that this rank has sent in them */
} fsdp_stats;
#define FSDP_STATS_INIT \
  {sizeof(fsdp_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Counters since the seal. Collective: no. Blocks: no. Errors: INVALID_STATE (not sealed). Since 0.1. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_stats(fsdp_model *model, fsdp_stats *stats);

/**
 * The layout of a sealed model as JSON: groups, buckets, parameters with offsets, padding, pool slots, hash.
 * *size_bytes is the buffer's size on entry and the size needed (with the final NUL) on return; buffer may be NULL to ask.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_describe_model(fsdp_model *model, char *buffer, uint64_t *size_bytes);

/* ---- group --------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_granule;
enum {
  FSDP_GRANULE_ROW = 1,    /* rank boundaries may fall between rows (a row: all dimensions but the first) */
  FSDP_GRANULE_BLOCK = 2,  /* ... between blocks of granule_rows rows (quantized parameters: 32 or 128) */
  FSDP_GRANULE_TENSOR = 3  /* the tensor stays whole on one rank (matrix optimizers) */
};

enum {
  FSDP_PARAM_FROZEN = 1u << 0,  /* no gradient, no optimizer state */
  FSDP_PARAM_NO_DECAY = 1u << 1 /* no weight decay in fsdp_step_adamw */
};

typedef struct fsdp_param {
  uint64_t struct_size;
  const char *name;        /* unique in the model, 1-255 bytes */
  const uint64_t *shape;   /* dimension_count sizes, C order; copied */
  uint32_t dimension_count; /* 0: a scalar */
  fsdp_dtype dtype;        /* of the compute weights; 0: FSDP_FLOAT32 */
  uint32_t flags;          /* FSDP_PARAM_* */
  fsdp_granule granule;    /* 0: FSDP_GRANULE_ROW */
  uint64_t granule_rows;   /* counts only with FSDP_GRANULE_BLOCK */
  double lr_scale;         /* 0: 1 */
  void *user_data;         /* kept and returned by fsdp_get_param_info; never read */
} fsdp_param;
#define FSDP_PARAM_INIT {sizeof(fsdp_param), 0, 0, 0, 0, 0, 0, 0, 0, 0}

enum {
  FSDP_GROUP_RESIDENT = 1u << 0 /* stays gathered from its forward to its backward visit; not with INTERLEAVED */
};

typedef struct fsdp_group_options {
  uint64_t struct_size;
  uint32_t flags;          /* FSDP_GROUP_* */
  fsdp_strategy strategy;  /* 0: the model's */
  fsdp_dtype grad_dtype;   /* 0: the model's */
  fsdp_dtype reduce_dtype; /* 0: the model's */
} fsdp_group_options;
#define FSDP_GROUP_OPTIONS_INIT {sizeof(fsdp_group_options), 0, 0, 0, 0}

/**
 * Declare a group: param_count descriptors, each param_stride bytes after the one before (sizeof(fsdp_param)).
 * Parameters of different dtypes, row sizes and trainability may mix; the group is split inside. A group without
 * parameters is legal. Collective: the mesh (compared at the seal). Blocks: no. Memory: none until the seal.
 * Errors: INVALID_ARGUMENT (naming the parameter and field), INVALID_STATE (sealed). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_group(fsdp_model *model, const char *name, const fsdp_param *params,
                                                   uint64_t param_count, uint64_t param_stride,
                                                   const fsdp_group_options *options, fsdp_group **group);

/** The descriptor as declared, with defaults filled in. Threads: any, once sealed. Errors: INVALID_ARGUMENT. Since 0.1. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_param_info(const fsdp_group *group, uint64_t param_index, fsdp_param *param);

#define FSDP_EVERY_RANK (-1)

/**
 * Load a parameter from full data: element_count elements of dtype, in C order. With root FSDP_EVERY_RANK every rank
 * passes the same data and nothing is communicated; else rank `root` passes it and data may be NULL elsewhere. The data may
 * be freed at return. Collective: the mesh. Blocks: peers, if there is a root. Window: inside.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (window closed), PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_param(fsdp_group *group, uint64_t param_index, const void *data,
                                                 fsdp_dtype dtype, uint64_t element_count, int32_t root);

/**
 * Copy a whole parameter out: the main weights (compute weights of a frozen one), converted to dtype.
 * Collective: the mesh. Blocks: peers. Window: either; while it is open the caller must not write on any rank.
 * Errors: INVALID_ARGUMENT, INVALID_STATE, PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_read_param(fsdp_group *group, uint64_t param_index, void *data, fsdp_dtype dtype,
                                                 uint64_t element_count);

/**
 * The full compute weights: a read-only view, legal to read while the group is unsharded, or at any time outside the
 * update window where the strategy keeps them whole. With SEQUENTIAL and VISITS schedules the address is the same from
 * the seal on; with INTERLEAVED it is the one of the phase given. phase may be any.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed; not unsharded). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_param(fsdp_group *group, uint64_t param_index, fsdp_phase phase,
                                                fsdp_tensor *tensor);

/** Which part of a parameter a rank of the mesh owns, by arithmetic alone. */
typedef struct fsdp_chunk {
  uint64_t struct_size;
  uint64_t element_offset; /* in the parameter, C order */
  uint64_t element_count;  /* 0: this rank owns nothing of it */
  uint64_t row_offset;
  uint64_t row_count;
} fsdp_chunk;
#define FSDP_CHUNK_INIT {sizeof(fsdp_chunk), 0, 0, 0, 0}

/** Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.1. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_chunk(const fsdp_group *group, uint64_t param_index, uint32_t rank,
                                                fsdp_chunk *chunk);

/* ---- gather -------------------------------------------------------------------------------------------------- */

/**
 * Start gathering a group ahead of its unshard. The schedule does this on its own; call it when the order differs.
 * Free if the group is gathered; nothing happens if no buffer is free. Collective: no (pulls what peers published); on a CUDA
 * device the shard axis.
 * Blocks: no. Window: outside. Errors: INVALID_ARGUMENT, INVALID_STATE. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_prefetch(fsdp_group *group, fsdp_phase phase, fsdp_stream stream);

/**
 * Make the full compute weights readable for work that follows on the stream, and take a hold. Gathers once per version
 * and release; costs nothing if the group is gathered already. A RECOMPUTE hold while a BACKWARD one is pending is free.
 * Collective: no; on a CUDA device the shard axis. Blocks: peers on the host device (until every rank has published this version). Window: outside.
 * Errors: INVALID_STATE (window open; no buffer free, naming both groups), PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unshard(fsdp_group *group, fsdp_phase phase, fsdp_stream stream);

/**
 * Return a hold of that phase. When the last hold is returned the group lets go of its buffer, once the work of all
 * returning streams is done. Collective: no; on a CUDA device the shard axis. Blocks: no. Errors: INVALID_STATE (no such hold).
 * Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_reshard(fsdp_group *group, fsdp_phase phase, fsdp_stream stream);

/* ---- gradient ------------------------------------------------------------------------------------------------ */

/**
 * Borrow the full gradient of a parameter to write into, in grad_dtype. *accumulate is 0: overwrite it all, or 1: add
 * to it. Asking again before fsdp_reduce_grad (a tied or twice-used parameter) gives 1, and orders the second stream
 * after the first. The view ends with fsdp_reduce_grad. Collective: no. Blocks: peers on the host device, if a buffer must be drained.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (frozen; reduced with LAST; no buffer free, naming both groups). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_acquire_grad(fsdp_group *group, uint64_t param_index, fsdp_stream stream,
                                                   fsdp_tensor *grad, int32_t *accumulate);

/**
 * Hand in the caller's own full gradient: element_count elements of dtype, copied (or added, as acquire would say)
 * before the call returns on the host device, in stream order on a GPU. data NULL means "no gradient": it counts as zeros.
 * Collective: no. Blocks: as fsdp_acquire_grad. Errors: as fsdp_acquire_grad. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_put_grad(fsdp_group *group, uint64_t param_index, const void *data,
                                               fsdp_dtype dtype, uint64_t element_count, fsdp_stream stream);

enum {
  FSDP_LAST = 1u << 0 /* the last contribution of this step */
};

/**
 * The group's gradients of one contribution (micro-batch) are complete: reduce them into the main grads. Every trainable
 * parameter must have been acquired or put. With FSDP_REDUCE_LAST only the call with FSDP_LAST communicates. On
 * return at most max_pending_groups full transient buffers are in use: older ones have been drained.
 * Collective: the mesh. Blocks: peers on the host device, if an older buffer must be drained. Window: outside.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (a parameter without gradient, named; LAST twice), MISMATCH, PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_reduce_grad(fsdp_group *group, uint32_t flags, fsdp_stream stream);

/**
 * End the step's gradients: validate (every trainable group reduced with LAST, no hold of any phase left), wait for all reduces, multiply main grads by scale (1: leave as they are), and open the update window once
 * every rank has come here. What is missing anywhere is listed on every rank; the way out is then fsdp_discard_step.
 * Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_finish_grads(fsdp_model *model, double scale, fsdp_stream stream);

/* ---- optimizer ----------------------------------------------------------------------------------------------- */

/** What this rank owns of one parameter. Parameters of which it owns nothing, and frozen ones, are absent. */
typedef struct fsdp_shard {
  uint64_t struct_size;
  fsdp_group *group;
  uint64_t param_index;
  const char *name;
  float *main_weight;       /* element_count elements; writable in the update window only */
  float *main_grad;         /* element_count elements; complete in the update window */
  uint64_t element_offset;  /* of the first element, in the parameter */
  uint64_t element_count;   /* never 0 */
  uint64_t row_offset;
  uint64_t row_count;
  double lr_scale;
  uint32_t flags;           /* FSDP_PARAM_* */
  uint32_t state_count;     /* optimizer states, in the order of fsdp_add_optimizer_state */
} fsdp_shard;
#define FSDP_SHARD_INIT {sizeof(fsdp_shard), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** How many shards this rank owns; fixed from the seal on. Collective: no. Errors: INVALID_STATE (not sealed). Since 0.1. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_shard_count(fsdp_model *model, uint64_t *shard_count);
/**
 * One of this rank's shards, in declaration order. Addresses are fixed from the seal on.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_shard(fsdp_model *model, uint64_t shard_index, fsdp_shard *shard);
/** The address of a named optimizer state of a shard; element_count elements of the state's dtype. Since 0.1. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_shard_state(fsdp_model *model, uint64_t shard_index, const char *name,
                                                      fsdp_tensor *state);

/**
 * The L2 norm of all main grads of the model, the same double on every rank: fp64 partial sums, added in a fixed order,
 * padding and copies not counted. Collective: the mesh. Blocks: peers. Window: inside. Errors: INVALID_STATE, PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_grad_norm(fsdp_model *model, fsdp_stream stream, double *norm);
/**
 * The L2 norm of each parameter's main grad, group by group in declaration order; norm_count must be the number of
 * parameters of the model. Frozen ones give 0. Collective: the mesh. Blocks: peers. Window: inside. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_param_grad_norms(fsdp_model *model, fsdp_stream stream, double *norms,
                                                           uint64_t norm_count);
/** Multiply this rank's main grads. Collective: no, but call it alike on every rank. Blocks: local work. Window: inside. Since 0.1. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_scale_grads(fsdp_model *model, double factor, fsdp_stream stream);
/**
 * Scale all main grads by max_norm / norm if norm > max_norm. A norm that is not finite leaves them alone and returns OK:
 * test *norm. Collective: the mesh. Blocks: peers. Window: inside. Errors: INVALID_ARGUMENT (max_norm <= 0). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_clip_grads(fsdp_model *model, double max_norm, fsdp_stream stream, double *norm);
/**
 * Look for Inf and NaN in the main grads of all ranks. *found is 0 or 1, the same on every rank; *name (may be NULL) becomes
 * the first such parameter's name, or NULL. Collective: the mesh. Blocks: peers. Window: inside. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_check_grads(fsdp_model *model, fsdp_stream stream, int32_t *found,
                                                  const char **name);

enum {
  FSDP_ADAMW_BETA1_ZERO = 1u << 0 /* no first moment: beta1 is 0 */
};

typedef struct fsdp_adamw_options {
  uint64_t struct_size;
  double beta1;        /* 0: 0.9 (see FSDP_ADAMW_BETA1_ZERO) */
  double beta2;        /* 0: 0.999 */
  double epsilon;      /* 0: 1e-8 */
  double weight_decay; /* 0: none */
  uint64_t step;       /* the number of this step, from 1; 0: the one after the last */
  uint32_t flags;      /* FSDP_ADAMW_* */
  uint32_t reserved;   /* must be 0 */
} fsdp_adamw_options;
#define FSDP_ADAMW_OPTIONS_INIT {sizeof(fsdp_adamw_options), 0, 0, 0, 0, 0, 0, 0}

/**
 * One step of AdamW (Loshchilov and Hutter 2019, decoupled weight decay) in fp32 on this rank's shards, then publish.
 *   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g g;  w = w - lr s wd w - lr s (m / c1) / (sqrt(v / c2) + eps)
 * with s the parameter's lr_scale, c = 1 - beta^step computed in double. Collective: the mesh. Window: closes it.
 * Blocks: peers: ranks agree to step before a weight is touched, so one that discards instead is an error here and all can
 * discard. Errors: INVALID_STATE, INVALID_ARGUMENT, MISMATCH (another lr). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_step_adamw(fsdp_model *model, double lr, const fsdp_adamw_options *options,
                                                 fsdp_stream stream);

/**
 * Publish the main weights: cast them to compute weights, raise the version, close the update window. Whole weights
 * are refreshed before the call returns. Collective: the mesh. Blocks: peers.
 * Window: closes it. Errors: INVALID_STATE, MISMATCH (a rank discards instead: fatal, since weights were written here),
 * PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_publish_weights(fsdp_model *model, fsdp_stream stream);

/**
 * Open the update window outside a training step, to load or edit weights. No hold may be left and no gradient pending.
 * Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_begin_update(fsdp_model *model, fsdp_stream stream);

/**
 * Forget this step: holds, lent and pending gradients, whatever was reduced so far. From any state between two
 * publishes, also after an exception in the middle of a pass; inside the window it closes it, and the version stays as
 * it is (main weights must not have been written). Over NCCL, where ranks have enqueued different collectives, communicators are made
 * anew, which graphs that captured theirs do not survive: the context then fails. Collective: the mesh. Blocks: peers. Errors:
 * INVALID_STATE (nothing was published yet), PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_discard_step(fsdp_model *model, fsdp_stream stream);

/** One full gradient for fsdp_apply_grads. */
typedef struct fsdp_grad {
  const void *data; /* NULL: none, counts as zeros */
  uint64_t element_count;
  fsdp_dtype dtype;
  uint32_t reserved; /* must be 0 */
} fsdp_grad;

/**
 * A whole step in one call, for array frameworks: full gradients in, AdamW, published weights out. grads has one entry for
 * each trainable parameter of the model, group by group in declaration order. Same bits as put, reduce, finish and step.
 * If max_norm > 0 the gradients are clipped to it first; 0 leaves them. *norm (may be NULL) is the norm before clipping;
 * gradients that are not finite are stepped with: to skip such a step, use the single calls.
 * Collective: the mesh. Blocks: peers. Window: outside, and it ends outside. Errors: as the calls it stands for. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_apply_grads(fsdp_model *model, const fsdp_grad *grads, uint64_t grad_count, double lr,
                                                  double max_norm, const fsdp_adamw_options *options, fsdp_stream stream,
                                                  double *norm);

/* ---- CUDA graphs --------------------------------------------------------------------------------------------- */

/** A part of a step that was captured into a CUDA graph. Give it back with fsdp_destroy_capture. */
typedef struct fsdp_capture fsdp_capture;

/**
 * From here to fsdp_capture_end the model's calls record their work into the graph that `stream` is being captured into
 * (cudaStreamBeginCapture first, mode relaxed or thread-local), instead of doing it. Any part of a step can be captured, also
 * all of it: prefetch, unshard, reshard, acquire, put and reduce gradients, finish_grads, scale_grads, publish_weights,
 * step_adamw (once, with step 0 in its options; its lr is then that of each replay), and apply_grads without a norm. All streams
 * given must be in the capture: `stream`, and those that were forked from it. Overwriting and adding gradients are two captures:
 * of a first micro-batch, and of a later one.
 * INVALID_STATE meanwhile: calls for which the host must wait (norms, clip_grads, check_grads, load, read), begin_update and
 * discard_step; streams that are not in the capture; calls of the context's other models, whose work could be drawn into the graph;
 * closing the context. A call of the model that fails, whatever its error, is missing in the graph: fsdp_capture_end fails then.
 * (Not so BUSY and INVALID_HANDLE, which come before the model is looked at: a call that ends so must be made again, or the graph
 * lacks it unnoticed.) Where this call itself has failed, fsdp_capture_end may be called all the same, for peers whose call has not
 * failed: it fails on every rank with the error of this one, and the next capture is as good as any.
 * Collective: the mesh, though ranks meet only in fsdp_capture_end: they must capture the same. Blocks: until the library's work on
 * this rank is done. Errors: INVALID_STATE (the stream is not being captured, another capture is under way), UNSUPPORTED (host device;
 * calls between here and the end: ranks that exchange through memory of the host, which no graph can hold), TIMEOUT (the library's
 * work has not ended), SYSTEM. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_capture_begin(fsdp_model *model, fsdp_stream stream);

/**
 * Joins the library's streams to `stream`, so that its capture can end, and puts the model back into the state from before
 * fsdp_capture_begin: nothing has been done yet. Afterwards the caller ends the capture, instantiates and keeps the graph.
 * It fails on every rank, naming the rank, the call and its error, if a call since fsdp_capture_begin has failed on one of them, or if
 * one cannot end its capture. Then too the capture is over and the model is as before; drop what cudaStreamEndCapture gives.
 * Collective: the mesh (compares what was captured). Blocks: peers. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_capture_end(fsdp_model *model, fsdp_stream stream, fsdp_capture **capture);

/**
 * Before each launch of the graph on `stream`: checks that the model is in the state in which it was captured, orders the
 * graph after the library's earlier work, and gives the device the step's lr and bias corrections (lr counts only if the
 * capture has a step; finite, the same on every rank). Then launch the graph and call fsdp_commit_replay, or fsdp_cancel_replay if there
 * was no launch, with the same stream, which lives until then; in between other calls of the model are INVALID_STATE.
 * If a rank cannot replay (another state, a step that failed, a capture under way), it fails on every rank, naming that rank and
 * what differs, and the model is as before.
 * Collective: the mesh. Blocks: peers; the GPU only with 64 replays under way. Errors: INVALID_STATE (says what differs),
 * INVALID_ARGUMENT, INVALID_HANDLE (the model was destroyed), MISMATCH (ranks replay different captures or give another lr),
 * PEER_FAILED, TIMEOUT (also: an earlier replay has not ended within timeout_ms), SYSTEM. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_prepare_replay(fsdp_capture *capture, double lr, fsdp_stream stream);

/**
 * After the graph was launched on `stream`: the model goes on as if the captured calls had been made, and later calls come after
 * the graph. One that does not end, since a peer launched none, ends later waits by TIMEOUT, which names the capture.
 * Collective: no. Blocks: no. Errors: INVALID_STATE (not prepared), INVALID_ARGUMENT (not the stream of the preparation), SYSTEM
 * (nothing can be ordered behind the graph: the context has failed). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_commit_replay(fsdp_capture *capture, fsdp_stream stream);

/**
 * Instead of fsdp_commit_replay where the graph was not launched, say since its launch failed: the model is as before
 * fsdp_prepare_replay. All ranks must do so: where some have committed and others given up, the next call in which they meet is a
 * MISMATCH that names both.
 * Collective: the mesh, though ranks meet only later. Blocks: no. Errors: as fsdp_commit_replay. Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_cancel_replay(fsdp_capture *capture, fsdp_stream stream);

/**
 * Give the handle back; NULL is allowed. Between fsdp_prepare_replay and fsdp_commit_replay it gives the replay up, as
 * fsdp_cancel_replay does. A graph that runs needs the handle no more. The graphs themselves, executable or not, are the caller's, who
 * destroys them before the model: they refer to its memory, and NCCL does not end a communicator before the last graph that
 * captured its collectives (the model's end then takes some seconds, and the log says so). Threads: any. Since 0.1.
 */
FSDP_API void fsdp_destroy_capture(fsdp_capture *capture);

/* ---- trace --------------------------------------------------------------------------------------------------- */

/**
 * Write this rank's timeline to a file: the last trace_events events since the context began, in the Trace Event Format
 * (JSON) that Perfetto and chrome://tracing read. The file appears, or replaces the one of that name, when it is whole.
 * docs/guides/trace.md says what is in it and how files of several ranks become one.
 * Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (created without FSDP_CONTEXT_TRACE), SYSTEM (errno is named). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_write_trace(const fsdp_context *context, const char *path);

/**
 * Write this rank's flight record to a file: its last calls and collectives (flight_events of both), what the caller waits
 * for, and the error that failed the context, if any. It is written without this call when the context fails and a
 * directory is given. `fsdp-info flight` reads the files of several ranks; docs/guides/debugging-a-hang.md explains.
 * Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (a planning context), SYSTEM (errno is named). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_write_flight_record(const fsdp_context *context, const char *path);

/**
 * Begin a span of the caller's own in the timeline, say "forward"; spans nest, up to 64. name is UTF-8 of 1-255 bytes; a
 * context keeps at most 256 different ones. Does nothing without FSDP_CONTEXT_TRACE. Collective: no. Blocks: no.
 * Errors: INVALID_ARGUMENT (one name too many), INVALID_STATE (64 are open). Since 0.1.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_trace_begin(fsdp_context *context, const char *name);
/** End the span that was begun last. Collective: no. Blocks: no. Errors: INVALID_STATE (none is open). Since 0.1. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_trace_end(fsdp_context *context);

#ifdef __cplusplus
}
#endif

#endif /* FSDP_H */
