/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsdp.h - fully sharded data parallel training as a library.
 *
 * The caller's framework does the math. libfsdp owns the memory of parameters, gradients and optimizer state, does the
 * communication, and keeps the order of events. It checks every call.
 *
 * The words (docs/glossary.md has all of them):
 *   group      a PARAMETER group: parameters that are gathered and reduced together, for example a transformer layer.
 *              It is not a process group, and not an optimizer's group of hyper-parameters.
 *   context    one rank's membership in the job. All other objects are made from a context; nothing is global.
 *   mesh       the ranks arranged as replicate x shard.
 *   model      the ordered set of groups that train together.
 *   full       a whole tensor.               shard       this rank's part of a tensor.
 *   compute weights  the weights that the math reads, in the dtype that the parameter declares.
 *   main weights, main grads  the fp32 shards that the optimizer owns.
 *   unshard / reshard  make the full compute weights readable / give them back.
 *   hold       one claim on an unsharded group, counted per phase.
 *   update window  the time from fsdp_finish_grads to fsdp_publish_weights (or to a step, which publishes as well).
 *              Main weights may be written only in this time. A sealed model starts inside its update window.
 *   publish    turn updated main weights into compute weights and raise their version.
 *   plane      one stored form of a quantized parameter's compute weights: its codes, or their scales.
 *
 * One training step. The passes run for every micro-batch, the last line once:
 *
 *   forward:   for each group   fsdp_unshard(g, FSDP_FORWARD) .. compute .. fsdp_reshard(g, FSDP_FORWARD)
 *   backward:  for each group   fsdp_unshard(g, FSDP_BACKWARD) .. fsdp_acquire_grad per parameter .. compute ..
 *              in reverse       fsdp_reshard(g, FSDP_BACKWARD), fsdp_reduce_grad(g, FSDP_LAST on the last micro-batch)
 *              with max_pending_bytes also fsdp_complete_grad for each gradient once it is written, the last one first
 *   then       fsdp_finish_grads(model), fsdp_step_adamw(model)
 *
 * These rules hold for every call, so no docstring repeats them (docs/contracts/ has a page for each):
 *   Errors     Every call returns fsdp_status; FSDP_OK is 0. fsdp_get_last_error tells exactly what was wrong.
 *              If a call fails, its out-handles are set to NULL and its other outputs are left untouched.
 *   Options    A NULL options pointer means all defaults. In an options struct, struct_size is sizeof the struct, and a
 *              zero in any other field means the default. FSDP_X_OPTIONS_INIT is zero plus the size. If zero is a
 *              valid value other than the default, a flag FSDP_..._ZERO selects it. The flag together with a non-zero
 *              value is INVALID_ARGUMENT.
 *   Flags      Unknown bits are INVALID_ARGUMENT. No flag uses one of the lowest eight bits, which belong to the values
 *              of enums. Each family of flags has bits of its own, so a call refuses the flags of another family.
 *              FSDP_CONTEXT_* flags are an exception: only the calls that make a context take them, so three of their
 *              bits serve a second flag. FSDP_SAVE_COMMIT_MANIFEST has the bit of FSDP_CONTEXT_DEBUG,
 *              FSDP_LOAD_ONE_REPLICA that of FSDP_CONTEXT_NO_OVERLAP, and FSDP_GRAD_NO_WAIT that of FSDP_CONTEXT_TRACE.
 *   Arrays     An array of structs comes with a stride, the number of bytes from one element to the next. Pass sizeof
 *              the struct in the caller's header, also if the array has one element or none. FSDP_ARRAY(array) writes a
 *              C array's pointer, count and stride.
 *   Ranks      A rank or root that is passed, returned or named in a message is a rank of the job, never of a mesh.
 *   Meshes     "The mesh" in a docstring is the model's mesh; "the group's mesh" is another one only if
 *              fsdp_group_options.mesh names it.
 *   Threads    Only one thread at a time may be inside a context; a second one gets FSDP_BUSY. Abort, destroy and the
 *              getters that say so may be called from any thread at any time.
 *   Streams    fsdp_stream is a cudaStream_t on a CUDA device (NULL: the legacy default stream). On the host device it
 *              must be NULL, which means the calling thread. See fsdp_device_kind.
 *   Strings    Strings are UTF-8. Strings that are passed in are copied. Returned pointers belong to the object that
 *              they came from and live as long as that object.
 *   Numbers    The caller's floating-point modes (rounding, flushing of subnormals, traps) do not change a single bit
 *              of the results, and every call leaves these modes as they were.
 *   Peers      Every collective call may also return MISMATCH, if other ranks make a different call instead. Every call
 *              that blocks for peers may return INTERRUPTED. An interrupted call ends the job, because the other ranks
 *              wait for a call that never comes. Saves are the exception: once every rank has entered a save, an
 *              interrupted wait does not end the save, and the program may wait for it again.
 *   Fork       A context does not survive fork(). In the child, calls return FSDP_INVALID_STATE; only destroy and a few
 *              getters still work.
 *
 * In the docstrings, "Collective: X" says that all ranks of X must make the call, in the same order. "Blocks" says what
 * the call may wait for: nothing (no), local work, or peers. "Window" says whether the call belongs inside or outside
 * the update window.
 */
#ifndef FSDP_H
#define FSDP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 2
#define FSDP_VERSION_PATCH 0

#if defined(__GNUC__) || defined(__clang__)
#define FSDP_API __attribute__((visibility("default")))
#define FSDP_CHECKED __attribute__((warn_unused_result))
#else
#define FSDP_API
#define FSDP_CHECKED
#endif

/* ---- handles ------------------------------------------------------------------------------------------------- */

/* Handles are numbers, not addresses: nothing can be read through them, and the caller may not use any bit for
   marks. */
typedef struct fsdp_context fsdp_context;
typedef struct fsdp_mesh fsdp_mesh;
typedef struct fsdp_model fsdp_model;
typedef struct fsdp_group fsdp_group; /* belongs to its model and ends with it */

/** The same type as cudaStream_t, declared without CUDA's header. */
typedef struct CUstream_st *fsdp_stream;

/* ---- status and errors --------------------------------------------------------------------------------------- */

typedef int32_t fsdp_status;
enum {
  FSDP_OK = 0,
  FSDP_INVALID_ARGUMENT = 1, /* a value that can never be right here */
  FSDP_INVALID_HANDLE = 2,   /* a handle that is NULL, of another type, of another context, or destroyed; also a handle
                                whose context was destroyed */
  FSDP_INVALID_STATE = 3,    /* the right call at the wrong moment; the message names the call expected */
  FSDP_UNSUPPORTED = 4,      /* this build, backend or release cannot do it */
  FSDP_OUT_OF_MEMORY = 5,
  FSDP_BUSY = 6,           /* another thread is inside this context; or, with FSDP_GRAD_NO_WAIT, the call would wait */
  FSDP_MISMATCH = 7,       /* ranks called or declared different things */
  FSDP_PEER_FAILED = 8,    /* a rank died, left or aborted; the error names it */
  FSDP_TIMEOUT = 9,        /* an operation outlasted its timeout_ms */
  FSDP_ABORTED = 10,       /* fsdp_abort_context was called on this context */
  FSDP_INTERRUPTED = 11,   /* the caller's interrupted hook or flag asked to stop waiting */
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
  int32_t rank;           /* the rank to blame, -1 if none; where ranks differ, the lowest rank that differs from the
                             first rank of its mesh */
  int32_t context_failed; /* 1 if the context has failed for good and can only be destroyed */
  char message[1024];     /* NUL-terminated; cut at the end if it is longer */
} fsdp_error;
#define FSDP_ERROR_INIT {sizeof(fsdp_error), 0, 0, 0, 0, 0, {0}}

/**
 * Get the detail of the last failing call: with a context the last one on this context, whichever thread made it; with
 * NULL the last one of the calling thread, on any context or none. status is FSDP_OK if no call has failed.
 * Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.2.
 */
FSDP_API fsdp_status fsdp_get_last_error(const fsdp_context *context, fsdp_error *error);

/**
 * The message of the calling thread's last failing call, on whichever context; "" if no call has failed. The text lives
 * until the next failing call of that thread. Threads: any. Since 0.2.
 */
FSDP_API const char *fsdp_get_last_message(void);

/** The name of a status as text, such as "FSDP_TIMEOUT"; static, never NULL. Threads: any. Since 0.2. */
FSDP_API const char *fsdp_get_status_name(fsdp_status status);

/** The library's version, "0.2.0"; static. Threads: any. Since 0.2. */
FSDP_API const char *fsdp_get_version(void);

/**
 * Describe what this build contains and how it was configured, as text lines of "key: value". The first lines have the
 * version, the backends and the instruction set in use. Then comes each environment variable of the library with its
 * value and, in parentheses, "environment" or "default". For FSDP_JOB_SECRET the text says only whether it is set.
 * buffer and size_bytes work as in fsdp_describe_model. Threads: any. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_describe_build(char *buffer, uint64_t *size_bytes);

/* ---- numbers ------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_dtype;
enum {
  FSDP_FLOAT32 = 1,
  FSDP_BFLOAT16 = 2,
  FSDP_FLOAT16 = 3,
  FSDP_FLOAT8_E4M3 = 4, /* E4M3 as the OCP defines it, without Inf: the stored codes of quantized weights. Views have
                           this dtype and fsdp_load_plane takes it; no parameter, gradient or state can have it */
  FSDP_E8M0 = 6,        /* the stored scales of MXFP8: 2^(code - 127), 255 is NaN. Only views and fsdp_load_plane have
                           this dtype, as with FSDP_FLOAT8_E4M3 */
  FSDP_UINT8 = 7        /* bytes that the library does not interpret; only FROZEN parameters can have this dtype. The
                           bytes are loaded, read, gathered and saved as they are; calls take their data only as
                           FSDP_UINT8 */
};

/** Bytes of one element; 0 for an unknown dtype. Threads: any. Since 0.2. */
FSDP_API uint64_t fsdp_get_dtype_size(fsdp_dtype dtype);

/**
 * Where a context keeps the memory of its models.
 *
 * On a CUDA device all memory that a call works on (weights, gradients, states) is GPU memory, and calls enqueue their
 * work. fsdp_unshard makes the given stream wait for the weights and returns; fsdp_reduce_grad takes the gradients in
 * the order of the given stream and returns. Where a docstring says "Blocks: peers on the host device", the call does
 * not block on a CUDA device.
 *   Streams      A call may name any stream of the device. The work that the call enqueues runs after all earlier work
 *                that it depends on, also if that work is on other streams. A stream named by fsdp_acquire_grad must
 *                live until fsdp_reduce_grad. Ranks that are threads of one process and share a GPU each need streams
 *                of their own. NULL, the legacy default stream, is one stream for all of these ranks: the work of one
 *                rank would queue behind the work of another rank that waits for it.
 *   Waits        Only these calls wait for the GPU: fsdp_get_grad_norm, fsdp_clip_grads and fsdp_apply_grads where norm
 *                is not NULL, fsdp_get_last_norm, fsdp_get_param_grad_norms, fsdp_get_param_weight_norms,
 *                fsdp_count_zero_grads, fsdp_check_grads, fsdp_check_replicas, fsdp_wait_stream, the calls that load
 *                and read parameters, main gradients and states, fsdp_discard_step, fsdp_begin_capture,
 *                fsdp_prepare_replay while 64 replays are under way, and of models with planes in a file
 *                (FSDP_HOME_FILE) the calls that open the update window, or use these planes in it. Ranks still
 *                synchronize on the host where a call says "Blocks: peers".
 *   Gathers      Gathers and reduces are collective: the ranks of a shard axis must make the same fsdp_unshard,
 *                fsdp_reshard, fsdp_prefetch, fsdp_complete_grad and fsdp_reduce_grad calls in the same order. If two
 *                ranks share a shard axis on one host in each of two models, both ranks must interleave the calls of
 *                the two models in the same way. If the calls differ, MISMATCH comes at the latest at the end of the
 *                step.
 *   Unshard      fsdp_unshard always copies (FSDP_UNSHARD_COPIED), except where one rank has everything: a GPU does not
 *                map the memory of other GPUs.
 *   Pointers     Memory given to fsdp_put_grad and fsdp_apply_grads must be readable by the GPU, and memory given to
 *                fsdp_set_arena must be the GPU's own. fsdp_load_param and fsdp_read_param take host or device memory.
 */
typedef int32_t fsdp_device_kind;
enum { FSDP_DEVICE_HOST = 1, FSDP_DEVICE_CUDA = 2 };

enum {
  FSDP_TENSOR_READ_ONLY = 1u << 23 /* writing through data is an error: a mapped view raises SIGSEGV; for private views
                                      see FSDP_VIEWS_PRIVATE */
};

/**
 * A view of memory that libfsdp owns, with the fields that DLPack needs (the strides are those of C order). Output
 * only: set struct_size before the call.
 */
typedef struct fsdp_tensor {
  uint64_t struct_size;
  void *data;               /* first element, contiguous in C order; NULL if there is no such tensor */
  const uint64_t *shape;    /* dimension_count sizes, outermost first; lives as long as the model */
  uint64_t element_count;
  uint32_t dimension_count;
  fsdp_dtype dtype;
  uint32_t element_size;    /* bytes of one element */
  uint32_t flags;           /* FSDP_TENSOR_* */
  fsdp_device_kind device;
  int32_t device_index;     /* index of the GPU, as CUDA counts; 0 on the host */
} fsdp_tensor;
#define FSDP_TENSOR_INIT {sizeof(fsdp_tensor), 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Writes the arguments "array, count, stride" for a C array. A pointer has no count, so with GCC and clang a pointer
 *  does not compile here. */
#define FSDP_ARRAY(array) (array), sizeof(array) / sizeof *(array) + FSDP_NO_POINTER(array), sizeof *(array)
#if defined(__cplusplus) && (defined(__GNUC__) || defined(__clang__))
#define FSDP_NO_POINTER(array) (0 * sizeof(char[__is_same(__typeof__(array), __typeof__(&*(array))) ? -1 : 1]))
#elif defined(__GNUC__) || defined(__clang__)
#define FSDP_NO_POINTER(array) \
  (0 * sizeof(char[__builtin_types_compatible_p(__typeof__(array), __typeof__(&*(array))) ? -1 : 1]))
#else
#define FSDP_NO_POINTER(array) 0
#endif

/* ---- context ------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_log_level;
enum { FSDP_LOG_ERROR = 1, FSDP_LOG_WARNING = 2, FSDP_LOG_INFO = 3, FSDP_LOG_DEBUG = 4 };

/** Returns non-zero to give up the wait. Runs on the thread that waits, about every 20 ms. The hook must return: no
 *  exception or longjmp may leave it. On this context it may make only calls that any thread may make at any time. */
typedef int32_t (*fsdp_interrupted_hook)(void *user_data);
/** Runs on the caller's thread only: lines of library threads are handed over in the caller's next call. While the job
 *  forms, rank 0 gets a FSDP_LOG_WARNING at once for each connection that it refused, with the reason. The hook must
 *  return: no exception or longjmp may leave it. */
typedef void (*fsdp_log_hook)(void *user_data, fsdp_log_level level, const char *message);

enum {
  /** Catch use after reshard, and writes into a gradient after fsdp_reduce_grad (docs/contracts/memory.md): released
   *  views show NaN or fault. On the host device they do so from the return of the call that released them. If a
   *  group's planes are gathered by phase and mapped, its views are released only when the group has no hold of any
   *  phase. In debug mode nothing is gathered ahead, and more memory is used. All ranks set this flag, or none. */
  FSDP_CONTEXT_DEBUG = 1u << 8,
  /** Do the library's gather and reduce work on the calling thread, in call order. The bits are the same, and debugging
   *  is easier; calls that otherwise do not block then wait for peers. */
  FSDP_CONTEXT_NO_OVERLAP = 1u << 9,
  /** Keep a timeline of calls, waits and collectives for fsdp_write_trace, and show them to NVTX tools as ranges. */
  FSDP_CONTEXT_TRACE = 1u << 10
};

/** How ranks exchange data that is in GPU memory. */
typedef int32_t fsdp_device_transport;
enum {
  FSDP_TRANSPORT_NCCL = 1,   /* libnccl.so.2, opened at run time, for ranks of one host (between hosts: UNSUPPORTED).
                                Before NCCL 2.30.3 each rank needs a GPU of its own */
  FSDP_TRANSPORT_STAGING = 2 /* data goes through pinned memory of the host and is summed there, with the bits of the
                                host device; ranks may share a GPU */
};

/** The value of fsdp_context_options.device_index for GPU `index`, as CUDA counts. */
#define FSDP_DEVICE_INDEX(index) ((index) + 1)

typedef struct fsdp_context_options {
  uint64_t struct_size;
  /* rank and place */
  uint32_t flags;          /* FSDP_CONTEXT_*; FSDP_DEBUG=1 in the environment adds FSDP_CONTEXT_DEBUG */
  uint32_t world_size;     /* 0: the launcher's variables say it; otherwise rank and rendezvous count */
  uint32_t rank;           /* counts only with world_size */
  uint32_t ranks_per_host; /* this number of neighbouring ranks counts as one host, for plans and to try a job of
                              several hosts on one host; 0: the real hosts */
  const char *rendezvous;  /* counts only with world_size: where the ranks of the job meet. It is a name (ranks of one
                              host), tcp://HOST:PORT or file:///DIRECTORY; NULL: FSDP_RENDEZVOUS, else the launcher's */
  /* the device */
  fsdp_device_kind device; /* 0: FSDP_DEVICE_HOST */
  int32_t device_index;    /* counts only with FSDP_DEVICE_CUDA: FSDP_DEVICE_INDEX(i) for GPU i; 0: the calling thread's
                              current GPU */
  fsdp_device_transport device_transport; /* counts only with FSDP_DEVICE_CUDA; 0: NCCL if it can serve the ranks,
                                             else staging */
  /* waits */
  uint32_t timeout_ms;     /* longest wait for peers in one operation; 0: FSDP_TIMEOUT of the environment, in seconds,
                              else 300,000 */
  uint32_t heartbeat_timeout_ms; /* a rank or host that is silent for this time counts as lost; at least 1,000; 0:
                                    8,000 */
  fsdp_log_level log_level; /* 0: FSDP_LOG of the environment, else FSDP_LOG_WARNING */
  const int32_t *interrupted_flag;   /* read atomically while a call waits: non-zero gives up the wait, as the hook
                                        does. It must outlive the context; NULL: none */
  fsdp_interrupted_hook interrupted; /* NULL: none */
  void *interrupted_data;
  /* logs and records */
  fsdp_log_hook log;       /* NULL: none, or standard error if FSDP_LOG is set */
  void *log_data;
  const char *trace_directory;  /* trace-RANK.json is written into it when the context is destroyed, and a trace is kept
                                   for this file; NULL: FSDP_TRACE of the environment, else nowhere */
  uint64_t trace_events;   /* number of events to keep, 64 bytes each; counts only if a trace is kept; 0: 65,536 */
  const char *flight_directory; /* flight-RANK.json is written into it if the context fails (an earlier file becomes
                                   flight-RANK.json.1, and so on); NULL: FSDP_FLIGHT_DIRECTORY, else nowhere */
  uint32_t flight_events;  /* number of recent calls, and of collectives, that the flight recorder keeps, 64 bytes each;
                              0: 1,024 */
  /* fault injection */
  uint32_t debug_delay_us; /* longest random delay before every piece of library work, to find races; 0: none */
  uint64_t debug_delay_seed;
  uint64_t debug_failed_allocation; /* make the n-th allocation of memory for a role fail, n from 1; 0: none */
} fsdp_context_options;
#define FSDP_CONTEXT_OPTIONS_INIT \
  {sizeof(fsdp_context_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * Join the job. Without a world_size in the options the launcher's variables decide. The first launcher in this list
 * whose variables are set counts:
 *   torchrun, fsdp-run  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, with LOCAL_RANK and LOCAL_WORLD_SIZE; the port is
 *                       MASTER_PORT + 1 if TORCHELASTIC_USE_AGENT_STORE is True, because torch's store listens at
 *                       MASTER_PORT
 *   Open MPI            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
 *   Slurm               SLURM_PROCID and SLURM_STEP_ID, with SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID
 *   MPICH (Hydra)       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
 * If none of them is set, the job is a world of one. If only some variables of a launcher are set, the call fails with
 * INVALID_ARGUMENT, and the message names what is missing. FSDP_RENDEZVOUS (with the values of rendezvous in the
 * options) replaces MASTER_ADDR and MASTER_PORT as the place to meet. Open MPI and MPICH give no address, so their
 * ranks need FSDP_RENDEZVOUS if they are on several hosts. Ranks with different FSDP_RESTART_COUNT (fsdp-run
 * --max-restarts) do not join the same job. A log line at FSDP_LOG_INFO says what was used.
 *
 * If the launcher says that all ranks are on one host, they connect by a unix socket. They must have the same user, and
 * the same job secret if FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE is set. The secret's file is a regular file of 1 to
 * 4,096 bytes that belongs to the user or root, and no other user may read it. If the launcher does not say that the
 * ranks are on one host, they connect by TCP: rank 0 listens at the rendezvous until all have come. Both ends of a
 * connection prove the job secret before anything else is read; without a secret only loopback addresses are served. A
 * job has at most 16,384 ranks, 1,024 on one host. See docs/guides/launchers.md.
 *
 * Messages between hosts go over UCX if every rank has an RDMA device, and otherwise over TCP. These TCP connections
 * prove the job secret as well. FSDP_NET (auto, tcp, ucx; the same on every rank) can choose one of the two. See
 * docs/guides/network.md.
 * Collective: the job. Blocks: peers. Threads: any.
 * Errors: INVALID_ARGUMENT, MISMATCH (FSDP_NET differs), TIMEOUT, PEER_FAILED, SYSTEM, OUT_OF_MEMORY, UNSUPPORTED.
 * UNSUPPORTED: FSDP_NET is ucx, and a rank has no UCX, or its UCX may use TCP and FSDP_UCX_TCP=trusted is not set on
 * every rank. (If UCX uses TCP, any process that reaches UCX's port can write the memory of that rank.) Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_context(const fsdp_context_options *options, fsdp_context **context);

/**
 * Make world_size contexts in this process, one for each thread that will act as a rank. contexts is an array of
 * world_size elements, at most 1,024. Each context is then used by one thread at a time. Collective calls on different
 * contexts must come from different threads. world_size and rank in the options are ignored. On failure all entries are
 * NULL; but if world_size is above 16,384, no entry is touched.
 * Collective: no. Blocks: local work. Threads: any. Errors: INVALID_ARGUMENT, SYSTEM, OUT_OF_MEMORY. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_local_contexts(uint32_t world_size, const fsdp_context_options *options,
                                                            fsdp_context **contexts);

/**
 * Make a context that only plans: rank `rank` of an imagined world. Meshes, models and groups are declared and sealed
 * by the same calls as in a real run, but nothing is allocated and no peer is contacted. fsdp_get_role_bytes,
 * fsdp_get_model_info, fsdp_get_chunk and fsdp_describe_model answer as they would in the real run, to the byte
 * (fsdp_get_role_bytes names one exception). Calls that would touch data return INVALID_STATE. So a laptop can plan a
 * job of 16,384 ranks, which is the maximum.
 * Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_plan_context(uint32_t world_size, uint32_t rank,
                                                          const fsdp_context_options *options, fsdp_context **context);

/**
 * Leave the job in good order: the call waits until every rank has made it. Destroy the context afterwards, also on
 * failure. If a checkpoint is being saved, the call waits for it first. If the save fails, this call closes the context
 * and returns the save's error.
 * Collective: the job. Blocks: peers. Errors: INVALID_STATE (a model has unfinished work), PEER_FAILED, TIMEOUT, and
 * the errors of fsdp_wait_checkpoint. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_close_context(fsdp_context *context);

/**
 * Fail the context for good and wake its waiting calls, on this rank and on the other ranks of the job. The call only
 * sets a flag and returns. At the latest a second later every call of the other ranks fails with PEER_FAILED, also on
 * ranks that wait for no peer; only destroy and the getters that any thread may call still work. fsdp_get_context_error
 * and fsdp_get_failed_ranks then tell which rank has aborted. reason may be NULL.
 * Collective: no. Blocks: no. Threads: any, also while another call runs. Since 0.2.
 */
FSDP_API fsdp_status fsdp_abort_context(fsdp_context *context, const char *reason);

/**
 * Give the handle back. The call never waits for peers. From then on calls on models, groups, meshes, captures and
 * checkpoints of the context return INVALID_HANDLE. These handles must still be destroyed, in any order. NULL is
 * allowed. If a rank leaves without fsdp_close_context, peers that wait for it get PEER_FAILED; the other peers go on.
 * Collective: no. Blocks: local work. Threads: any, also while another call runs. Since 0.2.
 */
FSDP_API void fsdp_destroy_context(fsdp_context *context);

/** This context's rank, from 0. Threads: any. Since 0.2. */
FSDP_API fsdp_status fsdp_get_rank(const fsdp_context *context, uint32_t *rank);
/** The number of ranks of the job. Threads: any. Since 0.2. */
FSDP_API fsdp_status fsdp_get_world_size(const fsdp_context *context, uint32_t *world_size);
/** The error that failed the context for good; its status is FSDP_OK if there is none. Threads: any. Since 0.2. */
FSDP_API fsdp_status fsdp_get_context_error(const fsdp_context *context, fsdp_error *error);
/**
 * The ranks that the error of fsdp_get_context_error blames, in ascending order: all ranks that died together, stopped,
 * or did not come in time. fsdp_error.rank is one of them. *rank_count is the room in ranks on entry and their number
 * on return. The number is 0 if the context has not failed or no rank is to blame (a network that is cut, a wait that
 * was interrupted). With ranks NULL the call gives only the number.
 * Collective: no. Blocks: no. Threads: any, also while another call runs.
 * Errors: INVALID_ARGUMENT (too little room: *rank_count is set to what is needed, nothing else is written). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_failed_ranks(const fsdp_context *context, uint32_t *ranks,
                                                 uint64_t *rank_count);

typedef int32_t fsdp_value_op;
enum {
  FSDP_VALUE_SUM = 1,
  FSDP_VALUE_MIN = 2,
  FSDP_VALUE_MAX = 3,
  FSDP_VALUE_MEAN = 4 /* the sum divided by the number of ranks */
};

/**
 * Reduce a few doubles (at most 512) in place, for example the global loss. The values are reduced over the ranks of a
 * mesh, in the mesh's order; with mesh NULL over all ranks of the job, in rank order. If a value is NaN on any rank,
 * its result is NaN.
 * Collective: the mesh, or the job. Blocks: peers. Errors: INVALID_ARGUMENT, MISMATCH (counts or ops differ),
 * PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_all_reduce_values(fsdp_context *context, const fsdp_mesh *mesh, double *values,
                                                        uint64_t value_count, fsdp_value_op op);

/**
 * Wait until the stream has finished everything that was enqueued on it before this call, by the program and by the
 * library. Unlike cudaStreamSynchronize, this wait always ends: when its time limit has passed, when the interrupted
 * hook or flag asks for it, or when the context fails, with the context's error. If timeout_ms is not 0, it is a limit
 * for this call alone: a TIMEOUT ends the call and does not fail the context, because a long kernel is no failure. If
 * timeout_ms is 0, the limit is the timeout_ms of the context, and a TIMEOUT fails the context, as it does in every
 * other wait. On the host device stream must be NULL, and the call returns at once. On a GPU the call creates and
 * destroys a CUDA event.
 * Collective: no. Blocks: until the GPU has done the work, and so until peers have done what that work waits for.
 * Stream: any stream of the context's GPU, unless the stream is being captured. Errors: INVALID_ARGUMENT (host device:
 * stream is not NULL), INVALID_STATE (a planning context, or a stream that is being captured), TIMEOUT, INTERRUPTED,
 * PEER_FAILED, SYSTEM. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wait_stream(fsdp_context *context, fsdp_stream stream, uint32_t timeout_ms);

/* ---- mesh ---------------------------------------------------------------------------------------------------- */

typedef struct fsdp_mesh_options {
  uint64_t struct_size;
  uint32_t replicate_size; /* 0: number of ranks / shard_size; 1 if shard_size is 0 too */
  uint32_t shard_size;     /* 0: number of ranks / replicate_size */
  const uint32_t *ranks;   /* the ranks of the mesh in the mesh's order; NULL: all ranks of the job */
  uint32_t rank_count;     /* number of ranks; 0 if ranks is NULL */
  uint32_t reduction_block_size; /* 0: see fsdp_create_mesh */
} fsdp_mesh_options;
#define FSDP_MESH_OPTIONS_INIT {sizeof(fsdp_mesh_options), 0, 0, 0, 0, 0}

/**
 * Arrange ranks as replicate x shard. Rank r of the mesh is in replica r / shard_size, at place r % shard_size of its
 * shard axis. If the options have a list of ranks, every rank in it passes the same list. A rank may be in several
 * meshes (for example one for dense and one for expert parameters).
 *
 * Replicas exchange only sums of gradients (HSDP; with FSDP_OUTER_OPTIM also weights, see fsdp_outer_strategy). They
 * may be on different hosts, while the ranks of each replica's shard axis share a host. The shard axis of a mesh with
 * one replica may span several hosts. Each host must then have the same number of ranks, which are consecutive in the
 * mesh. Every host keeps one copy of the compute weights, which are gathered over hosts once a step; everything else is
 * sharded over all ranks.
 *
 * Gradients of the shard axis are added in rank order. With reduction_block_size B, a divisor of shard_size, ranks [0,
 * B) are added and their sum is scaled, then [B, 2 B) and so on; at last the sums of the blocks are added in order. An
 * axis over several hosts is always added in blocks, and each host is a block. An axis on one host with the same blocks
 * gets the same bits. Over several hosts B must be the number of ranks of a host, or 0; any other B is UNSUPPORTED.
 *
 * Collective: the ranks of the mesh. Blocks: no.
 * Errors: INVALID_ARGUMENT (the sizes do not multiply to the number of ranks), UNSUPPORTED (an axis is not spread
 * evenly over its hosts). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_mesh(fsdp_context *context, const fsdp_mesh_options *options,
                                                  fsdp_mesh **mesh);
/** Give the handle back. Models made from the mesh keep what they need. NULL is allowed. Threads: any. Since 0.2. */
FSDP_API void fsdp_destroy_mesh(fsdp_mesh *mesh);

/* ---- model --------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_strategy;
enum {
  FSDP_STRATEGY_NO_SHARD = 1,           /* DDP: every rank has everything whole */
  FSDP_STRATEGY_OPTIM = 2,              /* ZeRO-1: optimizer state and main weights are sharded; one delayed reduce a
                                           step */
  FSDP_STRATEGY_OPTIM_GRADS = 3,        /* ZeRO-2: main grads are sharded as well */
  FSDP_STRATEGY_OPTIM_GRADS_PARAMS = 4  /* ZeRO-3, FSDP: compute weights are sharded as well */
};

typedef int32_t fsdp_grad_op;
enum {
  FSDP_GRAD_OP_MEAN = 1,  /* (1 / ranks of the model) times the sum */
  FSDP_GRAD_OP_SUM = 2,
  FSDP_GRAD_OP_FACTOR = 3 /* grad_factor times the sum */
};

typedef int32_t fsdp_unshard_mode;
enum {
  FSDP_UNSHARD_MAPPED = 1, /* full weights are a read-only mapping of every rank's shard: no bytes move, and a node has
                              one copy */
  FSDP_UNSHARD_COPIED = 2  /* full weights are copied into private buffers of a pool */
};

/** What happens on a write through a view of mapped weights. Such a write is an error of the program. */
typedef int32_t fsdp_view_kind;
enum {
  FSDP_VIEWS_READ_ONLY = 1, /* the write raises SIGSEGV */
  FSDP_VIEWS_PRIVATE = 2    /* copy-on-write: the write changes the written pages of this view only, until
                               fsdp_restore_view, the next publish or fsdp_discard_step. Compute weights, other ranks
                               and training are unaffected, and all other pages keep showing what the owners write.
                               This kind is for frameworks whose tensors can be written by any code. It needs the host
                               device and must be the same on all ranks. Weights that the strategy keeps whole get such
                               a view too. Tensors still have FSDP_TENSOR_READ_ONLY. The memory of a copied page is
                               counted in no role */
};

typedef int32_t fsdp_reduce_policy;
enum {
  FSDP_REDUCE_POLICY_EACH = 1, /* every contribution is reduced and added to the main grads */
  FSDP_REDUCE_POLICY_LAST = 2  /* contributions add up in a full local buffer; only the last one is reduced (no_sync) */
};

/** What the replicas of a mesh divide among themselves. */
typedef int32_t fsdp_outer_strategy;
enum {
  FSDP_OUTER_NO_SHARD = 1, /* HSDP: nothing is divided; one all-reduce over replicas per group and step */
  FSDP_OUTER_OPTIM = 2     /* HFSDP: main weights and optimizer state are divided; one reduce-scatter per group and
                              step, one gather at publish */
};

typedef int32_t fsdp_optimizer;
enum {
  FSDP_OPTIMIZER_ADAMW = 1, /* fsdp_step_adamw, with fp32 states "exp_avg" and "exp_avg_sq"; fsdp_add_optimizer_state
                               adds states of the caller's own */
  FSDP_OPTIMIZER_CALLER = 2, /* an optimizer of the caller's own, with states from fsdp_add_optimizer_state. In a model
                                with AdamW single parameters may have it (fsdp_param.optimizer) */
  FSDP_OPTIMIZER_ADAMW_8BIT = 3 /* AdamW whose two states are codes of 8 bits, with an fp32 scale (absmax) for each
                                   block of 256 elements of a parameter: 2.03 bytes an element in place of 8. A step
                                   decodes the states, computes in fp32 and encodes them. Rows that share a block stay
                                   on one rank, as if a larger granule were declared. Parameters of fewer than 4,096
                                   elements keep fp32 states; for a box, the elements of the whole tensor are counted.
                                   A box also keeps fp32 states if its blocks are not blocks of the whole tensor
                                   (docs/contracts/numerics.md). Source: Dettmers et al., "8-bit Optimizers via
                                   Block-wise Quantization", 2022 */
};

/** How the main weights of a parameter with bfloat16 compute weights are kept. Parameters in float32 are their own main
 *  weights, whatever you choose. With SPLIT16 and NONE no trainable parameter can be float16 or quantized. */
typedef int32_t fsdp_main_storage;
enum {
  FSDP_MAIN_FLOAT32 = 1, /* fp32, beside the compute weights: 4 bytes an element */
  FSDP_MAIN_SPLIT16 = 2, /* fp32 in two halves, the compute weight and a rest of 16 bits: 2 more bytes an element.
                            Training is as exact as with FLOAT32. A compute weight can differ only where the main weight
                            lies exactly halfway between two bf16 numbers: it is rounded away from zero, not to even.
                            The main weights have no address: fsdp_shard.main_weight is NULL, and load, read and save
                            calls convert. SPLIT16 needs the optimizer FSDP_OPTIMIZER_ADAMW or
                            FSDP_OPTIMIZER_ADAMW_8BIT, and no bfloat16 parameter of such a group can have
                            fsdp_param.optimizer FSDP_OPTIMIZER_CALLER */
  FSDP_MAIN_NONE = 3     /* no main weights: the optimizer works on the compute weights, and
                            fsdp_shard.main_weight_dtype is FSDP_BFLOAT16. AdamW computes in fp32 and rounds
                            stochastically: the random bits depend only on rounding_seed, the parameter's name, the
                            element's number in the parameter (for a box: in the whole tensor) and the number of the
                            step. A caller's own optimizer rounds with fsdp_round_stochastic */
};

/** Where this rank keeps planes that only reduces and the update window use: main gradients, main weights or optimizer
 *  state. The home changes no bit of any result. Bytes at home on the host or in a file are of FSDP_ROLE_HOME. */
typedef int32_t fsdp_home;
enum {
  FSDP_HOME_DEVICE = 1, /* memory of the device, or the host's memory on the host device */
  FSDP_HOME_HOST = 2,   /* memory of the host that kernels of the GPU read and write in place, over the bus. On the host
                           device the same as DEVICE */
  FSDP_HOME_FILE = 3    /* a file without a name in home_directory; nothing is left of it when the process ends. The
                           update reads, changes and writes it segment by segment; two threads of the library read ahead
                           and write behind. The file is never flushed: checkpoints are for that */
};

enum {
  FSDP_MODEL_NO_PREFETCH = 1u << 11,       /* only fsdp_prefetch gathers groups ahead */
  FSDP_MODEL_FORCE_COMMUNICATION = 1u << 12 /* run the collectives also in a world of one, for tests */
};

/** How the factor f is rounded. Weights are multiplied by f before they become FP8 codes (fsdp_quantization). */
typedef int32_t fsdp_scale_rounding;
enum {
  FSDP_SCALE_EXACT = 1,       /* 448 / the largest magnitude, in fp32 */
  FSDP_SCALE_POWER_OF_TWO = 2 /* the same, rounded down to a power of two */
};

/** How the scale of an MXFP8 block follows from the largest magnitude in the block. */
typedef int32_t fsdp_scale_rule;
enum {
  FSDP_SCALE_ROUND_UP = 1, /* magnitude / 448, rounded up to a power of two: the smallest scale with which no code
                              saturates. TransformerEngine and cuBLAS do the same. A block with Inf has the scale byte
                              254, one with NaN 255 */
  FSDP_SCALE_FLOOR = 2     /* the rule of OCP MX 1.0: the exponent of the scale is that of the magnitude minus 8. Codes
                              may saturate. A block with Inf or NaN has the scale byte 255 */
};

/** For parameters that are stored in two forms (MXFP8): which of their planes an unshard gathers. */
typedef int32_t fsdp_plane_policy;
enum {
  FSDP_PLANES_BY_PHASE = 1, /* COLUMN planes for FSDP_BACKWARD, ROW planes for the other phases. A group cannot have a
                               RECOMPUTE hold and a BACKWARD hold at once: return the first before you take the other.
                               With INTERLEAVED a RECOMPUTE uses the same buffer as forward passes, and other
                               micro-batches may use that buffer too */
  FSDP_PLANES_BY_PHASE_AND_RECOMPUTE = 2, /* the same, with a buffer for each of the two holds; not with INTERLEAVED */
  FSDP_PLANES_BOTH = 3      /* all planes in every phase: 2.0625 bytes an element, more than the 2 bytes of bf16 */
};

typedef struct fsdp_model_options {
  uint64_t struct_size;
  const fsdp_mesh *mesh;           /* NULL: 1 x world */
  /* what is sharded, and how weights are unsharded */
  uint32_t flags;                  /* FSDP_MODEL_* */
  fsdp_strategy strategy;          /* 0: FSDP_STRATEGY_OPTIM_GRADS_PARAMS */
  fsdp_outer_strategy outer_strategy; /* 0: FSDP_OUTER_NO_SHARD; FSDP_OUTER_OPTIM needs a mesh with replicas */
  fsdp_unshard_mode unshard_mode;  /* 0: FSDP_UNSHARD_MAPPED, but FSDP_UNSHARD_COPIED with FSDP_CONTEXT_DEBUG and on a
                                      CUDA device, which has no other mode */
  /* gradients */
  fsdp_dtype grad_dtype;           /* dtype of full gradients; 0: the parameter's dtype. Give FSDP_FLOAT32 where several
                                      micro-batches add up in full gradients (FSDP_REDUCE_POLICY_LAST): 256 + 1 - 256 is
                                      0 in bfloat16 */
  fsdp_dtype reduce_dtype;         /* dtype to which gradients are rounded before they are summed in fp32; 0:
                                      grad_dtype */
  fsdp_grad_op grad_op;            /* 0: FSDP_GRAD_OP_MEAN */
  fsdp_reduce_policy reduce_policy; /* 0: EACH, but LAST with FSDP_STRATEGY_NO_SHARD; FSDP_STRATEGY_OPTIM always has
                                       LAST */
  double grad_factor;              /* counts only with FSDP_GRAD_OP_FACTOR, where it is finite and not 0 */
  /* optimizer, buffers and views */
  fsdp_optimizer optimizer;        /* 0: FSDP_OPTIMIZER_ADAMW */
  uint32_t max_pending_groups;     /* number of transient full gradient buffers alive at once, besides one for each
                                      FSDP_GROUP_ROOT; 0: 2 */
  uint32_t prefetch_depth;         /* for this number of next visits (of groups, or of pieces) there is room to gather
                                      ahead; 0: 1, but none with FSDP_MODEL_NO_PREFETCH */
  fsdp_view_kind view_kind;        /* kind of views of weights that are not copied; 0: FSDP_VIEWS_READ_ONLY, the only
                                      kind on a CUDA device */
  uint64_t prefetch_bytes;         /* limit of the bytes that are gathered ahead by prefetch; 0: no limit */
  /* checkpoints */
  uint64_t save_staging_bytes;     /* memory of role STAGING for saves, at least 32 MiB. A save copies its data into
                                      this memory and writes it from there. The update window opens when all data is
                                      copied: if the memory is smaller than the data, the caller waits for the disk. 0:
                                      none is planned, and each save takes 32 MiB while it runs */
  /* quantized parameters */
  fsdp_scale_rounding scale_rounding; /* 0: FSDP_SCALE_EXACT */
  fsdp_dtype quantize_from;        /* dtype to which main weights are rounded before they are quantized. 0:
                                      FSDP_FLOAT32, no rounding. With FSDP_BFLOAT16 codes are rounded twice, and scales
                                      come from rounded magnitudes too. MXFP8 with FSDP_BFLOAT16 and FSDP_SCALE_ROUND_UP
                                      has the bits of TransformerEngine, except in blocks with a NaN */
  fsdp_scale_rule scale_rule;      /* 0: FSDP_SCALE_ROUND_UP */
  fsdp_plane_policy plane_policy;  /* 0: FSDP_PLANES_BY_PHASE */
  uint64_t max_pending_bytes;      /* limit of the bytes of all transient full gradient buffers. A group that does not
                                      fit is divided into parts of consecutive parameters. Each part is lent and
                                      reduced by itself: it is reduced once fsdp_complete_grad was called for all of
                                      its parameters. max_pending_groups then counts parts; if that many do not fit,
                                      fewer are alive at once. A single parameter is never divided. Debug mode needs
                                      more memory. 0: no limit, and each group is one part */
  /* main weights */
  fsdp_main_storage main_storage;  /* 0: FSDP_MAIN_FLOAT32 */
  uint32_t reserved;               /* must be 0 */
  uint64_t rounding_seed;          /* with FSDP_MAIN_NONE: the key of the random bits; any number, but the same on
                                      every rank */
  /* matrices */
  uint64_t matrix_bytes;           /* limit of the matrices that one rank gets at once (fsdp_collect_matrices). A matrix
                                      counts with its bytes in fp32, rounded up to 256 bytes; one above the limit is
                                      refused. The model has memory for at most twice the limit, and for rows of other
                                      ranks' matrices.
                                      0: 64 MiB, or the largest matrix if that is larger */
  /* homes; see docs/guides/larger-than-memory.md */
  fsdp_home state_home;            /* of optimizer states; 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE the scales of states
                                      in codes (FSDP_OPTIMIZER_ADAMW_8BIT) stay in memory */
  fsdp_home main_home;             /* of main weights that are not the compute weights, or of their rests
                                      (FSDP_MAIN_SPLIT16); 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE no trained parameter
                                      can be quantized */
  const char *home_directory;      /* directory for the file of this rank, on a local disk; ranks may have different
                                      ones. Counts only with FSDP_HOME_FILE, which needs it */
  uint64_t turn_bytes;             /* limit of the bytes of one segment of the file, at least 65536; 0: 64 MiB */
  uint32_t turns;                  /* number of buffers of turn_bytes (role STAGING), from 2 to 16: one segment is
                                      updated while the next is read and the last is written; 0: 3 */
  fsdp_home grad_home;             /* of main gradients that have memory of their own. Gradients of
                                      FSDP_STRATEGY_NO_SHARD, and sums that FSDP_REDUCE_POLICY_LAST makes in full
                                      gradients, stay where they are. If no others are left, the seal refuses a home.
                                      0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE a reduce makes its sums in one of two
                                      buffers (role STAGING), and a thread of the library writes them to the file. A
                                      later contribution reads them first, and adds to them */
} fsdp_model_options;
#define FSDP_MODEL_OPTIONS_INIT \
  {sizeof(fsdp_model_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * Create an empty model. Collective: the mesh. Blocks: no. Memory: none until the seal.
 * Errors: INVALID_ARGUMENT, INVALID_HANDLE, UNSUPPORTED. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_model(fsdp_context *context, const fsdp_model_options *options,
                                                   fsdp_model **model);

/**
 * Give the handle back, with the model's groups and memory. NULL is allowed. The call never waits for peers. If peers
 * are in a collective of this model or enter one, they get a TIMEOUT that names this rank, unless they destroy their
 * model too. Threads: any. Since 0.2.
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
  FSDP_SCHEDULE_SEQUENTIAL = 1,  /* groups in declared order in forward passes, in reverse order in backward passes;
                                    each group has one fixed address */
  FSDP_SCHEDULE_INTERLEAVED = 2, /* 1F1B: a forward pass and a backward pass run at once; each (group, direction) has
                                    one fixed address */
  FSDP_SCHEDULE_VISITS = 3,      /* the list of visits in fsdp_schedule_options */
  FSDP_SCHEDULE_ANY = 4          /* no order, for eager frameworks: any groups may be held at once, in any order. There
                                    are held_groups buffers, each as large as the largest group. An unshard that
                                    gathers takes a free buffer, or else the buffer of the group whose last hold was
                                    returned first. A view's address is valid while the group is held, and may differ at
                                    the next hold. Only fsdp_prefetch gathers ahead. Gradient buffers are planned as for
                                    SEQUENTIAL. No graph can be captured, and no group can be RESIDENT or ROOT: keep a
                                    hold on the group instead */
};

/** One stop of an explicit schedule. group_index counts groups in the order of their creation. This struct may grow, so
 *  arrays of it come with a stride. */
typedef struct fsdp_visit {
  uint32_t group_index;
  fsdp_phase phase; /* FSDP_FORWARD, FSDP_BACKWARD, or FSDP_RECOMPUTE. Weights of RECOMPUTE visits are gathered ahead as
                       well; in a schedule without such visits a recompute belongs to a BACKWARD visit */
  uint32_t piece;   /* 0: the whole group; FSDP_PIECE(p), not p itself: its piece p. If any visit names a piece of the
                       group, each of its pieces has a buffer of its own, planned for the visits of the piece and of the
                       group */
} fsdp_visit;
/** The number in fsdp_visit.piece that names piece p of a group. */
#define FSDP_PIECE(p) ((uint32_t)(p) + 1u)

typedef struct fsdp_schedule_options {
  uint64_t struct_size;
  const fsdp_visit *visits; /* counts only with FSDP_SCHEDULE_VISITS; every trainable group needs a BACKWARD visit */
  uint64_t visit_count;
  uint64_t visit_stride;    /* sizeof(fsdp_visit); counts only with visits */
  uint32_t held_groups;     /* with FSDP_SCHEDULE_ANY: number of buffers for copied weights, one for each group that is
                               held or gathered ahead (if planes are gathered by phase, see fsdp_plane_policy, one for
                               each set of planes); 0: 4. Other schedules need 0 */
  uint32_t reserved;        /* must be 0 */
} fsdp_schedule_options;
#define FSDP_SCHEDULE_OPTIONS_INIT {sizeof(fsdp_schedule_options), 0, 0, 0, 0, 0}

/**
 * Set the order in which groups will be visited. The order decides prefetch and the plan of the buffers; the default is
 * SEQUENTIAL. A training step may deviate from the order: an unused prefetch is dropped, and a hold that does not fit
 * is an error that names both groups. With ANY this error names held_groups and the groups that hold the buffers.
 * Collective: the mesh. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (sealed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_set_schedule(fsdp_model *model, fsdp_schedule_kind kind,
                                                   const fsdp_schedule_options *options);

/**
 * Add a named state tensor for the caller's own optimizer, or beside the states of AdamW (for example a moving average
 * of the weights). In each shard the state has as many elements as the main weights. It is zeroed at the seal, and
 * saved and loaded with the other states. All parameters that are not FROZEN have the state. But if AdamW updates some
 * of them and the caller others (fsdp_param.optimizer), only those that the caller updates have it.
 * Collective: the mesh. Blocks: no.
 * Errors: INVALID_ARGUMENT (the name is taken, with AdamW also "step" and the names of AdamW's states; the name is not
 * UTF-8 of 1-63 bytes), INVALID_STATE. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_add_optimizer_state(fsdp_model *model, const char *name, fsdp_dtype dtype);

typedef int32_t fsdp_role;
enum {
  FSDP_ROLE_ALL = 0,       /* the sum of all roles, in calls that return bytes */
  FSDP_ROLE_COMPUTE = 1,   /* compute weights at rest (this rank's part; whole where the strategy keeps them whole) */
  FSDP_ROLE_MAIN = 2,      /* fp32 main weights, or their rests (FSDP_MAIN_SPLIT16). 0 bytes with FSDP_MAIN_NONE and if
                              the compute weights are fp32, because main and compute weights are then the same memory */
  FSDP_ROLE_GRAD = 3,      /* fp32 main grads; also full gradients in grad_dtype that are reduced only once a step */
  FSDP_ROLE_OPTIMIZER = 4, /* optimizer state */
  FSDP_ROLE_GATHER = 5,    /* pool of gathered full weights; 0 if they are mapped */
  FSDP_ROLE_REDUCE = 6,    /* pool of full gradients */
  FSDP_ROLE_STAGING = 7,   /* scratch for norms, and a small buffer for exchanges with peers */
  FSDP_ROLE_MATRIX = 8,    /* whole matrices of this rank, and rows on their way (fsdp_collect_matrices); 0 if no
                              parameter has matrices */
  FSDP_ROLE_HOME = 9       /* planes at home on the host of a GPU, or in a file (fsdp_home). Bytes in a file are room on
                              the disk, and not memory */
};

/**
 * Hand in the memory of a role, aligned to 4096 bytes and at least as large as fsdp_get_role_bytes of a planning
 * context says. Only roles that peers do not read can be handed in: MAIN, OPTIMIZER, GATHER, and GRAD if no group is
 * NO_SHARD or reduced once a step. Other roles are UNSUPPORTED. On a CUDA device the memory must belong to that device.
 * The memory must outlive the model. The model may live on after fsdp_destroy_model returns: while a save still holds
 * it, or while another thread is inside one of its calls. Collective: no. Blocks: no.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (sealed), UNSUPPORTED. The seal reports a size that is too small. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_set_arena(fsdp_model *model, fsdp_role role, void *data, uint64_t size_bytes);

/**
 * List what fsdp_seal_model would refuse in this rank's declarations, as text with one violation a line; no violation
 * gives an empty text. Sizes and arenas are checked only if groups and visits are right. Problems that only show
 * when ranks are compared or memory is allocated are not in the text. buffer and size_bytes work as in
 * fsdp_describe_model.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE (sealed). Since
 * 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_check_model(const fsdp_model *model, char *buffer, uint64_t *size_bytes);

/**
 * Fix the layout, plan and allocate all memory, and compare what every rank declared (names, order, shapes, dtypes,
 * flags, policy, layout hash). A model needs at least one group, which may have no parameters. The first difference is
 * reported on every rank with both ranks' values. Afterwards the model is in its update window: load parameters, then
 * call fsdp_publish_weights.
 * Collective: the mesh. Blocks: peers. Memory: all that the model will ever use.
 * Errors: MISMATCH, INVALID_STATE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, PEER_FAILED, TIMEOUT. INVALID_ARGUMENT
 * also reports a size beyond 64 bits, or two tensors that would have the same name in a checkpoint. If ranks that share
 * a memory cgroup need more than it has free, OUT_OF_MEMORY comes before anything is allocated. If the call fails on
 * one rank, it fails on all ranks with the same status. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_seal_model(fsdp_model *model);

/**
 * The bytes of a role, or of FSDP_ROLE_ALL, on rank `rank` of a sealed model's mesh, as the plan has them. rank may be
 * any rank that is in all meshes of this rank; if no group has a mesh of its own, these are all ranks of the model. If
 * a planning context for a GPU names no device_transport, the bytes of FSDP_ROLE_STAGING are the maximum over the
 * transports that the seal may choose.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_role_bytes(const fsdp_model *model, fsdp_role role, uint32_t rank,
                                                 uint64_t *bytes);

/**
 * The bytes of a role, or of FSDP_ROLE_ALL, that this rank has allocated, as the allocator counted them. They equal
 * the bytes of fsdp_get_role_bytes. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed, or
 * only planned). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_allocated_bytes(const fsdp_model *model, fsdp_role role, uint64_t *bytes);

/** The size and layout of a sealed model, the same on every rank. Output only: set struct_size before the call. */
typedef struct fsdp_model_info {
  uint64_t struct_size;
  uint64_t group_count;
  uint64_t param_count;              /* number of parameters in all groups */
  uint64_t element_count;            /* elements of all whole parameters that this rank declares, without padding */
  uint64_t padding_count;            /* elements of padding in what this rank declares, counted over all ranks of its
                                        meshes */
  uint64_t gather_pool_bytes;        /* size of the pool of gathered weights */
  uint64_t gather_lower_bound_bytes; /* gathered bytes alive at the schedule's peak: no pool can be smaller */
  uint64_t reduce_pool_bytes;        /* size of the pool of full gradients */
  uint64_t reduce_lower_bound_bytes; /* bytes of full gradients alive at the peak: no pool can be smaller */
  uint64_t layout_hash;
} fsdp_model_info;
#define FSDP_MODEL_INFO_INIT {sizeof(fsdp_model_info), 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Get size and layout of a model. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed).
 *  Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_model_info(const fsdp_model *model, fsdp_model_info *info);

/** Counters of a model on one rank since its seal. Output only: set struct_size before the call. */
typedef struct fsdp_stats {
  uint64_t struct_size;
  /* weights */
  uint64_t version;             /* version of the published weights, from 1; 0: none yet */
  uint64_t step;                /* number of the last AdamW step; 0: none yet */
  /* gathers */
  uint64_t gathers;             /* times that weights became gathered, also if no bytes were moved */
  uint64_t all_gathers;         /* collectives that moved bytes */
  uint64_t gathered_bytes;      /* bytes that these collectives copied on this rank */
  uint64_t gathered_groups;     /* number of groups gathered now */
  uint64_t peak_gathered_groups;
  uint64_t prefetches;          /* gathers started ahead */
  uint64_t dropped_prefetches;  /* gathers started ahead whose weights were given back unused */
  /* reduces */
  uint64_t reduces;             /* contributions reduced; each part of a group counts. 0 if there is one rank */
  uint64_t reduced_bytes;       /* bytes that this rank has read in these reduces, of the full gradients of all ranks */
  uint64_t reduce_scatters;     /* number of reduce-scatter collectives */
  uint64_t reduce_scatter_bytes; /* bytes that they read on this rank */
  uint64_t all_reduces;         /* number of all-reduce collectives */
  uint64_t all_reduce_bytes;    /* bytes that they read on this rank, in both halves: the sum and the gather */
  uint64_t pending_grad_groups; /* transient full-gradient buffers in use now; each belongs to a group or a part */
  uint64_t peak_pending_grad_groups;
  /* collectives over the outer axis (replicas, or hosts of a shard axis), not counted above */
  uint64_t outer_all_gathers;
  uint64_t outer_reduce_scatters;
  uint64_t outer_all_reduces;
  uint64_t outer_sent_bytes;    /* bytes that this rank has sent in these collectives */
  /* the caller's time spent waiting: exposed communication */
  uint64_t wait_ns;             /* the sum of the next three */
  uint64_t gather_wait_ns;      /* waits for copies of weights */
  uint64_t reduce_wait_ns;      /* waits for reduces to end, or for a gradient buffer to be free */
  uint64_t peer_wait_ns;        /* waits for peers to publish, to end the step, to exchange norms and parameters */
  /* how long the ranks waited for each other at the end of a step. They exchange these times when they synchronize the
     next time, so the next two fields may be about an earlier step */
  uint64_t last_rank_lag_ns;    /* the wait of the rank that waited longest, minus that of the rank that waited least */
  int32_t last_rank;            /* the rank that waited least, so that all other ranks have waited for it; -1: none yet,
                                   or a mesh of one */
  uint32_t reserved;            /* 0 */
  /* memory */
  uint64_t allocations;         /* allocations of memory for roles, shared or not, by all models of the context since
                                   the context was made */
  /* checkpoints */
  uint64_t checkpoint_stall_ns; /* time that the caller waited at the opening of update windows, because a save was
                                   still copying memory that may be written in the window; not a part of wait_ns */
  /* how much of gathered_bytes was planes of quantized parameters, codes and scales */
  uint64_t gathered_row_bytes;    /* bytes of ROW planes, including planes that serve all phases */
  uint64_t gathered_column_bytes; /* bytes of COLUMN planes, which only MXFP8 has */
  /* planes at home in a file (FSDP_HOME_FILE) */
  uint64_t home_read_bytes;     /* bytes read from the file */
  uint64_t home_written_bytes;  /* bytes written to the file */
  uint64_t home_wait_ns;        /* time that calls waited for the disk, but for fsdp_reduce_grad; not in wait_ns */
} fsdp_stats;
#define FSDP_STATS_INIT \
  {sizeof(fsdp_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Get the counters since the seal. Collective: no. Blocks: no. Errors: INVALID_STATE (not sealed). Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_stats(const fsdp_model *model, fsdp_stats *stats);

/**
 * Describe the layout of a sealed model as JSON: groups, buckets, parameters with offsets, padding, pool slots, hash.
 * *size_bytes is the buffer's size on entry, and on return the size needed with the final NUL. buffer may be NULL to
 * ask for the size alone.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_describe_model(const fsdp_model *model, char *buffer, uint64_t *size_bytes);

/* ---- group --------------------------------------------------------------------------------------------------- */

typedef int32_t fsdp_granule;
enum {
  FSDP_GRANULE_ROW = 1,    /* rank boundaries may fall between rows (a row spans all dimensions but the first, or but
                              the first row_dimensions) */
  FSDP_GRANULE_BLOCK = 2,  /* rank boundaries may fall between blocks of granule_rows rows */
  FSDP_GRANULE_TENSOR = 3  /* the tensor stays whole on one rank (for matrix optimizers) */
};

enum {
  FSDP_PARAM_FROZEN = 1u << 13,   /* no gradient, no optimizer state, no main weights */
  FSDP_PARAM_NO_DECAY = 1u << 14, /* no weight decay in fsdp_step_adamw */
  FSDP_PARAM_LR_ZERO = 1u << 15   /* lr_scale is 0: the optimizer leaves the weights alone, but its states still follow
                                     the gradients */
};

/**
 * The form in which the compute weights of a parameter are stored. Codes and scales are computed from the fp32 main
 * weights whenever these are published. Gradients, main weights and states are those of an unquantized parameter of the
 * same dtype. A FROZEN parameter has only codes and scales. fsdp_load_param computes them from numbers, with the bits
 * that a publish would give; fsdp_load_plane takes them as they are. fsdp_read_param returns codes times scales of the
 * ROW planes; checkpoints contain the planes. fsdp_get_plane shows what is stored. Later releases may add kinds; a
 * value that this header does not name is INVALID_ARGUMENT.
 *   FP8         E4M3 codes and one fp32 scale for all of them; number = code times scale. Let f be 448 / the largest
 *               magnitude of the parameter (1 where that magnitude is 0 or not finite; with FSDP_SCALE_POWER_OF_TWO
 *               rounded down to a power of two). The codes are the numbers times f, rounded to nearest, ties to even,
 *               with a magnitude of at most 448; NaN stays NaN. The scale is 1 / f. One plane serves all phases. Any
 *               shape and granule are legal. In a publish, the ranks that hold different parts exchange their largest
 *               magnitudes, 4 bytes a parameter, for all parameters at once, and the publish blocks for this exchange.
 *               A FROZEN parameter with FP8 cannot be a box of a larger tensor. FP8 is refused in a group whose mesh or
 *               outer_strategy is not the model's.
 *   MXFP8       E4M3 codes and an E8M0 scale for each 32 of them (OCP MX 1.0); number = code times scale. There are two
 *               forms. ROW planes have blocks of 32 in a row, for a product with the matrix; COLUMN planes have blocks
 *               of 32 in a column, for a product with its transpose. The codes are in C order in both. fsdp_scale_rule
 *               gives the scales. The codes are the numbers divided by the scale, rounded to nearest, ties to even; a
 *               NaN makes its whole block NaN. Rows and columns must be multiples of 32; with three or more dimensions
 *               this holds for each matrix. 32 rows of a matrix stay together on a rank. An unshard gathers one form,
 *               by phase: see fsdp_plane_policy. FSDP_GROUP_RESIDENT groups, and groups whose strategy keeps weights
 *               whole, have both forms. A FROZEN box of a larger tensor must not cut a block of that tensor.
 *   FP8_BLOCK   E4M3 codes and an fp32 scale for each block of 128 x 128; blocks at the right and lower edges are
 *               smaller. number = code times scale; each block gets codes and scale as FP8 makes them for the whole
 *               parameter. One plane serves all phases. The matrix is that of the last two dimensions; with more than
 *               two dimensions, the last but one must be a multiple of 128. Rank boundaries fall between blocks:
 *               whatever the granule, 128 rows of a matrix stay together, and granules of BLOCK must be multiples of
 *               that. A FROZEN box of a larger tensor must not cut a block of that tensor.
 */
typedef int32_t fsdp_quantization;
enum {
  FSDP_QUANTIZE_FP8 = 1,
  FSDP_QUANTIZE_MXFP8 = 2,
  FSDP_QUANTIZE_FP8_BLOCK = 3
};

/** What a step does to a parameter that has no gradient. A parameter has none if in this step no rank called
 *  fsdp_acquire_grad for it, no rank gave non-NULL data to fsdp_put_grad or fsdp_apply_grads, and fsdp_load_grad loaded
 *  nothing. */
typedef int32_t fsdp_missing_grad;
enum {
  FSDP_MISSING_GRAD_ZEROS = 1, /* the gradient is zeros: weight decay and the moments still change the weights */
  FSDP_MISSING_GRAD_SKIP = 2   /* as in torch.optim, fsdp_step_adamw leaves weights and moments unchanged; AdamW's step
                                  number still advances. A caller's own optimizer sees this as FSDP_PARAM_FROZEN in
                                  fsdp_shard.flags. In fsdp_finish_grads the ranks agree which SKIP parameters have a
                                  gradient: if ranks gave gradients to different ones, one more exchange sends one bit
                                  per SKIP parameter. A model with a SKIP parameter cannot be captured into graphs. SKIP
                                  has no effect on a FROZEN parameter */
};

/** Which dimensions of a parameter are a matrix. */
typedef int32_t fsdp_matrix_layout;
enum {
  FSDP_MATRIX_LAST_TWO = 1 /* the last two, rows and columns. The dimensions before them count matrices: a stack of
                              experts [E, R, C] is E matrices. Not for a FROZEN parameter, nor for a box that cuts the
                              last two dimensions of its tensor */
};

typedef struct fsdp_param {
  uint64_t struct_size;
  const char *name;        /* unique in the model, 1-255 bytes */
  const uint64_t *shape;   /* dimension_count sizes of 1 or more, in C order; copied */
  uint32_t dimension_count; /* at most 16; 0: a scalar */
  fsdp_dtype dtype;        /* dtype of the compute weights, unless the parameter is quantized; 0: FSDP_FLOAT32. Only a
                              FROZEN parameter that is not quantized can have FSDP_UINT8 */
  uint32_t flags;          /* FSDP_PARAM_* */
  fsdp_granule granule;    /* 0: FSDP_GRANULE_ROW */
  uint64_t granule_rows;   /* number of rows in a block; counts only with FSDP_GRANULE_BLOCK. A number above the
                              parameter's rows means all of its rows. For a parameter that is quantized in blocks it
                              must be a multiple of the rows of a block, also if it is above the parameter's rows. A
                              block has 32 rows of a matrix with MXFP8 and 128 with FP8_BLOCK */
  double lr_scale;         /* 0: 1 (see FSDP_PARAM_LR_ZERO) */
  void *user_data;         /* kept and returned by fsdp_get_param_info; never read */
  /* The parameter may be a box of a larger tensor, of which other models or other meshes of the group have the rest
     (tensor parallelism, a stack of experts). global_shape is then the shape of the larger tensor, and global_offset
     is where the box begins in it; both have dimension_count numbers and are copied. Checkpoints then describe the
     larger tensor: this model saves its box of it, and loads the box from any checkpoint that has it. If both are
     NULL, the parameter is a whole tensor. */
  const uint64_t *global_shape;
  const uint64_t *global_offset;
  fsdp_quantization quantization; /* 0: none */
  fsdp_missing_grad missing_grad; /* 0: FSDP_MISSING_GRAD_ZEROS */
  uint32_t row_dimensions; /* in how many leading dimensions ranks may divide the parameter; 0: 1; at most
                              dimension_count. A row spans the other dimensions. With 1, a stack of E matrices [E, R, C]
                              has E rows of R x C elements. With 2 it has E x R rows of C elements, and a rank's part
                              may begin inside a matrix. With dimension_count, every element is a row. The view of the
                              weights stays one tensor [E, R, C]. granule_rows, fsdp_get_chunk, fsdp_load_chunk and
                              fsdp_shard count these rows; fsdp_rename counts rows of the first dimension */
  uint32_t piece;          /* number of the piece of the group that the parameter is in. The first parameter of a group
                              has piece 0; each later one has the piece of the parameter before it, or the next.
                              fsdp_unshard_piece gathers a piece by itself. Each rank keeps an equal share of each
                              piece, so each piece has padding of its own */
  fsdp_optimizer optimizer; /* which optimizer updates the parameter; 0: the model's. With FSDP_OPTIMIZER_CALLER in a
                              model with AdamW the caller updates it in the window: it has none of AdamW's states, and
                              fsdp_step_adamw publishes its main weights as they are. FSDP_OPTIMIZER_ADAMW is legal in
                              models with AdamW only, and means the model's AdamW, with states in fp32 or in 8 bits. A
                              FROZEN parameter must have 0 */
  /* The matrices of the parameter, which fsdp_collect_matrices brings whole to one rank each */
  fsdp_matrix_layout matrix; /* 0: the parameter has none */
  const uint64_t *matrix_splits; /* cuts the R rows of the last two dimensions into several matrices, for example into
                              q, k and v: the number of rows of each. Their sum is R; copied. NULL: one matrix of R
                              rows */
  uint64_t matrix_split_count; /* 0 with matrix_splits NULL */
} fsdp_param;
#define FSDP_PARAM_INIT {sizeof(fsdp_param), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

#ifndef __cplusplus
/** In C, writes a shape as the two fields "shape, dimension_count" of fsdp_param: FSDP_SHAPE(3 * c, c). */
#define FSDP_SHAPE(...) \
  (const uint64_t[]){__VA_ARGS__}, (uint32_t)(sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t))
/** In C, makes a descriptor: FSDP_PARAM("qkv", 3 * c, c) in fp32, or with dtype and flags
 *  FSDP_PARAM_OF(FSDP_BFLOAT16, FSDP_PARAM_NO_DECAY, "bias", c). The shape array is a compound literal and lives until
 *  the end of the enclosing { } block: a descriptor made in a loop's body must not be used after that iteration. */
#define FSDP_PARAM(name, ...) FSDP_PARAM_OF(FSDP_FLOAT32, 0, name, __VA_ARGS__)
#define FSDP_PARAM_OF(dtype, flags, name, ...)                                                              \
  (fsdp_param) {                                                                                            \
    sizeof(fsdp_param), (name), FSDP_SHAPE(__VA_ARGS__), (dtype), (flags), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
  }
#endif

enum {
  FSDP_GROUP_RESIDENT = 1u << 16, /* stays gathered from its forward to its backward visit; not with INTERLEAVED */
  FSDP_GROUP_ROOT = 1u << 22      /* visited first and last in each direction, like tied embeddings; only with
                                     SEQUENTIAL */
};

/** Does the backward computation of a group read its weights? */
typedef int32_t fsdp_backward_weights;
enum {
  FSDP_BACKWARD_WEIGHTS_GATHERED = 1, /* yes */
  FSDP_BACKWARD_WEIGHTS_NONE = 2      /* no, for example an embedding or a bias. BACKWARD visits of the group gather
                                         nothing, and no prefetch or buffer is planned for them. A BACKWARD hold, and
                                         fsdp_prefetch for BACKWARD, fail with INVALID_STATE. For a RECOMPUTE hold there
                                         is room only at a RECOMPUTE visit; elsewhere it fails if the group's buffer
                                         (with INTERLEAVED that of FORWARD) is in use. Gradients are as with other
                                         groups. Not with FSDP_GROUP_RESIDENT */
};

typedef struct fsdp_group_options {
  uint64_t struct_size;
  uint32_t flags;          /* FSDP_GROUP_* */
  fsdp_strategy strategy;  /* 0: the model's */
  fsdp_dtype grad_dtype;   /* 0: the model's */
  fsdp_dtype reduce_dtype; /* 0: the model's */
  fsdp_main_storage main_storage; /* 0: the model's */
  fsdp_backward_weights backward_weights; /* 0: FSDP_BACKWARD_WEIGHTS_GATHERED */
  const fsdp_mesh *mesh;   /* the ranks that share this group; NULL: the model's mesh. They are some of the model's
                              ranks, and this rank is one of them. The meshes that the model's ranks name for a group
                              are equal in shape and disjoint, and together they have all ranks of the model (see
                              fsdp_create_group) */
  fsdp_grad_op grad_op;    /* 0: the model's. FSDP_GRAD_OP_MEAN divides by the number of the MODEL's ranks for every
                              group, because the gradient of an expert is a sum over the tokens of all ranks. The seal
                              refuses a mean for a trained group whose ranks may be tensor-parallel: if meshes have
                              equal boxes, or if they have boxes of one tensor and no group is on the model's mesh */
  fsdp_outer_strategy outer_strategy; /* 0: the model's, if the mesh has replicas; FSDP_OUTER_OPTIM needs a mesh with
                              replicas */
  double grad_factor;      /* counts only with FSDP_GRAD_OP_FACTOR in grad_op, where it is finite and not 0 */
} fsdp_group_options;
#define FSDP_GROUP_OPTIONS_INIT {sizeof(fsdp_group_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * Declare a group of param_count parameters. The descriptors follow each other at a distance of param_stride bytes,
 * which is sizeof(fsdp_param). The group's name is UTF-8 of 1-255 bytes and unique among the model's groups. Parameters
 * of different dtypes, row sizes and trainability may mix; the library splits the group internally. A group without
 * parameters is legal.
 * A group may have a mesh of its own, for example experts. With 4 ranks and expert-parallel 2, ranks 0 and 2 name the
 * mesh {0, 2} for a group; ranks 1 and 3 name the mesh {1, 3}. Each rank declares the same groups in the same order.
 * Parameters with the same index in different meshes are different parameters: they have the same shape and options,
 * but their values, names, global_shape and global_offset may differ. Parameters with one name in several meshes are
 * boxes of one tensor; boxes that are equal hold the same values, and norms and checkpoints count them once. Calls that
 * load or read one parameter are collective over the group's mesh. Settings such as lr_scale and trainability must be
 * equal on all ranks of the model. All ranks of the model also call the reduces, and on GPUs the gathers, of all groups
 * in one order.
 * Collective: the model's mesh (compared at the seal). Blocks: no. Memory: none until the seal.
 * Errors: INVALID_ARGUMENT (naming the parameter and field), INVALID_STATE (sealed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_create_group(fsdp_model *model, const char *name, const fsdp_param *params,
                                                   uint64_t param_count, uint64_t param_stride,
                                                   const fsdp_group_options *options, fsdp_group **group);

/** The declaration of a group, with defaults filled in. Output only: set struct_size before the call. */
typedef struct fsdp_group_info {
  uint64_t struct_size;
  const char *name;
  uint64_t param_count;
  uint32_t group_index;    /* index in the order of creation */
  uint32_t flags;          /* FSDP_GROUP_* */
  fsdp_strategy strategy;
  fsdp_reduce_policy reduce_policy;
  fsdp_dtype grad_dtype;   /* 0: the dtype of each parameter */
  fsdp_dtype reduce_dtype; /* 0: the dtype of the gradient */
  fsdp_main_storage main_storage;
  fsdp_backward_weights backward_weights;
  uint64_t piece_count;    /* at least 1 */
  uint32_t replicate_size; /* shape of the group's mesh */
  uint32_t shard_size;
  fsdp_grad_op grad_op;
  fsdp_outer_strategy outer_strategy;
  double grad_factor;      /* the number by which sums of gradients are multiplied */
} fsdp_group_info;
#define FSDP_GROUP_INFO_INIT {sizeof(fsdp_group_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Get the number of groups that were created. Threads: any, once sealed. Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_group_count(const fsdp_model *model, uint64_t *group_count);
/** Get the group with that index, in the order of creation. The handle is the one that fsdp_create_group returned.
 *  Threads: any, once sealed. Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_group(const fsdp_model *model, uint64_t group_index, fsdp_group **group);
/** Find the group of that name. Threads: any, once sealed. Errors: INVALID_ARGUMENT (no such group). Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_find_group(const fsdp_model *model, const char *name, fsdp_group **group);
/** Get a group's declaration. Strings live as long as the model. Threads: any, once sealed. Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_group_info(const fsdp_group *group, fsdp_group_info *info);
/** Find the parameter of that name, which is unique in the model. Threads: any, once sealed. Errors: INVALID_ARGUMENT
 *  (no such parameter). Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_find_param(const fsdp_model *model, const char *name, fsdp_group **group,
                                                 uint64_t *param_index);

/** Get the descriptor as it was declared, with defaults filled in and the current lr_scale. fsdp_create_group accepts
 *  this descriptor. Threads: any, once sealed. Errors: INVALID_ARGUMENT. Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_param_info(const fsdp_group *group, uint64_t param_index, fsdp_param *param);

#define FSDP_EVERY_RANK (-1)

/**
 * Load a parameter from full data: element_count elements of dtype, in C order. With root FSDP_EVERY_RANK every rank
 * passes the same data and nothing is communicated. Otherwise rank `root` passes the data, and data should be NULL on
 * the other ranks. A rank that passes NULL may pass any dtype and element_count; data that is not NULL is checked as
 * the root's data is. The data may be freed when the call returns. flags must be 0.
 * Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window: inside. Memory:
 * for a FROZEN quantized parameter 4 bytes for each element that this rank owns, during the call, because the planes
 * are made when all data has come. Errors: INVALID_ARGUMENT, INVALID_STATE (window closed), OUT_OF_MEMORY, PEER_FAILED,
 * TIMEOUT. If the root's data, dtype or element_count is wrong, all ranks get INVALID_ARGUMENT. Any other wrong
 * argument fails the call only on the rank that passed it, and the other ranks wait for that rank. With a root all
 * ranks get OUT_OF_MEMORY, else only this rank does. After OUT_OF_MEMORY the planes have their old values: load the
 * parameter again before the next publish. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_param(fsdp_group *group, uint64_t param_index, const void *data,
                                                 fsdp_dtype dtype, uint64_t element_count, int32_t root,
                                                 uint32_t flags);

/**
 * Copy a whole parameter out: the main weights (for a frozen parameter the compute weights), converted to dtype. With
 * root FSDP_EVERY_RANK every rank gets the data; otherwise only rank `root` gets it, and data may be NULL on the
 * others. flags must be 0. The data arrives in blocks from the ranks that own it, so if a peer fails, a part of data
 * may have been written.
 * Collective: the group's mesh (root is one of its ranks). Blocks: peers. Window: either; while the window is open, no
 * rank may write main weights during the call. Memory: for a FROZEN quantized parameter all its codes and scales during
 * the call, on each rank that gets the data; on a GPU this is page-locked host memory. Errors: INVALID_ARGUMENT,
 * INVALID_STATE, OUT_OF_MEMORY (on every rank that sends or gets some of the data), PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_read_param(fsdp_group *group, uint64_t param_index, void *data, fsdp_dtype dtype,
                                                 uint64_t element_count, int32_t root, uint32_t flags);

/**
 * Get a read-only view of a parameter's full compute weights. The view may be read while the parameter's piece is held
 * or, if the strategy keeps the weights whole, at any time outside the update window. With SEQUENTIAL and VISITS
 * schedules the address is the same from the seal on, in every phase. With INTERLEAVED, and in a group whose planes are
 * gathered by phase (fsdp_plane_policy), there are two addresses: one for FORWARD and EVAL, and one for BACKWARD.
 * RECOMPUTE has the address of FORWARD if planes are gathered by phase or if BACKWARD reads no weights; otherwise it
 * has that of BACKWARD. With ANY the address is valid while the group is held, and may differ at the next hold. Every
 * phase is legal here, except BACKWARD of a group with FSDP_BACKWARD_WEIGHTS_NONE.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (also if the parameter is quantized, see fsdp_get_plane),
 * INVALID_STATE (not sealed; not unsharded). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_param(fsdp_group *group, uint64_t param_index, fsdp_phase phase,
                                                fsdp_tensor *tensor);

/**
 * Get the views of all parameters of a group, each as from fsdp_get_param. This is for bindings, which may keep the
 * views where addresses are fixed. The view of a quantized parameter has data NULL. tensors is an array of tensor_count
 * elements, the group's number of parameters. The call sets each struct_size: to the stride, or to the size that the
 * library knows if that is less.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_params(fsdp_group *group, fsdp_phase phase, fsdp_tensor *tensors,
                                                 uint64_t tensor_count, uint64_t tensor_stride);

typedef int32_t fsdp_plane;
enum {
  FSDP_PLANE_ROW = 1,      /* the codes of a quantized parameter: E4M3, in the parameter's shape */
  FSDP_PLANE_ROW_SCALE = 2, /* the scales by which codes are multiplied. FP8: one fp32 number, every size of the shape
                               is 1. FP8_BLOCK: fp32, in the parameter's shape with the last two sizes divided by 128
                               and rounded up. Both are stored without padding, so the first element is only aligned to
                               4 bytes. MXFP8: E8M0, in the parameter's shape with the last size divided by 32 */
  FSDP_PLANE_COLUMN = 3,    /* MXFP8: the codes of blocks in columns, in the parameter's shape */
  FSDP_PLANE_COLUMN_SCALE = 4 /* MXFP8: the scales of these codes, in the parameter's shape with the last size but one
                                 divided by 32 */
};

/**
 * Get a read-only view of a whole plane of a quantized parameter's compute weights. The view may be read at the same
 * times as one of fsdp_get_param, and its address follows the same rules. If planes are gathered by phase, it may be
 * read while a hold of the phase given lasts; the ROW planes of a group have other addresses than its COLUMN planes.
 * Collective: no. Blocks: no.
 * Errors: INVALID_ARGUMENT (no such plane; the parameter is not quantized), INVALID_STATE (not sealed; not unsharded;
 * the phase has other planes). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_plane(fsdp_group *group, uint64_t param_index, fsdp_phase phase,
                                                fsdp_plane plane, fsdp_tensor *tensor);

/**
 * Load a whole plane of a FROZEN quantized parameter as it is, bit for bit: element_count codes or scales in the
 * plane's shape and dtype (see fsdp_plane), in C order. This loads another program's quantized checkpoint without any
 * rounding. root and flags are as in fsdp_load_param.
 * Planes that belong together must be loaded together, in the same window: codes and scales, and for MXFP8 both forms.
 * The library does not check this.
 * Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window: inside. Errors:
 * INVALID_ARGUMENT (no such plane; another dtype or count; the parameter is not quantized), INVALID_STATE (not FROZEN:
 * its planes are computed from main weights; window closed), PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_plane(fsdp_group *group, uint64_t param_index, fsdp_plane plane,
                                                  const void *data, fsdp_dtype dtype, uint64_t element_count,
                                                  int32_t root, uint32_t flags);

/**
 * Write the scales of an MXFP8 plane, ROW_SCALE or COLUMN_SCALE, in the order in which block-scaled GEMMs read them
 * (VEC32_UE8M0 of cuBLASLt). If the parameter has three or more dimensions, its matrices follow each other. For an R x
 * C matrix, the scales of ROW planes are a matrix of R x C/32; the scales of COLUMN planes are transposed to C x R/32.
 * The rows and columns of this matrix of scales are rounded up to multiples of 128 and of 4. Tiles of 128 x 4 scales,
 * 512 bytes each, follow each other, one row of tiles after the other. In a tile, scale (r, c) is byte
 * r % 32 * 16 + r / 32 * 4 + c; bytes beyond the scales are 0.
 * data is memory of the model's device. *size_bytes is its size on entry and the size needed on return. data may be
 * NULL to ask for the size, at any time after the seal. With data, the plane must be readable as for fsdp_get_plane,
 * and its hold must be returned in the order of this stream.
 * Collective: no. Blocks: local work on the host device, else no.
 * Errors: as fsdp_get_plane, and INVALID_ARGUMENT (no scales of MXFP8; too small: *size_bytes is set). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_swizzle_scales(fsdp_group *group, uint64_t param_index, fsdp_phase phase,
                                                     fsdp_plane plane, void *data, uint64_t *size_bytes,
                                                     fsdp_stream stream);

/** The part of a parameter that a rank has to load. */
typedef struct fsdp_chunk {
  uint64_t struct_size;
  uint64_t element_offset; /* offset in the parameter, in C order */
  uint64_t element_count;  /* 0: this rank owns nothing of the parameter */
  uint64_t row_offset;     /* rows as fsdp_param.row_dimensions makes them */
  uint64_t row_count;
} fsdp_chunk;
#define FSDP_CHUNK_INIT {sizeof(fsdp_chunk), 0, 0, 0, 0}

/**
 * Get the part of a parameter that rank `rank` stores, by arithmetic alone. On that rank fsdp_load_chunk takes this
 * part, and fsdp_get_shard shows it if the parameter is not FROZEN. The part is the whole parameter where every rank
 * has the whole (FSDP_STRATEGY_NO_SHARD). Each replica has the same parts. The rank must be in the group's mesh.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_chunk(const fsdp_group *group, uint64_t param_index, uint32_t rank,
                                                fsdp_chunk *chunk);

/**
 * Load rows of a parameter that this rank owns: row_count rows from row_offset on, in C order, for example those of
 * fsdp_get_chunk. The rows must be in this rank's chunk; if the strategy keeps main weights whole, the chunk is all
 * rows. Every rank loads its own rows, and replicas do so as well. Rows are those of fsdp_param.row_dimensions. flags
 * must be 0. For a FROZEN quantized parameter the rows must be whole blocks: in a matrix, blocks of 32 rows (MXFP8) or
 * of 128 rows (FP8_BLOCK; the last block may be shorter). FP8 makes its scale of all rows, so a FROZEN parameter with
 * FP8 is loaded by fsdp_load_param.
 * Collective: no. Blocks: local work. Window: inside. Memory: as fsdp_load_param.
 * Errors: INVALID_ARGUMENT (rows of another rank, or parts of blocks), INVALID_STATE (window closed), UNSUPPORTED (FP8
 * of a FROZEN parameter), OUT_OF_MEMORY (the planes are as before). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_chunk(fsdp_group *group, uint64_t param_index, const void *data,
                                                 fsdp_dtype dtype, uint64_t row_offset, uint64_t row_count,
                                                 uint32_t flags);

/**
 * Load a named optimizer state of a parameter from full data, as fsdp_load_param does for its weights: "exp_avg" or
 * "exp_avg_sq" of AdamW, or one of the caller's own states. AdamW's number of steps is not part of a state and is not
 * changed by this call: set it once with fsdp_adamw_options.step, and later steps count on. flags must be 0.
 * Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window: inside. Errors:
 * as fsdp_load_param, and INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE (frozen). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_state(fsdp_group *group, uint64_t param_index, const char *name,
                                                 const void *data, fsdp_dtype dtype, uint64_t element_count,
                                                 int32_t root, uint32_t flags);
/**
 * Copy a whole optimizer state of a parameter out, as fsdp_read_param does for its weights. flags must be 0.
 * Collective: the group's mesh (root is one of its ranks). Blocks: peers. Window: either. Errors: as fsdp_read_param,
 * and INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE (frozen). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_read_state(fsdp_group *group, uint64_t param_index, const char *name, void *data,
                                                 fsdp_dtype dtype, uint64_t element_count, int32_t root,
                                                 uint32_t flags);

/**
 * Give a parameter another lr_scale from the next step on. 0 makes the optimizer leave the weights alone and sets
 * FSDP_PARAM_LR_ZERO in the descriptor; a later value that is not 0 clears this flag. Make the same calls on every
 * rank. The next call that synchronizes the model's ranks (such as fsdp_finish_grads or fsdp_publish_weights) compares
 * the lr_scales. If they differ, that call is a MISMATCH, which names the parameter and both values; ranks that make
 * the lr_scales equal again can go on. Setting the current value changes nothing. A capture that contains an AdamW step
 * can be replayed only while the lr_scales are those of the capture.
 * Collective: the mesh, but the ranks synchronize only later. Blocks: no. Window: either.
 * Errors: INVALID_ARGUMENT (negative or not finite in fp32), INVALID_STATE (not sealed; frozen; a capture is under
 * way), OUT_OF_MEMORY (nothing has changed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_set_param_lr_scale(fsdp_group *group, uint64_t param_index, double lr_scale);

/**
 * Stop training a parameter, or train it again. An untrained parameter has no gradient: fsdp_put_grad and
 * fsdp_acquire_grad refuse it like a FROZEN one, fsdp_acquire_grads lends nothing for it, and fsdp_reduce_grad does not
 * require its gradient. In a group without trained parameters fsdp_reduce_grad does nothing and need not be called.
 * fsdp_apply_grads still has an entry for the parameter, with data NULL. Steps leave its weights and states unchanged,
 * also by weight decay. fsdp_shard.flags has FSDP_PARAM_FROZEN, and the main gradient is zeros, also in norms.
 * fsdp_get_param_info shows the parameter as declared. The planned memory does not change. A parameter that was
 * declared FROZEN cannot be trained.
 * Collective: no, but train the same parameters on every rank. The next call that synchronizes the model's ranks, at
 * the latest the end of the step, compares which parameters are trained. If a rank reduces another group than its peers
 * before that call, the collective fails at once with MISMATCH, and the contexts have failed. Blocks: no.
 * Window: either, but only between steps: no gradient may have been acquired since the last publish, and an open window
 * must have no gradients. A graph captured earlier can be replayed only while the trained parameters are those of
 * its capture.
 * Errors: INVALID_ARGUMENT (trainable is neither 0 nor 1), INVALID_STATE (FROZEN; within a step; captured). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_set_param_trainable(fsdp_group *group, uint64_t param_index, int32_t trainable);

/* ---- gather -------------------------------------------------------------------------------------------------- */

/**
 * Start gathering a group ahead of its unshard. The schedule does this on its own; make this call if the order differs
 * from the schedule. If the group is gathered already, the call costs nothing. It does nothing if no buffer is free, or
 * with FSDP_CONTEXT_DEBUG. On the host device the calling thread copies a short group (docs/contracts/memory.md) at
 * once, which takes less time than waking another thread. flags must be 0.
 * Collective: no (the rank pulls what peers have published); on a CUDA device the shard axis. Blocks: no. Window:
 * outside. Errors: INVALID_ARGUMENT, INVALID_STATE. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_prefetch(fsdp_group *group, fsdp_phase phase, uint32_t flags,
                                                 fsdp_stream stream);

/**
 * Make the full compute weights readable for work that follows on the stream, and take a hold. If the group is gathered
 * already, the call costs nothing; otherwise it gathers the group. A group is gathered once per version, and again
 * after its weights were released. A RECOMPUTE hold while a BACKWARD hold is pending costs nothing, unless planes are
 * gathered by phase (fsdp_plane_policy). flags must be 0.
 * Collective: no; on a CUDA device the shard axis. Blocks: peers on the host device (until every rank has published
 * this version). Window: outside.
 * Errors: INVALID_STATE (window open; no buffer free, naming both groups or pieces; pieces of the group share a buffer;
 * BACKWARD with FSDP_BACKWARD_WEIGHTS_NONE; RECOMPUTE and BACKWARD at once, if planes are gathered by phase),
 * PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unshard(fsdp_group *group, fsdp_phase phase, uint32_t flags, fsdp_stream stream);

/**
 * Return a hold of the phase given. When the last hold is returned, the group gives up its buffer once the work on all
 * streams that returned holds is done. flags must be 0. After fsdp_discard_step, which takes back all holds, the call
 * fails with INVALID_STATE and changes nothing; a scope that ends after the discard may ignore this error.
 * Collective: no; on a CUDA device the shard axis. Blocks: no. Errors: INVALID_STATE (no such hold). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_reshard(fsdp_group *group, fsdp_phase phase, uint32_t flags, fsdp_stream stream);

/**
 * Make the weights of one piece of a group readable, as fsdp_unshard does for all of its pieces, and take a hold of the
 * piece. The piece alone is gathered, in a launch of its own. Holds are counted for each piece and phase. fsdp_unshard
 * holds every piece; only fsdp_reshard returns that hold. A piece that is gathered already is not gathered again,
 * neither by this call nor by fsdp_unshard. If visits name the group's pieces (fsdp_visit.piece), each piece has a
 * buffer that is planned for its own visits, and the weights of the next visits are gathered ahead. If not, the group
 * has one buffer, which the first hold takes and the return of the last hold gives up. Gradients belong to the whole
 * group. fsdp_get_param needs a hold of the parameter's piece. flags must be 0.
 * Collective: no; on a CUDA device the shard axis, where the comparison of the ranks' calls includes the number of the
 * piece. Blocks: as fsdp_unshard. Window: outside.
 * Errors: as fsdp_unshard; INVALID_ARGUMENT (the group has no such piece). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_unshard_piece(fsdp_group *group, uint32_t piece, fsdp_phase phase,
                                                    uint32_t flags, fsdp_stream stream);

/**
 * Return a hold of fsdp_unshard_piece, as fsdp_reshard does for the whole group. flags must be 0.
 * Collective: no; on a CUDA device the shard axis. Blocks: no. Errors: INVALID_ARGUMENT (no such piece), INVALID_STATE
 * (no such hold; a hold of fsdp_unshard is returned by fsdp_reshard). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_reshard_piece(fsdp_group *group, uint32_t piece, fsdp_phase phase,
                                                    uint32_t flags, fsdp_stream stream);

/**
 * Show the true weights of a group again after a write through its views. Every publish and fsdp_discard_step do this
 * for all groups. Weights that are mapped, or that the strategy keeps whole, need FSDP_VIEWS_PRIVATE: the written pages
 * show the compute weights again, whether the group is held or not. Copied weights, with either view_kind, are gathered
 * again at the next unshard, so the group must have no hold. (A model on one rank copies nothing, unless
 * FSDP_MODEL_FORCE_COMMUNICATION or FSDP_CONTEXT_DEBUG is set.)
 * Collective: no; for copied weights on a CUDA device the shard axis, because the next unshard gathers there. Blocks:
 * local work. Window: either. Memory: the copies of written pages are freed.
 * Errors: INVALID_STATE (copied weights that are held; other weights with FSDP_VIEWS_READ_ONLY), SYSTEM. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_restore_view(fsdp_group *group);

/* ---- gradient ------------------------------------------------------------------------------------------------ */

enum {
  FSDP_GRAD_ZEROED = 1u << 17, /* for callers that only add: where *accumulate would be 0, the gradient is cleared and
                                  *accumulate is 1 */
  FSDP_GRAD_NO_WAIT = 1u << 10 /* where the call would wait for peers to read a buffer (on one rank: for its own
                                  reduce), it returns BUSY and changes nothing; fsdp_acquire_grads returns BUSY if it
                                  would wait for any of the gradients. Try again later, or without this flag. The flag
                                  has no effect on a CUDA device, where the stream waits instead. With
                                  FSDP_CONTEXT_NO_OVERLAP fsdp_reduce_grad itself waits for peers */
};

/**
 * Borrow the full gradient of a parameter to write into, in grad_dtype. If *accumulate is 0, overwrite all of it; if it
 * is 1, add to it. With FSDP_GRAD_ZEROED it is always 1, and accumulate may be NULL. A second call before
 * fsdp_reduce_grad (for a tied or twice-used parameter) sets *accumulate to 1 and orders the second stream after the
 * first. The view ends with fsdp_complete_grad for the parameter, or else with fsdp_reduce_grad.
 * Collective: no. Blocks: peers on the host device, if the reduce of another part must end first, to free a buffer.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (frozen; completed; reduced with LAST; no buffer free, naming both groups),
 * BUSY (FSDP_GRAD_NO_WAIT). If the call waits for a reduce, also the errors of that reduce: MISMATCH, PEER_FAILED,
 * TIMEOUT.
 * Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_acquire_grad(fsdp_group *group, uint64_t param_index, uint32_t flags,
                                                   fsdp_stream stream, fsdp_tensor *grad, int32_t *accumulate);

/**
 * Borrow the full gradients of all trainable parameters of a group at once, each as by fsdp_acquire_grad. grads is an
 * array of grad_count elements, the group's number of parameters. accumulate is an array of the same length; with
 * FSDP_GRAD_ZEROED it may be NULL. A parameter that is FROZEN or not trained now (fsdp_set_param_trainable) has data
 * NULL and accumulate 0. struct_size is set as in fsdp_get_params.
 * Collective: no. Blocks: as fsdp_acquire_grad. Errors: as fsdp_acquire_grad, and
 * INVALID_STATE if max_pending_bytes has no room for all gradients at once. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_acquire_grads(fsdp_group *group, uint32_t flags, fsdp_stream stream,
                                                 fsdp_tensor *grads, uint64_t grad_count, uint64_t grad_stride,
                                                 int32_t *accumulate);

/**
 * Hand in the caller's own full gradient: element_count elements of dtype. They are copied, or added where
 * fsdp_acquire_grad would set *accumulate to 1. On the host device this is done when the call returns, on a GPU it is
 * done in stream order. data NULL means "no gradient": it counts as zeros (but see fsdp_missing_grad). flags:
 * FSDP_GRAD_NO_WAIT.
 * Collective: no. Blocks: as fsdp_acquire_grad. Errors: as fsdp_acquire_grad. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_put_grad(fsdp_group *group, uint64_t param_index, const void *data,
                                                 fsdp_dtype dtype, uint64_t element_count, uint32_t flags,
                                                 fsdp_stream stream);

/**
 * Declare a parameter's gradient of this contribution complete. Until fsdp_reduce_grad the caller must not write into
 * it or put it again. A group may be reduced in parts (max_pending_bytes). The library begins to reduce a part, or an
 * undivided group, as soon as all of its trainable parameters are complete. Once a part is reduced, its buffer can be
 * lent for other gradients while the rest of the group is written. fsdp_reduce_grad must still be called: it ends the
 * contribution.
 * Complete parameters from the last to the first, in the order of a backward pass. Ranks may complete the parameters of
 * a part in different orders, but they must reduce parts in the same order. A rank may leave parts to fsdp_reduce_grad,
 * which reduces them from the last to the first. With FSDP_REDUCE_POLICY_LAST nothing is reduced before
 * fsdp_reduce_grad. `stream` orders no work: the reduce waits for the streams that were given to fsdp_acquire_grad or
 * fsdp_put_grad. flags must be 0.
 * Collective: the mesh. Blocks: no. Window: outside. Errors: INVALID_ARGUMENT, INVALID_STATE (frozen; no gradient yet;
 * completed already; reduced with FSDP_LAST), MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_complete_grad(fsdp_group *group, uint64_t param_index, uint32_t flags,
                                                    fsdp_stream stream);

enum {
  FSDP_LAST = 1u << 18 /* the last contribution of this step */
};

/**
 * End one contribution (micro-batch) of a group: its gradients are complete. The call reduces into the main grads what
 * fsdp_complete_grad has not reduced. Every trainable parameter must have been acquired or put. With
 * FSDP_REDUCE_POLICY_LAST only the call with FSDP_LAST communicates. The buffer is free for other groups or parts
 * once its reduce has ended; a call that needs it sooner waits.
 * Collective: the mesh. Blocks: no. Window: outside.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (a parameter without gradient, named; LAST twice), MISMATCH, PEER_FAILED,
 * TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_reduce_grad(fsdp_group *group, uint32_t flags, fsdp_stream stream);

/**
 * End the step's gradients. The call checks that every trainable group was reduced with LAST and that no hold of any
 * phase is left. It waits for all reduces, multiplies main grads by scale (1 leaves them as they are), and opens the
 * update window once every rank has made this call. If anything is missing on any rank, every rank's error lists it.
 * With the flag FSDP_LAST, on all ranks, groups need not have been reduced with LAST: this call ends the contributions
 * of each such group, in reverse declared order, with the same bits. A group without a contribution is reduced as
 * zeros, as if each parameter had been put NULL. Groups that were reduced with LAST stay as they are.
 * After a failure that leaves the context alive, go on with fsdp_discard_step on every rank. Until then getters,
 * traces, fsdp_reshard of held groups and destroy calls are still legal; fsdp_close_context and every other call of the
 * step return INVALID_STATE.
 * Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since
 * 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_finish_grads(fsdp_model *model, double scale, uint32_t flags,
                                                 fsdp_stream stream);

/**
 * Copy a whole main gradient out, converted to dtype: the reduced and scaled gradient of the step, as the optimizer
 * will see it. Otherwise the call works as fsdp_read_param. Collective: the group's mesh (root is one of its ranks).
 * Blocks: peers. Window: inside, with gradients. Errors: as fsdp_read_param, and INVALID_STATE (FROZEN; no gradients in
 * this window). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_read_grad(fsdp_group *group, uint64_t param_index, void *data, fsdp_dtype dtype,
                                                uint64_t element_count, int32_t root, uint32_t flags);

/**
 * Replace a main gradient by full data, as fsdp_load_param replaces weights, for example after a transformation of the
 * whole gradient. Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window:
 * inside, with gradients. Errors: as fsdp_load_param, and INVALID_STATE (FROZEN or not trained; no gradients in this
 * window). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_grad(fsdp_group *group, uint64_t param_index, const void *data,
                                                fsdp_dtype dtype, uint64_t element_count, int32_t root,
                                                uint32_t flags);

/* ---- optimizer ----------------------------------------------------------------------------------------------- */

/** The part of one parameter that this rank owns. A FROZEN parameter has no shard, and neither has a parameter of which
 *  this rank owns nothing. */
typedef struct fsdp_shard {
  uint64_t struct_size;
  fsdp_group *group;
  uint64_t param_index;
  const char *name;
  void *main_weight;        /* element_count elements; writable in the update window only. NULL with
                               FSDP_MAIN_SPLIT16, or at home in a file */
  void *main_grad;          /* element_count elements; complete in the update window. NULL at home in a file */
  fsdp_dtype main_weight_dtype; /* FSDP_FLOAT32; FSDP_BFLOAT16 with FSDP_MAIN_NONE; 0 with FSDP_MAIN_SPLIT16 */
  fsdp_dtype main_grad_dtype;   /* FSDP_FLOAT32 */
  uint64_t element_offset;  /* offset of the first element in the parameter */
  uint64_t element_count;   /* never 0 */
  uint64_t row_offset;      /* rows as fsdp_param.row_dimensions makes them */
  uint64_t row_count;
  double lr_scale;          /* the current value, at the time of this call */
  uint32_t flags;           /* FSDP_PARAM_*, the current value. FSDP_PARAM_FROZEN means here that this step must
                               leave weights and states unchanged, because of fsdp_set_param_trainable or
                               FSDP_MISSING_GRAD_SKIP */
  uint32_t state_count;     /* number of optimizer states that the parameter has: AdamW's two first, then one for each
                               call of fsdp_add_optimizer_state, in call order (see fsdp_param.optimizer) */
} fsdp_shard;
#define FSDP_SHARD_INIT {sizeof(fsdp_shard), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/** Get the number of shards that this rank owns. It is fixed from the seal on. Collective: no. Errors: INVALID_STATE
 *  (not sealed, or only planned). Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_shard_count(const fsdp_model *model, uint64_t *shard_count);
/**
 * Get one of this rank's shards, in declaration order. Addresses are fixed from the seal on; lr_scale and flags are the
 * current values, at the time of this call. What is at home in a file has no address here: fsdp_next_shard_chunk gives
 * it to the caller's optimizer, and other parameters are read and loaded by calls.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_shard(const fsdp_model *model, uint64_t shard_index, fsdp_shard *shard);
/**
 * Get the address of a named optimizer state of a shard: element_count elements of the state's dtype. A state that
 * FSDP_OPTIMIZER_ADAMW_8BIT keeps in codes has the dtype FSDP_UINT8; its scales are the state "exp_avg.absmax" or
 * "exp_avg_sq.absmax", one FSDP_FLOAT32 for each 256 elements of the shard. data is NULL if the state is at home in a
 * file.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE (not sealed, or
 * only planned). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_shard_state(const fsdp_model *model, uint64_t shard_index, const char *name,
                                                      fsdp_tensor *state);
/**
 * Bring the next chunk of what is at home in a file to memory, for the caller's own optimizer. A chunk is a part of one
 * shard of a parameter with FSDP_OPTIMIZER_CALLER that has main weights, main gradients or a state in the file, and
 * that this step does not leave unchanged. *chunk has the fields of fsdp_get_shard, for the chunk alone: addresses and
 * element_count are those of the chunk. element_offset is the number of its first element in the parameter; row_offset
 * and row_count are the rows of which it has elements. Until the next call, a plane in the file has an address in
 * memory of the host that kernels of the device can use, too; any other plane has its own address. A chunk has at most
 * as many elements as one segment of turn_bytes. fsdp_get_shard_chunk_state gives its states. A shard with nothing in
 * the file has no chunks. The order of chunks is not defined. What the caller writes into main_grad is lost. In a
 * window without gradients the numbers there are old ones.
 * The caller works on the chunk on this stream. The next call writes its main weights and states to the file, after all
 * work that was enqueued on the stream before that call. element_count is 0 when all chunks were given and are written.
 * From the first chunk until then fsdp_publish_weights, fsdp_step_adamw and all calls that read or load main weights,
 * main gradients or states are refused. Another call afterwards begins a new pass. Once a chunk was given, its step can
 * no longer be discarded, because main weights may have been written: end the pass, and publish.
 * Collective: no. Blocks: for the disk. Window: inside.
 * Errors: INVALID_STATE (not in the window, in a capture, or while matrices are collected), SYSTEM (the disk; the
 * context then fails). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_next_shard_chunk(fsdp_model *model, fsdp_stream stream, fsdp_shard *chunk);
/**
 * Get the address of a named optimizer state of the chunk that fsdp_next_shard_chunk gave last, as fsdp_get_shard_state
 * does for a shard: as many elements of the state as the chunk has.
 * Collective: no. Blocks: no. Window: inside. Errors: INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE
 * (no chunk is given). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_shard_chunk_state(fsdp_model *model, const char *name, fsdp_tensor *state);

/**
 * Get the L2 norm of all main grads of the model, the same double on every rank: fp64 partial sums, added in a fixed
 * order; padding and copies are not counted. With mesh NULL it is the norm of this model alone. With a mesh it is the
 * norm over several models that are parts of one network (pipeline stages, tensor parallel parts). Each rank of the
 * mesh contributes the norm of its own model, and the squares are added in the mesh's order. No two ranks of the mesh
 * may be ranks of the same model. norm may be NULL, on all ranks or on some; fsdp_get_last_norm returns the norm later.
 * If norm is NULL and no mesh is given, the call waits for no GPU: the ranks synchronize on the host to compare what
 * they ask for, and the norm is computed in stream order. On the host device the calling thread takes the place of the
 * stream.
 * Collective: the model's mesh, and the mesh given. Blocks: peers; also the stream, if norm is not NULL or with a mesh.
 * Window: inside.
 * Errors: INVALID_ARGUMENT, INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_grad_norm(fsdp_model *model, const fsdp_mesh *mesh, fsdp_stream stream,
                                                 double *norm);
/**
 * Get the norm that the last fsdp_get_grad_norm, fsdp_clip_grads or fsdp_apply_grads of the model measured, before
 * clipping; a call in a graph counts when the graph is replayed. Collective: no. Blocks: until the norm is known on
 * this rank. Errors: INVALID_STATE (no norm was measured yet), PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_last_norm(const fsdp_model *model, double *norm);
/**
 * Get the L2 norm of each parameter's main grad, group by group in declaration order. norm_count must be the number of
 * parameters of the model. Frozen parameters give 0. Where meshes of a group have different parameters, each rank gets
 * the norms of those that it declares. Collective: the mesh. Blocks: peers. Window: inside. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_param_grad_norms(fsdp_model *model, fsdp_stream stream, double *norms,
                                                           uint64_t norm_count);
/**
 * Get the L2 norm of each parameter's main weights, group by group in declaration order, the same double on every rank
 * that declares the parameter. The fp64 sums have the order of fsdp_get_param_grad_norms; padding is not counted, and
 * an element that several ranks keep is counted once. Main weights of FSDP_MAIN_SPLIT16 count as fp32 numbers, and
 * those of FSDP_MAIN_NONE as bfloat16 numbers. A FROZEN parameter has no main weights, so its compute weights are
 * measured. If it is quantized or of FSDP_UINT8, it has no numbers to measure, and its norm is NaN. norm_count must be
 * the number of parameters of the model. Inside the window, the weights are those that loads, edits and earlier work of
 * the window have left.
 * Collective: the mesh. Blocks: peers, and the stream. Window: either. Errors: INVALID_ARGUMENT (norm_count),
 * INVALID_STATE (not sealed, or only planned; a step has failed and was not discarded; a capture is under way),
 * MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_param_weight_norms(fsdp_model *model, fsdp_stream stream, double *norms,
                                                             uint64_t norm_count);
/**
 * Count the elements of the main grads that are exactly +0 or -0, over the whole model: each element once, whichever
 * ranks keep it, and no padding. It reads the gradients as fsdp_finish_grads and later scaling have left them.
 * *zero_count is the same on every rank. Parameters that the step leaves unchanged are not counted: those that are
 * FROZEN or not trained now, and, with FSDP_MISSING_GRAD_SKIP, those to which no rank has given a gradient. With
 * FSDP_MISSING_GRAD_ZEROS all elements of a missing gradient count.
 * Collective: the mesh. Blocks: peers, and the stream. Window: inside, with gradients. Errors: INVALID_ARGUMENT,
 * INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_count_zero_grads(fsdp_model *model, fsdp_stream stream, uint64_t *zero_count);
/**
 * Multiply this rank's main grads. Every rank must give the same factors in the same order: the next norm, clip or end
 * of the step compares them (MISMATCH). Collective: no, but make the same calls on every rank. Blocks: local work.
 * Window: inside. Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_scale_grads(fsdp_model *model, double factor, fsdp_stream stream);
/**
 * Scale all main grads by max_norm / norm if norm > max_norm. If the norm is not finite, the call leaves the gradients
 * alone and returns OK, so test the norm. mesh and a norm of NULL work as in fsdp_get_grad_norm. Work that follows on
 * the stream uses the scaled gradients.
 * Collective: the model's mesh, and the mesh given. Blocks: as fsdp_get_grad_norm. Window: inside.
 * Errors: INVALID_ARGUMENT (max_norm <= 0), INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. All ranks of both meshes get
 * MISMATCH if a rank gave another max_norm or asked only for the norm. Nothing was scaled then, and all ranks can clip
 * again. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_clip_grads(fsdp_model *model, const fsdp_mesh *mesh, double max_norm,
                                                 fsdp_stream stream, double *norm);
/**
 * Look for Inf and NaN in the main grads of all ranks. *found is 0 or 1, the same on every rank. *name is set to the
 * name of the first parameter that has some, or to NULL; name may be NULL. If meshes of a group have different names
 * for the parameter, the name is that of the first rank where such a number was found. Collective: the mesh. Blocks:
 * peers.
 * Window: inside. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_check_grads(fsdp_model *model, fsdp_stream stream, int32_t *found,
                                                  const char **name);

enum {
  FSDP_ADAMW_BETA1_ZERO = 1u << 19,  /* beta1 is 0: no first moment */
  FSDP_ADAMW_BETA2_ZERO = 1u << 20,  /* beta2 is 0: the second moment is the square of the last gradient */
  FSDP_ADAMW_EPSILON_ZERO = 1u << 21 /* epsilon is 0; an element whose second moment is 0 then gives NaN */
};

typedef struct fsdp_adamw_options {
  uint64_t struct_size;
  double beta1;        /* 0: 0.9 (see FSDP_ADAMW_BETA1_ZERO) */
  double beta2;        /* 0: 0.999 (see FSDP_ADAMW_BETA2_ZERO) */
  double epsilon;      /* 0: 1e-8 (see FSDP_ADAMW_EPSILON_ZERO) */
  double weight_decay; /* 0: none */
  uint64_t step;       /* the number of this step, from 1; 0: one more than the last step's number */
  uint32_t flags;      /* FSDP_ADAMW_* */
  uint32_t reserved;   /* must be 0 */
} fsdp_adamw_options;
#define FSDP_ADAMW_OPTIONS_INIT {sizeof(fsdp_adamw_options), 0, 0, 0, 0, 0, 0, 0}

/**
 * Take one step of AdamW (Loshchilov and Hutter 2019, decoupled weight decay) in fp32 on this rank's shards, then
 * publish.
 *   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g g;  w = w - lr s wd w - lr s (m / c1) / (sqrt(v / c2) +
 *   eps)
 * Here s is the parameter's lr_scale, and c = 1 - beta^step is computed in double and rounded to fp32.
 * The step does not change the main weights and states of a parameter with fsdp_param.optimizer FSDP_OPTIMIZER_CALLER.
 * The caller has updated them in the window, and this call publishes them with the others, as fsdp_publish_weights
 * does.
 * Collective: the mesh. Window: closes it.
 * Blocks: peers. The ranks agree to step before any weight is changed. So if a rank discards the step instead, this
 * call fails, and all ranks can still discard. Errors: INVALID_STATE, INVALID_ARGUMENT, MISMATCH (another lr, beta,
 * epsilon, weight_decay, step, lr_scale, or scaling of the gradients, which includes the norm that was clipped). Since
 * 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_step_adamw(fsdp_model *model, double lr, const fsdp_adamw_options *options,
                                                 fsdp_stream stream);

/**
 * Round fp32 numbers to bfloat16 stochastically, for an optimizer of the caller's own on a parameter with
 * FSDP_MAIN_NONE. A number between two bfloat16 numbers is rounded to the one of greater magnitude with a probability
 * proportional to its distance from the other. A number that bfloat16 has exactly does not change, and no finite number
 * becomes Inf. element_offset is the number of the first element in the parameter, as in fsdp_shard. from has count
 * fp32 numbers, and to has room for count bfloat16 numbers. Both are in the device's memory and must not overlap. The
 * random bits are those that fsdp_step_adamw would use in the step with this number: they depend only on the model's
 * rounding_seed, the parameter's name, the element and the step.
 * Collective: no. Blocks: local work on the host device, no on a GPU. Window: inside. Stream: the rounding is done in
 * stream order. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed, or only planned; window closed; a capture is
 * under way; the parameter's main storage is not FSDP_MAIN_NONE). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_round_stochastic(fsdp_group *group, uint64_t param_index,
                                                       uint64_t element_offset, const float *from, void *to,
                                                       uint64_t count, uint64_t step, fsdp_stream stream);

/* ---- whole matrices -------------------------------------------------------------------------------------------- */

/** One or more whole matrices of equal size that this rank owns: rows of a parameter with fsdp_param.matrix.
 *  Output only: set struct_size before the call. */
typedef struct fsdp_matrix {
  uint64_t struct_size;
  fsdp_group *group;
  const char *name;        /* name of the parameter */
  uint64_t param_index;
  uint64_t batch_index;    /* index of the first matrix, if the dimensions before the last two are taken as one */
  uint64_t split_index;    /* index in matrix_splits */
  uint64_t row_offset;     /* first row of the split */
  uint64_t rows;
  uint64_t columns;
  uint64_t count;          /* number of matrices: those of batch_index, batch_index + 1 and so on */
  uint64_t stride_bytes;   /* bytes from one matrix to the next */
  void *data;              /* rows x columns numbers in C order; to be changed in place. NULL: there are no more */
  fsdp_dtype dtype;        /* of data */
  uint32_t reserved;
} fsdp_matrix;
#define FSDP_MATRIX_INIT {sizeof(fsdp_matrix), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

typedef struct fsdp_matrix_options {
  uint64_t struct_size;
  const char *source;      /* what is collected: NULL for the main grads, "main_weight", or the name of a state */
  const char *target;      /* where returned matrices are written, named like source; NULL: to the source */
  fsdp_dtype dtype;        /* of the matrices, and of messages between ranks; 0: FSDP_FLOAT32 */
  uint32_t reserved;       /* must be 0 */
} fsdp_matrix_options;
#define FSDP_MATRIX_OPTIONS_INIT {sizeof(fsdp_matrix_options), 0, 0, 0, 0}

/**
 * Begin to bring each matrix of the model whole to one rank, its owner, for an optimizer that needs whole matrices,
 * such as Muon. Inside the update window, call this, then fsdp_next_matrix until there are no more, and then
 * fsdp_return_matrices: the rows then go back to the ranks that hold them. What is done to a matrix is done once, by
 * one rank, on the whole matrix. So the result does not depend on how many ranks there are.
 * Owners are chosen at the seal, so that each rank has about the same work (fsdp_get_matrix_plan). Ranks that hold the
 * same rows, such as HSDP replicas and the ranks of a group with FSDP_STRATEGY_NO_SHARD, each get the matrices and do
 * the same work. Matrices travel in waves of at most matrix_bytes for each owner, and while the caller works on one
 * wave, the next one travels. Matrices of parameters that this step leaves as they are (fsdp_shard.flags) do not
 * travel. If a state is source or target, all parameters with matrices must have it.
 * Until fsdp_return_matrices make no other collective call of any model of the context: ranks are at different
 * matrices, and would wait for each other. fsdp_discard_step is legal if the target is the main grads. With another
 * target it is illegal until fsdp_return_matrices, and with the target "main_weight" until the next publish. If ranks
 * make different calls in that time, the context fails.
 * Collective: the mesh. Blocks: peers. Window: inside; if the source or the target is the main grads, the window must
 * have gradients. Stream: the source is read in stream order.
 * Errors: INVALID_ARGUMENT (no such state, a state in codes, main weights in two halves), INVALID_STATE (no parameter
 * has matrices; matrices are collected already; a capture is under way), MISMATCH (ranks gave other options),
 * PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_collect_matrices(fsdp_model *model, const fsdp_matrix_options *options,
                                                       fsdp_stream stream);
/**
 * Get the next matrices of this rank, in an order that the plan has fixed; data is NULL when there are no more. The
 * caller may change them in place, on this stream. The call gives back the matrices of the previous call, so enqueue
 * all work on them first.
 * Collective: no. Blocks: on the host device until the matrices are there; on a GPU no. Window: inside.
 * Errors: INVALID_STATE (nothing is collected; a capture is under way; on the host device also: another rank has
 * discarded the step), PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_next_matrix(fsdp_model *model, fsdp_stream stream, fsdp_matrix *matrix);
/**
 * Bring all rows back, to the target of fsdp_collect_matrices. Work that follows on the stream finds them there. The
 * ranks synchronize in this call, so it fails on all of them if one discards the step.
 * Collective: the mesh. Blocks: peers. Window: inside.
 * Errors: INVALID_STATE (nothing is collected; this rank has matrices that fsdp_next_matrix has not given; a
 * capture is under way; another rank has discarded the step), PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_return_matrices(fsdp_model *model, fsdp_stream stream);
/**
 * Describe the matrices of a sealed model as JSON: owners, the cost of each rank's matrices, waves and bytes. Waves and
 * bytes are those of the meshes to which this rank belongs. An owner is given as a rank of the job: that of the first
 * replica, since each replica has owners of its own. It is null if every rank has a copy. The cost of a matrix is
 * min(rows, columns)^2 * max(rows, columns). wire_bytes is what travels one way in fp32, in one replica. buffer and
 * size_bytes work as in fsdp_describe_model.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_matrix_plan(const fsdp_model *model, char *buffer, uint64_t *size_bytes);

/**
 * Publish the main weights: cast them to compute weights, raise the version, close the update window. Weights that the
 * strategy keeps whole are refreshed before the call returns. If the scales of a quantized parameter show that its main
 * weights have Inf or NaN, the rank that has them logs one FSDP_LOG_WARNING for each such parameter and version. On the
 * host device this call logs the line. On a GPU the first later call of this context that finds the publish finished
 * logs it. There is no line for a version that a CUDA graph published, nor for one that was published while the check
 * of an earlier version was still running.
 * Collective: the mesh. Blocks: peers.
 * Window: closes it. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. MISMATCH: a rank made a different call, or
 * a setting that must be equal on all ranks differs. After the first publish MISMATCH is fatal on all ranks, because
 * main weights may have been written already. Before it, make the settings equal and publish again. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_publish_weights(fsdp_model *model, fsdp_stream stream);

/**
 * Open the update window outside a training step, to load or edit weights. No hold may be left and no gradient may be
 * pending on any rank. Otherwise all ranks get INVALID_STATE, and can go on after fsdp_discard_step.
 * Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_begin_update(fsdp_model *model, fsdp_stream stream);

/**
 * Discard this step: holds, lent and pending gradients, and everything that was reduced so far. The call is legal in
 * any state between two publishes, also after an exception in the middle of a pass. Inside the update window it closes
 * the window, and the version stays the same. So do not discard a step in whose window main weights were written. The
 * same holds if FROZEN parameters were loaded, because readers see these at once. Over NCCL, if ranks have enqueued
 * different collectives, the communicators are created again. This is impossible while a graph exists that captured the
 * old communicators, so in that case the context fails.
 * Collective: the mesh. Blocks: peers. Errors: INVALID_STATE (nothing was published yet, or matrices are collected with
 * another target than the main grads, or were returned to main weights, or a chunk of a shard was given; where only
 * some ranks are so, the others wait for them until TIMEOUT), PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_discard_step(fsdp_model *model, fsdp_stream stream);

/**
 * Compare the data that several ranks store alike, to find a replica that has drifted: a bit that flipped, or a load or
 * edit that was not the same everywhere. Main weights, optimizer states and compute weights of each parameter are
 * hashed as they are in memory, without padding. The hashes are compared among the ranks that have the same elements:
 * the replicas of a mesh, and all ranks of a mesh if each has the whole. Data that only one rank of a mesh has is not
 * compared, so equal boxes in different meshes (fsdp_create_group) are not compared with each other. MISMATCH, with the
 * same text on all ranks, names the first parameter that differs, what differs, both ranks and both hashes.
 * fsdp_error.rank is the one of the two ranks with which fewer ranks agree; if equally many agree with both, it is the
 * higher rank. The model can be used as before. The call reads the compared memory once, on a GPU through 1 MiB of host
 * memory. flags must be 0. Collective: the mesh. Blocks: peers, and the GPU.
 * Window: outside. Errors: INVALID_ARGUMENT (flags), INVALID_STATE (inside the window, or captured), MISMATCH,
 * PEER_FAILED, TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_check_replicas(fsdp_model *model, uint32_t flags, fsdp_stream stream);

/** One full gradient for fsdp_apply_grads. This struct may grow, so arrays of it come with a stride. */
typedef struct fsdp_grad {
  const void *data; /* NULL: there is no gradient; it counts as zeros (but see fsdp_missing_grad) */
  uint64_t element_count;
  fsdp_dtype dtype;
  uint32_t reserved; /* must be 0 */
} fsdp_grad;

/**
 * Take a whole step in one call, for array frameworks: full gradients in, AdamW, published weights out. grads has one
 * entry for each parameter of the model that was not declared FROZEN, group by group in declaration order. A parameter
 * that is not trained now (fsdp_set_param_trainable) must have data NULL. The bits are those of put, reduce, finish and
 * step. If max_norm > 0, the gradients are first clipped to it; 0 leaves them. *norm (norm may be NULL) is set to the
 * norm before clipping. The step is taken even if gradients are not finite; to skip such a step, use the single calls.
 * max_norm must be the same on every rank. With max_norm 0, either all ranks pass NULL for norm or none does.
 * Collective: the mesh. Blocks: peers. Window: outside; it is closed again when the call returns. Errors: as those of
 * the calls that this call replaces, and INVALID_STATE (a trained parameter has fsdp_param.optimizer
 * FSDP_OPTIMIZER_CALLER, which leaves no moment to update it). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_apply_grads(fsdp_model *model, const fsdp_grad *grads, uint64_t grad_count,
                                                 uint64_t grad_stride, double lr, double max_norm,
                                                 const fsdp_adamw_options *options, fsdp_stream stream, double *norm);

/* ---- checkpoints --------------------------------------------------------------------------------------------- */

enum {
  FSDP_SAVE_REPLACE = 1u << 24,       /* replaces a checkpoint of the same step that the folder already has, atomically
                                         once the new one is whole; without this flag such a checkpoint is
                                         INVALID_STATE */
  FSDP_SAVE_COMMIT_MANIFEST = 1u << 8 /* for mounts of object stores, which rename no folders: the checkpoint has its
                                         name from the start, and its manifest, written last, makes it a checkpoint; not
                                         with REPLACE */
};

typedef struct fsdp_save_options {
  uint64_t struct_size;
  uint64_t step;  /* the checkpoint's step, at most 2^53. 0: the number of AdamW's last step; with
                     FSDP_OPTIMIZER_CALLER the step of the loaded checkpoint plus the number of updates published since.
                     The first publish of loaded or initial weights is not such an update */
  uint32_t keep;  /* number of the folder's newest checkpoints that stay, besides the loaded one; 0: all stay */
  uint32_t flags; /* FSDP_SAVE_* */
} fsdp_save_options;
#define FSDP_SAVE_OPTIONS_INIT {sizeof(fsdp_save_options), 0, 0, 0}

/**
 * Save main weights (for frozen parameters the compute weights), optimizer states and AdamW's number of steps as a
 * checkpoint in the folder. The folder is made if it does not exist. A checkpoint is DIR/step-0000001200/ with
 * safetensors files as PyTorch's distributed checkpoint writes them, and a manifest with checksums of all files
 * (docs/guides/checkpoints.md). A checkpoint either has its name and is whole and on the disk, or it does not exist:
 * whatever fails or is killed during the save, earlier checkpoints stay as they are. With COMMIT_MANIFEST the
 * checkpoint's folder has its name from the start and is a checkpoint once its manifest is written. A save that is
 * killed before then leaves no checkpoint, and a checkpoint that loses its manifest later is damaged. A save succeeds
 * even if another checkpoint in the folder cannot be read. Main weights and states must not be written during the save.
 * Every rank must see the folder.
 *
 * The call saves the version published last, also in the middle of a step. Ranks that have the same bytes share the
 * writing, or one of them writes. A save takes 32 MiB of memory a rank while it runs, or the model's
 * save_staging_bytes. If a save is under way in the background (fsdp_commit_checkpoint), the call waits for it first.
 * Collective: the mesh. Blocks: the disk, and peers. A rank that is still writing after timeout_ms has not failed; a
 * rank whose disk takes nothing for that long has failed, with errno ETIMEDOUT. Window: outside.
 * Errors, the same on all ranks: SYSTEM, INVALID_STATE, INVALID_ARGUMENT, MISMATCH (another step, keep or flag),
 * UNSUPPORTED (REPLACE where the file system cannot exchange two names), OUT_OF_MEMORY, PEER_FAILED, TIMEOUT. SYSTEM
 * names the rank, the file, what was done and errno. Nothing of this checkpoint is left, the job can go on, and the
 * next save may succeed. INVALID_STATE: the folder has this step; another host does not see what rank 0 has made in the
 * folder; the window is open; or a capture is under way. INVALID_ARGUMENT: REPLACE with COMMIT_MANIFEST, or a parameter
 * named state.NAME.step, the name under which AdamW's number of steps for the parameter NAME is saved. fsdp_seal_model
 * already refuses other names that two tensors would share. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_save(fsdp_model *model, const char *folder, const fsdp_save_options *options);

enum {
  FSDP_LOAD_WEIGHTS_ONLY = 1u << 25,     /* states and AdamW's number of steps stay as they are */
  FSDP_LOAD_ALLOW_MISSING = 1u << 26,    /* tensors that the checkpoint lacks stay as they are; if it lacks all of the
                                            model's tensors, the load is an error without IF_ANY */
  FSDP_LOAD_ALLOW_UNEXPECTED = 1u << 27, /* tensors that the model lacks are passed over */
  FSDP_LOAD_FALLBACK = 1u << 28,         /* if a file of the newest checkpoint is damaged, missing or cannot be read,
                                            the next older checkpoint is loaded, and a WARNING in the log says so */
  FSDP_LOAD_IF_ANY = 1u << 29,           /* if the folder does not exist or has no checkpoint, nothing is loaded, so the
                                            same call serves a job that begins and a job that goes on. With
                                            ALLOW_MISSING a load that finds none of the model's tensors succeeds too */
  FSDP_LOAD_ONE_REPLICA = 1u << 9        /* M ranks that keep the same rows each read one M-th of them and exchange what
                                            they read: for networks that are faster than the disk. Rows of groups with
                                            other meshes are not exchanged: each rank reads all of its rows */
};

typedef struct fsdp_load_options {
  uint64_t struct_size;
  uint32_t flags;    /* FSDP_LOAD_* */
  uint32_t reserved; /* must be 0 */
} fsdp_load_options;
#define FSDP_LOAD_OPTIONS_INIT {sizeof(fsdp_load_options), 0, 0}

/** What a load has done. Output only: set struct_size before the call. */
typedef struct fsdp_loaded {
  uint64_t struct_size;
  uint64_t step;         /* the checkpoint's step */
  uint64_t sequence;     /* the checkpoint's number, which rises with every checkpoint of a folder */
  uint64_t wanted_bytes; /* bytes of the checkpoint's files that this rank keeps; with ONE_REPLICA its share of them */
  uint64_t read_bytes;   /* bytes that this rank has read for them: files are read and verified in blocks of 256 KiB */
  uint32_t ranks;        /* number of ranks of the job that saved the checkpoint */
  uint32_t passed_over;  /* number of damaged checkpoints that FALLBACK has passed over; each of them is, or may be,
                            newer than the loaded one. The same on every rank */
  char name[32];         /* the checkpoint's name in the folder, "step-0000001200". It is "" if FSDP_LOAD_IF_ANY has
                            loaded nothing, and always after fsdp_load_weights, which has no checkpoint; step, sequence
                            and ranks are then 0 */
  /* These fields count whole tensors; they are the same on every rank, and fsdp_describe_load has the names. */
  uint64_t loaded_tensors;     /* tensors of the model that the files have: weights and, unless WEIGHTS_ONLY, states */
  uint64_t missing_tensors;    /* tensors of the model that the files lack; with ALLOW_MISSING they stay as they were */
  uint64_t unexpected_tensors; /* tensors of the files that the model lacks, see FSDP_LOAD_ALLOW_UNEXPECTED */
} fsdp_loaded;
#define FSDP_LOADED_INIT {sizeof(fsdp_loaded), 0, 0, 0, 0, 0, 0, {0}, 0, 0, 0}

/**
 * Load the folder's newest whole checkpoint (the last one saved there, whatever its step), or the checkpoint that the
 * folder is itself. The ranks, mesh, strategy and unshard mode may differ from those of the save. Each rank reads the
 * rows that it keeps and verifies what it reads, with 8 MiB of memory. Call fsdp_publish_weights afterwards. *loaded
 * says what was loaded (loaded may be NULL). The log at INFO says how many tensors were loaded, missing and unexpected.
 *
 * If a checkpoint that is damaged or cannot be read may be the newest, the load fails and names it; with FALLBACK the
 * call loads the newest whole checkpoint instead. If such a checkpoint is certainly older than the one loaded, a
 * WARNING in the log names it.
 *
 * All or nothing: on failure no rank has loaded the checkpoint, and the window stays open. Main weights may have been
 * written in part, so another load, or the caller's own values, must come before the next publish.
 * Collective: the mesh. Blocks: the disk and peers. Window: inside; the step's gradients, if any, stay.
 * Errors, the same on all ranks: INVALID_ARGUMENT, SYSTEM, INVALID_STATE, UNSUPPORTED (written by a newer release),
 * MISMATCH (another model, other flags, or hosts that see different checkpoints), OUT_OF_MEMORY, PEER_FAILED, TIMEOUT.
 * INVALID_ARGUMENT: no checkpoint in the folder; none of the model's tensors, without IF_ANY; or a damaged file, with
 * the range of bytes and the tensors. The message also lists all tensors that are missing, unexpected, of another
 * shape, or of a dtype that cannot be converted to the parameter's. SYSTEM names the rank, the file, what was done and
 * errno: ENOENT for a folder that does not exist. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load(fsdp_model *model, const char *folder, const fsdp_load_options *options,
                                          fsdp_loaded *loaded);

enum {
  FSDP_RENAME_TRANSPOSED = 1u << 30 /* theirs is a matrix whose columns are the rows of ours, as in GPT-2's Conv1D */
};

/** Which rows of a tensor in another program's files become which rows of a parameter. "theirs" is the tensor in the
 *  files, "ours" the parameter of the model. This struct may grow, so arrays of it come with a stride. */
typedef struct fsdp_rename {
  const char *theirs; /* the tensor's name in the files; one '*' in it stands for any text */
  const char *ours;   /* the parameter's name; a '*' in it stands for the same text */
  uint64_t from_row;  /* the first row of theirs, counted after it was transposed */
  uint64_t to_row;    /* the row of ours that from_row becomes */
  uint64_t row_count; /* 0: all rows of theirs from from_row on */
  uint32_t flags;     /* FSDP_RENAME_* */
  uint32_t reserved;  /* must be 0 */
} fsdp_rename;

/**
 * Load only weights, from safetensors files of any library. path is such a file, or a folder of such files, with
 * Hugging Face's index (model.safetensors.index.json) or without it, also as PyTorch's distributed checkpoint writes
 * them. It may also be a checkpoint of libfsdp or a folder of these. Links are followed (Hugging Face's cache is made
 * of them), but not in checkpoints of libfsdp. An index may name files in folders below it. Tensors in the files have
 * the names of the model's parameters, unless renames say otherwise. A tensor that several renames match goes to all of
 * their parameters: a fused tensor to its parts, a shared tensor to both of its names. If separate tensors of the files
 * are fused in the model, each has a rename with a to_row of its own. Every row of a parameter must come exactly once.
 *
 * F64, F32, F16 and BF16 are converted to what the model keeps, rounded to nearest even. The planes of a FROZEN
 * quantized parameter w are tensors of their own: w.row and w.row_scale, with MXFP8 also w.column and w.column_scale
 * (F8_E4M3 codes, F32 or F8_E8M0 scales). Bytes are U8. Planes and bytes are taken bit for bit. Each rank reads what it
 * keeps, in blocks of 256 KiB; a transposed matrix takes memory for this rank's part of it during the call. Files of
 * libfsdp are verified; other files have no checksums. States and AdamW's number of steps stay as they are. Flags:
 * ALLOW_MISSING, ALLOW_UNEXPECTED and IF_ANY. Files that have none of the model's tensors need IF_ANY and
 * ALLOW_MISSING; a path that does not exist is an error also with IF_ANY. renames may be NULL. *loaded has the numbers
 * of bytes and tensors; loaded may be NULL. A tensor whose dtype this release does not know is refused if the model has
 * a parameter of its name.
 *
 * All or nothing, as fsdp_load. Collective: the mesh; the same renames and flags on every rank. Blocks: the disk and
 * peers. Window: inside. Errors: as fsdp_load; INVALID_ARGUMENT also lists rows that come twice or not at all, and
 * shapes that do not fit. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_weights(fsdp_model *model, const char *path, const fsdp_rename *renames,
                                                  uint64_t rename_count, uint64_t rename_stride,
                                                  const fsdp_load_options *options, fsdp_loaded *loaded);

/**
 * Describe the model's last successful load as JSON. "call" is the function that loaded; "name" and "step" are the
 * checkpoint's ("" and 0 after fsdp_load_weights). "loaded", "missing" and "unexpected" list the names of the tensors
 * that fsdp_loaded counts. buffer and size_bytes work as in fsdp_describe_model.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE (nothing has been
 * loaded, or the model is not sealed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_describe_load(const fsdp_model *model, char *buffer, uint64_t *size_bytes);

/* ---- checkpoints in the background, of several models ---------------------------------------------------------- */

/**
 * A checkpoint that is being saved while training goes on, or one that was opened to be read:
 *
 *   save  fsdp_begin_checkpoint, fsdp_add_checkpoint_model .., fsdp_add_checkpoint_bytes .., fsdp_commit_checkpoint;
 *         then train on; fsdp_get_checkpoint_status, fsdp_wait_checkpoint
 *   load  fsdp_open_checkpoint, fsdp_load_checkpoint_model .., fsdp_read_checkpoint_bytes ..
 *
 * Give it back with fsdp_destroy_checkpoint.
 */
typedef struct fsdp_checkpoint fsdp_checkpoint;

typedef int32_t fsdp_bytes_owner;
enum {
  FSDP_BYTES_ONCE = 1,    /* rank 0's bytes are saved, and every rank reads them */
  FSDP_BYTES_PER_RANK = 2 /* each rank's own bytes are saved, for example its random generator; the rank of the same
                             number reads them */
};

/**
 * Begin a checkpoint for the folder; nothing is written yet. The options are those of fsdp_save. With step 0 the step
 * is the highest step of the rank's models, so if the models of different ranks are at different steps, give a step.
 * Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_HANDLE. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_begin_checkpoint(fsdp_context *context, const char *folder,
                                                       const fsdp_save_options *options, fsdp_checkpoint **checkpoint);

/**
 * Add a sealed model of the context to the checkpoint, with the data that it will have at the commit. The model is
 * loaded by name (NULL: ""). Ranks may add different models: those of one pipeline stage, or of one group of experts.
 * Models of different ranks with the same name are parts of one model. Names of tensors are unique over all models.
 * Collective: no. Blocks: no. Memory: the model stays until the save has ended, also if its handle is destroyed.
 * Errors: INVALID_ARGUMENT (the checkpoint has this name or model), INVALID_STATE (not sealed; committed),
 * INVALID_HANDLE. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_add_checkpoint_model(fsdp_checkpoint *checkpoint, const char *name,
                                                           fsdp_model *model);

/**
 * Add bytes of the caller's own to the checkpoint, for example the state of a random generator or the position in the
 * data. The bytes are copied at once. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (no name, or a name that the
 * checkpoint has), INVALID_STATE (committed), OUT_OF_MEMORY. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_add_checkpoint_bytes(fsdp_checkpoint *checkpoint, const char *name,
                                                           const void *data, uint64_t size_bytes,
                                                           fsdp_bytes_owner owner);

/**
 * Save the checkpoint while training goes on. The call returns when the ranks have agreed and all see the folder. It
 * saves the versions published last. Threads of the library copy main weights and states and write them. If they have
 * not copied everything when fsdp_finish_grads, fsdp_begin_update or fsdp_prepare_replay is called for the model, that
 * call waits for the rest (fsdp_stats.checkpoint_stall_ns). The checkpoint gets its name as soon as all ranks have
 * written, whatever calls the ranks are in then, and even if a rank has died since. Only one save is under way at a
 * time: the next commit waits for it.
 * Collective: the world. Blocks: peers, and an earlier save. Window: outside, for all its models.
 * Errors, the same on all ranks: as fsdp_save, except errors of the disk, which fsdp_wait_checkpoint returns;
 * INVALID_STATE (nothing is in the checkpoint, or it was committed before), INVALID_ARGUMENT (a tensor's name is not
 * unique). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_commit_checkpoint(fsdp_checkpoint *checkpoint);

typedef int32_t fsdp_checkpoint_state;
enum {
  FSDP_CHECKPOINT_OPEN = 1,      /* not committed: models and bytes may be added */
  FSDP_CHECKPOINT_COPYING = 2,   /* the data to save is being copied */
  FSDP_CHECKPOINT_WRITING = 3,   /* everything is copied and is being written to the disk */
  FSDP_CHECKPOINT_COMMITTED = 4, /* the checkpoint has its name, whatever happens now */
  FSDP_CHECKPOINT_FAILED = 5,    /* there is no checkpoint; fsdp_wait_checkpoint says why */
  FSDP_CHECKPOINT_OPENED = 6     /* opened by fsdp_open_checkpoint */
};

/** The progress of a checkpoint. Output only: set struct_size before the call. */
typedef struct fsdp_checkpoint_status {
  uint64_t struct_size;
  fsdp_checkpoint_state state;
  fsdp_status status;    /* if FAILED: the status that fsdp_wait_checkpoint returns */
  uint64_t bytes;        /* bytes of its files that this rank has written */
  uint64_t bytes_in_all; /* bytes of its files that this rank will have written; if OPENED: bytes of all its files */
  uint64_t step;         /* the checkpoint's step, once it is known */
  uint32_t ranks;        /* if OPENED: number of ranks that have saved it */
  uint32_t reserved;     /* 0 */
  char name[32];         /* the checkpoint's name in the folder, "step-0000001200"; "" if it is not committed */
} fsdp_checkpoint_status;
#define FSDP_CHECKPOINT_STATUS_INIT {sizeof(fsdp_checkpoint_status), 0, 0, 0, 0, 0, 0, 0, {0}}

/** Get the progress of a checkpoint. Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT,
 *  INVALID_HANDLE. Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_get_checkpoint_status(const fsdp_checkpoint *checkpoint,
                                                            fsdp_checkpoint_status *status);

/**
 * Wait until the checkpoint is saved or is known to have failed. The call may be repeated. Collective: no. Blocks: the
 * disk, and peers' disks. Errors, the same on all ranks, after which the job can go on: SYSTEM, INVALID_STATE (not
 * committed), UNSUPPORTED, OUT_OF_MEMORY, INTERRUPTED (ends only this wait, which may be repeated), PEER_FAILED. SYSTEM
 * names the rank, the file, what was done and errno, and nothing of this checkpoint is left. If rank 0 died as it gave
 * the checkpoint its name, it is not known whether the checkpoint has its name. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_wait_checkpoint(fsdp_checkpoint *checkpoint);

/**
 * Open the folder's newest checkpoint, or the checkpoint that the folder is, for the calls below. Collective: the
 * world. Blocks: the disk and peers. Errors, the same on all ranks: INVALID_ARGUMENT (there is no checkpoint, or a
 * damaged one may be the newest), SYSTEM, UNSUPPORTED (written by a newer release), MISMATCH (hosts see different
 * checkpoints). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_open_checkpoint(fsdp_context *context, const char *folder,
                                                      fsdp_checkpoint **checkpoint);

/**
 * Load a model from an opened checkpoint, by the name that it was saved under (NULL: ""). Otherwise the call works as
 * fsdp_load without FALLBACK. IF_ANY has an effect only with ALLOW_MISSING, if the checkpoint has none of the model's
 * tensors. Collective: the model's mesh. Blocks: the disk and peers. Errors: as fsdp_load. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_load_checkpoint_model(fsdp_checkpoint *checkpoint, const char *name,
                                                            fsdp_model *model, const fsdp_load_options *options,
                                                            fsdp_loaded *loaded);

/**
 * Read bytes from an opened checkpoint: the bytes that the rank of this number saved PER_RANK, or else the bytes saved
 * ONCE. *size_bytes is the buffer's size on entry and the number of bytes on return; data may be NULL to ask for the
 * number. The bytes are verified. Collective: no. Blocks: the disk. Errors: INVALID_ARGUMENT (no bytes of that name, or
 * none of this rank; too small, and then *size_bytes is set; a damaged file), SYSTEM. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_read_checkpoint_bytes(fsdp_checkpoint *checkpoint, const char *name, void *data,
                                                            uint64_t *size_bytes);

/**
 * Give the handle back. The call never waits. A save that is under way goes on: fsdp_close_context waits for it and
 * returns its failure; fsdp_destroy_context gives the save up and logs a WARNING. NULL is allowed. Threads: any. Since
 * 0.2.
 */
FSDP_API void fsdp_destroy_checkpoint(fsdp_checkpoint *checkpoint);

/**
 * List the checkpoints of a folder as JSON. "checkpoints" has name, step, sequence, ranks, models and bytes of each,
 * the newest first; "unreadable" has the reason for each checkpoint that is damaged or that this process may not read.
 * buffer and size_bytes work as in fsdp_describe_model. Collective: no. Blocks: the disk. Threads: any.
 * Errors: SYSTEM, INVALID_ARGUMENT (too small; *size_bytes is set). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_list_checkpoints(const char *folder, char *buffer, uint64_t *size_bytes);

/* ---- CUDA graphs --------------------------------------------------------------------------------------------- */

/** Part or all of a step that was captured into a CUDA graph. Give it back with fsdp_destroy_capture. */
typedef struct fsdp_capture fsdp_capture;

/**
 * Begin a capture: until fsdp_end_capture, the model's calls do not do their work but record it into the graph that
 * `stream` is being captured into (call cudaStreamBeginCapture first, in relaxed or thread-local mode). Any part of a
 * step can be captured, also all of it: prefetch, unshard and reshard; acquire, put and reduce gradients; finish_grads,
 * scale_grads, get_grad_norm, clip_grads and apply_grads; publish_weights; and step_adamw.
 *   AdamW      step_adamw is captured at most once, with step 0 in its options; each replay gives its own lr.
 *   Norms      get_grad_norm, clip_grads and apply_grads must have NULL for norm and mesh; fsdp_get_last_norm returns
 *              the norm of a replay. The ranks synchronize in these calls during the capture. If the context has had
 *              other models, a captured call that measures a norm (apply_grads does so only if it clips) is
 *              UNSUPPORTED, and so is fsdp_prepare_replay of a capture with a norm.
 *   Streams    All streams given must be in the capture: `stream`, and streams forked from it.
 *   Gradients  Record two captures: one of a first micro-batch, which overwrites gradients, and one of a later
 *              micro-batch, which adds to them.
 * During a capture these calls are INVALID_STATE: calls for which the host must wait (those that return a norm,
 * check_grads, load, read), begin_update and discard_step. The same holds for calls with streams that are not in the
 * capture, calls of the context's other models, whose work could get into the graph, and fsdp_close_context.
 * If a call of the model fails, its work is missing in the graph, and fsdp_end_capture fails. After BUSY or
 * INVALID_HANDLE fsdp_end_capture does not fail, because the call never reached the model: make the call again, else
 * the graph lacks its work. (FSDP_GRAD_NO_WAIT makes no call BUSY on a CUDA device.) If
 * fsdp_begin_capture itself fails on a rank, that rank may still call fsdp_end_capture, for the sake of peers whose
 * call succeeded. fsdp_end_capture then fails on every rank with the error of fsdp_begin_capture, and a new capture can
 * begin.
 * Collective: the mesh, but this call does not synchronize the ranks; fsdp_end_capture does. The ranks must capture the
 * same calls. Blocks: until the library's work on this rank is done. Errors: INVALID_STATE (the stream is not being
 * captured, or another capture is under way), UNSUPPORTED, TIMEOUT (the library's work has not ended), SYSTEM.
 * UNSUPPORTED: the host device, FSDP_SCHEDULE_ANY, or a parameter with FSDP_MISSING_GRAD_SKIP. Calls that communicate
 * during a capture are UNSUPPORTED if ranks exchange data through memory of the host, which no graph can hold. Since
 * 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_begin_capture(fsdp_model *model, fsdp_stream stream);

/**
 * End a capture: join the library's streams to `stream`, so that its capture can end, and put the model back into the
 * state from before fsdp_begin_capture, because nothing has been done yet. Afterwards the caller ends the stream's
 * capture, instantiates the graph and keeps it. If a call since fsdp_begin_capture has failed on a rank, or a rank
 * cannot end its capture, this call fails on every rank and names the rank, call and error. In this case, too, the
 * capture is over and the model is as before; drop the graph that cudaStreamEndCapture returns.
 * Collective: the mesh (compares what was captured). Blocks: peers. Errors: INVALID_STATE, MISMATCH, PEER_FAILED,
 * TIMEOUT. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_end_capture(fsdp_model *model, fsdp_stream stream, fsdp_capture **capture);

/**
 * Prepare a replay: call this before each launch of the graph on `stream`. The call checks that the model is in the
 * state in which it was captured. It orders the graph after the library's earlier work, and gives the device the step's
 * lr and bias corrections. lr counts only if the capture has a step; it must be finite and the same on every rank. Then
 * launch the graph and call fsdp_commit_replay, or fsdp_cancel_replay if there was no launch, with the same stream. The
 * stream must live until that call, and other calls of the model before it are INVALID_STATE. If a rank cannot replay
 * (another state, a step that failed, a capture under way), the call fails on every rank and names that rank and what
 * differs. The model is then as before.
 * Collective: the mesh. Blocks: peers; the GPU only while 64 replays are under way. Errors: INVALID_STATE (says what
 * differs), INVALID_ARGUMENT, INVALID_HANDLE (the model was destroyed), MISMATCH (ranks replay different captures or
 * give another lr), PEER_FAILED, TIMEOUT (also: an earlier replay has not ended within timeout_ms), SYSTEM. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_prepare_replay(fsdp_capture *capture, double lr, fsdp_stream stream);

/**
 * Commit a replay after the graph was launched on `stream`: the model goes on as if the captured calls had been made,
 * and later calls come after the graph. If the graph does not end, because a peer has not launched its graph, later
 * waits end by a TIMEOUT that names the capture.
 * Collective: no. Blocks: no. Errors: INVALID_STATE (not prepared), INVALID_ARGUMENT (not the stream of the
 * preparation), SYSTEM (nothing can be ordered behind the graph: the context has failed). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_commit_replay(fsdp_capture *capture, fsdp_stream stream);

/**
 * Cancel a replay. Call this instead of fsdp_commit_replay if the graph was not launched, for example because its
 * launch failed: the model is as before fsdp_prepare_replay. All ranks must cancel. If some ranks commit and others
 * cancel, the next call that synchronizes them is a MISMATCH that names both.
 * Collective: the mesh, but the ranks synchronize only later. Blocks: no. Errors: as fsdp_commit_replay. Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_cancel_replay(fsdp_capture *capture, fsdp_stream stream);

/**
 * Give the handle back; NULL is allowed. Between fsdp_prepare_replay and fsdp_commit_replay the call gives the replay
 * up, as fsdp_cancel_replay does. A running graph does not need the handle any more. The graphs themselves, executable
 * or not, belong to the caller, which must destroy them before the model, because they refer to its memory. NCCL does
 * not end a communicator before the last graph that captured its collectives is destroyed. If such a graph still
 * exists, destroying the model takes some seconds, and the log says so. Threads: any. Since 0.2.
 */
FSDP_API void fsdp_destroy_capture(fsdp_capture *capture);

/* ---- trace --------------------------------------------------------------------------------------------------- */

/**
 * Write this rank's timeline to a file: the last trace_events events since the context began, in the Trace Event Format
 * (JSON) that Perfetto and chrome://tracing read. The file appears, or replaces the file of that name, when it is
 * complete. It has mode 0600. Only a regular file is replaced: a link, pipe, socket or device is a SYSTEM error, and so
 * is a file that would pass the limit of file sizes. docs/guides/trace.md says what is in the file and how files of
 * several ranks are merged.
 * Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (no trace is kept), SYSTEM (errno is named). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_write_trace(const fsdp_context *context, const char *path);

/**
 * Write this rank's flight record to a file: its last calls and collectives (flight_events of each), what the caller
 * waits for, and the error that failed the context, if any. If the context fails and the options give a directory, the
 * record is written without this call. `fsdp-info flight` reads the files of several ranks; see
 * docs/guides/debugging-a-hang.md.
 * Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (a planning context), SYSTEM (errno is named). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_write_flight_record(const fsdp_context *context, const char *path);

/**
 * Begin a span of the caller's own in the timeline, for example "forward"; spans nest, up to 64. name is UTF-8 of 1-255
 * bytes; a context keeps at most 256 different names. The call does nothing unless FSDP_CONTEXT_TRACE or
 * trace_directory has turned the timeline on. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (one name too many),
 * INVALID_STATE (64 are open). Since 0.2.
 */
FSDP_API FSDP_CHECKED fsdp_status fsdp_begin_span(fsdp_context *context, const char *name);
/** End the span that was begun last. Collective: no. Blocks: no. Errors: INVALID_STATE (none is open). Since 0.2. */
FSDP_API FSDP_CHECKED fsdp_status fsdp_end_span(fsdp_context *context);

#ifdef __cplusplus
}
#endif

#endif /* FSDP_H */
