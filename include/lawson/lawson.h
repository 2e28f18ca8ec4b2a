/* Lawson: will this computation run as one fused GPU kernel, and then make sure that it does.
 *
 * C11 ABI. Rules that hold for every function:
 * - It returns lawson_status; anything but LAWSON_OK leaves the outputs untouched, and
 *   lawson_last_error_message() says why (per thread, valid until that thread's next call).
 * - Handles come in create/destroy pairs; destroying NULL is allowed. A handle may be used from
 *   several threads at once for reading; what it hands out lives as long as the handle.
 * - Structs start with struct_size: set it to sizeof(the struct).
 * - "Unsupported" is an answer (a verdict, or LAWSON_UNSUPPORTED from compile); a missing library,
 *   a fault of the driver or a bug never is.
 * Shapes and strides are in elements, sizes in bytes, times in milliseconds.
 */
#ifndef LAWSON_LAWSON_H_
#define LAWSON_LAWSON_H_

#include <stddef.h>
#include <stdint.h>

#if defined(LAWSON_BUILDING)
#define LAWSON_API __attribute__((visibility("default")))
#else
#define LAWSON_API
#endif

#define LAWSON_VERSION_MAJOR 0
#define LAWSON_VERSION_MINOR 1
#define LAWSON_VERSION_PATCH 0

#define LAWSON_MAX_RANK 8

#ifdef __cplusplus
extern "C" {
#endif

/* Append-only. */
typedef enum lawson_status {
  LAWSON_OK = 0,
  LAWSON_UNSUPPORTED = 1,      /* an answer: understood, and cannot be had */
  LAWSON_INVALID_ARGUMENT = 2, /* the caller's input; the message names field and value */
  LAWSON_UNAVAILABLE = 3,      /* the environment lacks a library, a device or a file of Lawson's */
  LAWSON_OUT_OF_MEMORY = 4,
  LAWSON_CUDA = 5,
  LAWSON_CUDNN = 6,
  LAWSON_IO = 7,
  LAWSON_CANCELLED = 8,
  LAWSON_INTERNAL = 9
} lawson_status;

/* "unsupported", "invalid argument", ...; never NULL. */
LAWSON_API const char* lawson_status_string(lawson_status status);
/* The message of this thread's last failed call; "" when there was none. */
LAWSON_API const char* lawson_last_error_message(void);
/* "0.1.0" */
LAWSON_API const char* lawson_version(void);

/* ---- text and bytes handed out by the library ------------------------------------------- */

typedef struct lawson_text lawson_text;
LAWSON_API const char* lawson_text_data(const lawson_text* text); /* NUL-terminated */
LAWSON_API size_t lawson_text_size(const lawson_text* text);      /* without the NUL */
LAWSON_API void lawson_text_destroy(lawson_text* text);

/* ---- process-wide settings --------------------------------------------------------------- */

typedef struct lawson_settings {
  size_t struct_size;
  const char* cudnn_path; /* a libcudnn.so.9 or a folder with one; NULL: search (docs/design.md) */
  int32_t max_workers;    /* deviceless worker processes at once; 0: one per core, at most 8 */
} lawson_settings;

/* Before the first call that needs an engine; later calls are LAWSON_INVALID_ARGUMENT. */
LAWSON_API lawson_status lawson_configure(const lawson_settings* settings);

/* Versions, libraries found and where, devices, environment variables, as one JSON document. */
LAWSON_API lawson_status lawson_info(lawson_text** json);

/* ---- devices ------------------------------------------------------------------------------ */

typedef struct lawson_device lawson_device;

/* `name`: "cpu", a target of the library ("h200", also an alias), "cuda" or "cuda:N" for a GPU of
 * this machine. A GPU of this machine that is the named target is used live. */
LAWSON_API lawson_status lawson_device_find(const char* name, lawson_device** device);
LAWSON_API void lawson_device_destroy(lawson_device* device);
LAWSON_API const char* lawson_device_name(const lawson_device* device);
LAWSON_API int lawson_device_is_present(const lawson_device* device);
/* All known devices: GPUs of this machine, the host CPU, the target library, as a JSON list. */
LAWSON_API lawson_status lawson_devices_json(lawson_text** json);

/* Whether the stream (a CUstream) is being captured into a CUDA graph: then nothing is built,
 * loaded or allocated. Never so on the CPU. */
LAWSON_API lawson_status lawson_device_capturing(const lawson_device* device, void* stream,
                                                 int* capturing);

/* ---- memory on a device, for callers without a framework of their own ------------------------ */

typedef struct lawson_memory lawson_memory;

/* Device memory of a GPU of this machine, host memory for the CPU; aligned to 64 bytes at least. */
LAWSON_API lawson_status lawson_memory_create(const lawson_device* device, size_t size,
                                              lawson_memory** memory);
/* Waits for the device's work before it frees. */
LAWSON_API void lawson_memory_destroy(lawson_memory* memory);
LAWSON_API void* lawson_memory_data(const lawson_memory* memory); /* the device's address */
LAWSON_API size_t lawson_memory_size(const lawson_memory* memory);
/* Copies from and to host memory. Both are done when they return; read waits for the device first.
 */
LAWSON_API lawson_status lawson_memory_write(lawson_memory* memory, size_t offset, const void* data,
                                             size_t size);
LAWSON_API lawson_status lawson_memory_read(const lawson_memory* memory, size_t offset, void* data,
                                            size_t size);

/* ---- specs and graphs ----------------------------------------------------------------------- */

typedef struct lawson_spec lawson_spec;
typedef struct lawson_graph lawson_graph;

/* A spec document of either kind (docs/spec.md). `source` names it in messages (a file name).
 * A spec of an attention pass `training` stands for two graphs, forward and backward. */
LAWSON_API lawson_status lawson_spec_from_json(const char* text, size_t size, const char* source,
                                               lawson_spec** spec);
LAWSON_API void lawson_spec_destroy(lawson_spec* spec);
LAWSON_API const char* lawson_spec_name(const lawson_spec* spec);
LAWSON_API lawson_status lawson_spec_json(const lawson_spec* spec, lawson_text** json);
/* 0 graphs: the spec asks for what this version cannot express; a probe says what. */
LAWSON_API size_t lawson_spec_graph_count(const lawson_spec* spec);
LAWSON_API lawson_status lawson_spec_graph(const lawson_spec* spec, size_t index,
                                           lawson_graph** graph);

LAWSON_API lawson_status lawson_graph_from_json(const char* text, size_t size, const char* source,
                                                lawson_graph** graph);
LAWSON_API void lawson_graph_destroy(lawson_graph* graph);
LAWSON_API const char* lawson_graph_name(const lawson_graph* graph);
LAWSON_API lawson_status lawson_graph_json(const lawson_graph* graph, lawson_text** json);
LAWSON_API lawson_status lawson_graph_print(const lawson_graph* graph, lawson_text** text);
LAWSON_API lawson_status lawson_graph_dot(const lawson_graph* graph, lawson_text** text);

typedef struct lawson_tensor_info {
  size_t struct_size;
  int64_t uid; /* what lawson_binding refers to */
  const char* name;
  const char* dtype; /* "bf16", ... */
  int32_t rank;
  int64_t shape[LAWSON_MAX_RANK];
  int64_t strides[LAWSON_MAX_RANK];
  int32_t is_input;
  int32_t is_by_value; /* bound by a host pointer on every device */
  int32_t alignment;   /* bytes */
  size_t size;         /* bytes from the first to the last element */
} lawson_tensor_info;

/* Inputs come first, then outputs. */
LAWSON_API size_t lawson_graph_tensor_count(const lawson_graph* graph);
LAWSON_API lawson_status lawson_graph_tensor(const lawson_graph* graph, size_t index,
                                             lawson_tensor_info* info);

/* ---- models -------------------------------------------------------------------------------- */

typedef struct lawson_model_options {
  size_t struct_size;
  int64_t batch;      /* 0: 1 */
  int64_t seqlen;     /* 0: 4096 */
  int64_t context;    /* keys and values at decode; 0: 8192 */
  const char* passes; /* "prefill,decode,training" or a part of it; NULL: all */
  const char* dtype;  /* NULL: the config's, else bf16 */
} lawson_model_options;

/* A model's config.json -> {"model", "model_type", "layers", "warnings": [...],
 * "workloads": [{"name", "group": "attention"|"gemm", "layers", "note", "spec": {...}}]}. */
LAWSON_API lawson_status lawson_model_workloads(const char* text, size_t size, const char* source,
                                                const lawson_model_options* options,
                                                lawson_text** json);

/* ---- probe ------------------------------------------------------------------------------- */

typedef enum lawson_decision {
  LAWSON_SUPPORTED = 0,
  LAWSON_NOT_SUPPORTED = 1,
  LAWSON_UNDECIDED = 2 /* every remaining engine needs the live device to answer */
} lawson_decision;

typedef enum lawson_strength {
  LAWSON_JUDGED = 0,  /* heuristics and support checks accept */
  LAWSON_BUILT = 1,   /* the kernel was compiled */
  LAWSON_VERIFIED = 2 /* executed and compared with the oracle; needs the device */
} lawson_strength;

/* How a plan is chosen among an engine's candidates. Timed is only what runs on a device of this
 * machine, on data of its own; the choice is kept for the process and stored (LAWSON_CACHE_DIR).
 * For a device that is not here it is the engine's first choice, and verdict and plan say so. */
typedef enum lawson_tuning {
  LAWSON_TUNING_OFF = 0,       /* the engine's first choice that builds: the same every time */
  LAWSON_TUNING_QUICK = 1,     /* the fastest of the first eight */
  LAWSON_TUNING_EXHAUSTIVE = 2 /* the fastest of all */
} lawson_tuning;

typedef struct lawson_options {
  size_t struct_size;
  const char* engine; /* "cudnn", "cpu", "reference"; NULL: cudnn for GPUs, cpu for the CPU */
  lawson_strength strength;
  int64_t workspace_limit; /* bytes; negative: none */
  int32_t deterministic;
  double deadline_ms; /* for building and tuning (its best so far); 0 or negative: none */
  lawson_tuning tuning;
  int32_t retune; /* when compiling with tuning: time the stored candidates again, build nothing */
  /* Non-zero: fusions with a product that differ in their rows share kernels, where cuDNN has such
   * plans: the first is compiled, one of other rows takes milliseconds. Then "dynamic_shapes" is
   * among the verdict's rewrites; where there is none, attention for one, it is a plan for its own
   * shapes. */
  int32_t dynamic_shapes;
} lawson_options;

typedef struct lawson_verdict lawson_verdict;

/* `options` NULL: defaults. Thread-safe; concurrent deviceless probes run in parallel workers. */
LAWSON_API lawson_status lawson_probe(const lawson_graph* graph, const lawson_device* device,
                                      const lawson_options* options, lawson_verdict** verdict);
/* All graphs of the spec must hold; the reasons say which does not. */
LAWSON_API lawson_status lawson_probe_spec(const lawson_spec* spec, const lawson_device* device,
                                           const lawson_options* options, lawson_verdict** verdict);
LAWSON_API void lawson_verdict_destroy(lawson_verdict* verdict);
LAWSON_API lawson_decision lawson_verdict_decision(const lawson_verdict* verdict);
LAWSON_API lawson_strength lawson_verdict_strength(const lawson_verdict* verdict);
LAWSON_API const char* lawson_verdict_engine(const lawson_verdict* verdict);
LAWSON_API const char* lawson_verdict_key(const lawson_verdict* verdict);
LAWSON_API const char* lawson_verdict_plan_id(const lawson_verdict* verdict); /* "" when none */
LAWSON_API size_t lawson_verdict_reason_count(const lawson_verdict* verdict);
LAWSON_API const char* lawson_verdict_reason_code(const lawson_verdict* verdict, size_t index);
LAWSON_API const char* lawson_verdict_reason_message(const lawson_verdict* verdict, size_t index);
LAWSON_API lawson_status lawson_verdict_json(const lawson_verdict* verdict, lawson_text** json);

/* The verdict, every failing condition, and the nearest neighbours, each probed:
 * {"verdict": {...}, "neighbours": [{"change", "field"?, "kind": "attribute"|"target"|"cudnn",
 * "verdict": {...}}]}. `limit`: the most neighbours to probe; 0: the default. */
LAWSON_API lawson_status lawson_explain(const lawson_spec* spec, const lawson_device* device,
                                        const lawson_options* options, size_t limit,
                                        lawson_text** json);

/* ---- plans ------------------------------------------------------------------------------- */

typedef struct lawson_plan lawson_plan;

/* LAWSON_UNSUPPORTED with every reason in the message when it does not fuse. */
LAWSON_API lawson_status lawson_compile(const lawson_graph* graph, const lawson_device* device,
                                        const lawson_options* options, lawson_plan** plan);
/* The key that such a plan has (lawson_plan_key), found without judging or building. */
LAWSON_API lawson_status lawson_compile_key(const lawson_graph* graph, const lawson_device* device,
                                            const lawson_options* options, lawson_text** key);
LAWSON_API void lawson_plan_destroy(lawson_plan* plan);
LAWSON_API const char* lawson_plan_id(const lawson_plan* plan);
LAWSON_API const char* lawson_plan_key(const lawson_plan* plan);
LAWSON_API const char* lawson_plan_engine(const lawson_plan* plan);
LAWSON_API const char* lawson_plan_name(const lawson_plan* plan); /* cuDNN's engine config */
LAWSON_API const char* lawson_plan_target(const lawson_plan* plan);
LAWSON_API size_t lawson_plan_workspace_size(const lawson_plan* plan);
LAWSON_API lawson_status lawson_plan_graph(const lawson_plan* plan, lawson_graph** graph);
/* What a plan is of: the graph after clean-ups that change no bit. */
LAWSON_API lawson_status lawson_graph_simplified(const lawson_graph* graph,
                                                 lawson_graph** simplified);
/* How a plan was chosen that was compiled with tuning: {"choice", "tuning", "compared_with"?,
 * "deadline_passed", "stored", "buffer_sets", "buffer_bytes", "milliseconds": {"build", "time",
 * "verify"}, "candidates": [{"name", "standing": "chosen"|"slower"|"not_timed"|"not_built"|
 * "workspace_limit"|"wrong_result"|"failed", "failure"?, "workspace_bytes", "rounds",
 * "milliseconds": {"median", "min", "max"}?}]}. Of a plan from another process only "choice"; {}
 * without tuning. */
LAWSON_API lawson_status lawson_plan_tuning(const lawson_plan* plan, lawson_text** json);
LAWSON_API lawson_status lawson_plan_serialize(const lawson_plan* plan, lawson_text** bytes);
/* Bad, stale, truncated or foreign bytes are LAWSON_INVALID_ARGUMENT, never a crash. */
LAWSON_API lawson_status lawson_plan_deserialize(const void* data, size_t size, lawson_plan** plan);

/* Makes the plan executable on a device of this machine. */
LAWSON_API lawson_status lawson_plan_load(lawson_plan* plan, const lawson_device* device);

/* Loads the plan for those of this process who ask for its key on that device: attention handles,
 * fusions and compile then find it instead of building. `options`: what it was compiled with (NULL:
 * defaults); LAWSON_INVALID_ARGUMENT when its key is not that of its graph with these options
 * there. A plan that is there already stays. */
LAWSON_API lawson_status lawson_plan_keep(const lawson_plan* plan, const lawson_device* device,
                                          const lawson_options* options);

typedef struct lawson_binding {
  int64_t uid; /* each once */
  void* data;  /* device memory; host memory for the CPU and for by-value tensors */
} lawson_binding;

/* Asynchronous on `stream` (a CUstream; NULL: the default stream) on a GPU; no build, allocation
 * or synchronisation here. A workspace that is too small or misaligned is an error. Needs load. */
LAWSON_API lawson_status lawson_plan_execute(const lawson_plan* plan,
                                             const lawson_binding* bindings, size_t count,
                                             void* workspace, size_t workspace_size, void* stream);

typedef enum lawson_graph_use {
  LAWSON_GRAPH_ADD = 0,   /* one execution, into an empty graph */
  LAWSON_GRAPH_UPDATE = 1 /* a graph that it was added to gets the pointers of this call */
} lawson_graph_use;

/* An execution as nodes of a CUDA graph (a CUgraph), without a stream; use the graph as a child
 * node or instantiate it. The plan outlives the graph. LAWSON_UNSUPPORTED for a plan with more in
 * it than cuDNN's own kernels, and by engines without a GPU: capture a stream that it is executed
 * on. */
LAWSON_API lawson_status lawson_plan_prepare_graph(const lawson_plan* plan, lawson_graph_use use,
                                                   const lawson_binding* bindings, size_t count,
                                                   void* workspace, size_t workspace_size,
                                                   void* cuda_graph);

/* ---- bundles: several plans in one file ----------------------------------------------------- */

typedef struct lawson_bundle lawson_bundle;

/* Replaces the file in one step (of a symbolic link, what it points to). Of plans with one id the
 * first is written. */
LAWSON_API lawson_status lawson_bundle_write(const char* path, const lawson_plan* const* plans,
                                             size_t count);
/* Adds to the bundle at `path`, in one step as well, or makes it. A plan of a given one's id is
 * replaced; of one key the plan added last is found first. Two who append at once may lose what one
 * of them added. */
LAWSON_API lawson_status lawson_bundle_append(const char* path, const lawson_plan* const* plans,
                                              size_t count);
/* Reads the index; each plan is read when it is asked for. What is no bundle, truncated or damaged
 * is LAWSON_INVALID_ARGUMENT, and the message names the defect. */
LAWSON_API lawson_status lawson_bundle_open(const char* path, lawson_bundle** bundle);
LAWSON_API void lawson_bundle_destroy(lawson_bundle* bundle);
LAWSON_API size_t lawson_bundle_size(const lawson_bundle* bundle); /* plans */
LAWSON_API lawson_status lawson_bundle_plan(const lawson_bundle* bundle, size_t index,
                                            lawson_plan** plan);
/* The plan with this key (lawson_compile_key); LAWSON_OK and NULL where there is none. */
LAWSON_API lawson_status lawson_bundle_find(const lawson_bundle* bundle, const char* key,
                                            lawson_plan** plan);

/* What the index says of a plan. The pointers live as long as the bundle. */
typedef struct lawson_bundle_entry {
  size_t struct_size;
  char key[33];
  char plan_id[33];
  const char* target;
  const char* engine;
  const char* engine_version;
  const char* device_fingerprint; /* of the devices that it is for */
  size_t size;                    /* as lawson_plan_serialize gives it */
  size_t stored_size;             /* in the file */
} lawson_bundle_entry;

/* Plans are in the order of their keys. */
LAWSON_API lawson_status lawson_bundle_entry_info(const lawson_bundle* bundle, size_t index,
                                                  lawson_bundle_entry* entry);

/* ---- the store: plans, verdicts and tuned choices on the disk (docs/store.md) -----------------
 */

typedef struct lawson_store lawson_store;

/* The one that LAWSON_CACHE_DIR and LAWSON_CACHE name; LAWSON_UNAVAILABLE while it is off. Nothing
 * is created before something is kept. */
LAWSON_API lawson_status lawson_store_open(lawson_store** store);
LAWSON_API void lawson_store_destroy(lawson_store* store);
LAWSON_API const char* lawson_store_folder(const lawson_store* store);
/* [{"file", "kind": "plan"|"verdict"|"tuned", "bytes", "last_use" (seconds since 1970), "key",
 * "target", "engine", "engine_version", "deviceless" (found without the device), "lawson" (the
 * build that wrote it), "current" (is that this one?), "defect"?}], the last used first. Of a file
 * whose head cannot be read only the first four and "defect". */
LAWSON_API lawson_status lawson_store_list(const lawson_store* store, lawson_text** json);
/* The same after every file was read to its end and checked. `remove`: those with a defect are
 * taken away, and say "removed". */
LAWSON_API lawson_status lawson_store_verify(const lawson_store* store, int32_t remove,
                                             lawson_text** json);
/* Takes away what was not used for `max_age_seconds`, and then the least recently used until
 * `max_bytes` are left; negative: no such rule. Who reads a file at the time is not disturbed.
 * {"removed", "removed_bytes", "kept", "kept_bytes", "failure"?} */
LAWSON_API lawson_status lawson_store_prune(const lawson_store* store, int64_t max_bytes,
                                            double max_age_seconds, lawson_text** json);
/* LAWSON_UNAVAILABLE when there is none of this key and this build of Lawson. */
LAWSON_API lawson_status lawson_store_plan(const lawson_store* store, const char* key,
                                           lawson_plan** plan);
/* In place of what is there of its key. */
LAWSON_API lawson_status lawson_store_keep(lawson_store* store, const lawson_plan* plan);

/* ---- data: generated inputs, a run, a check ------------------------------------------------ */

/* Host buffers for all inputs and outputs of one graph, laid out by its strides. */
typedef struct lawson_data lawson_data;

/* Random inputs from `seed` (the same on every platform); outputs are poisoned. */
LAWSON_API lawson_status lawson_data_generate(const lawson_graph* graph, uint64_t seed,
                                              lawson_data** data);
LAWSON_API void lawson_data_destroy(lawson_data* data);
LAWSON_API lawson_status lawson_data_buffer(lawson_data* data, int64_t uid, void** buffer,
                                            size_t* size);

typedef struct lawson_run_result {
  size_t struct_size;
  double milliseconds_min;
  double milliseconds_median;
  double milliseconds_max;
} lawson_run_result;

/* Executes a loaded plan on the data, `repetitions` times after one warm-up, and leaves the
 * outputs in the data. Copies to and from device memory are not timed. */
LAWSON_API lawson_status lawson_plan_run(const lawson_plan* plan, lawson_data* data,
                                         int32_t repetitions, lawson_run_result* result);

/* Times a loaded plan on random inputs from `seed`: `rounds` rounds of executions that take several
 * sets of buffers in turn, by the device's clock. {"engine", "plan_id", "plan_name", "key" (of what
 * ran), "rounds", "executions" (of a round), "buffer_sets", "buffer_bytes", "milliseconds":
 * {"median", "min", "max"} (of one execution), "flops", "bytes", "flops_per_second",
 * "bytes_per_second"}. flops: of products; causal attention counts the half, backward 2.5 times. */
LAWSON_API lawson_status lawson_plan_bench(const lawson_plan* plan, uint64_t seed, int32_t rounds,
                                           lawson_text** json);
/* What was measured as the most that a device of this machine does: a large product through the
 * engine (NULL: the device's own) and a copy. {"flops_per_second", "bytes_per_second", "product",
 * "copy": as from lawson_plan_bench, with "what"}. Takes seconds. */
LAWSON_API lawson_status lawson_device_limits(const lawson_device* device, const char* engine,
                                              lawson_text** json);

/* Compares the outputs with the float64 oracle under the bound derived for the plan's engine:
 * {"ok", "outputs": [{"name", "max_error", "max_error_over_bound", "ok", "message"}]}. */
LAWSON_API lawson_status lawson_data_verify(const lawson_plan* plan, const lawson_data* data,
                                            int* ok, lawson_text** json);

/* ---- diagnostics: what was done, and how long it took (docs/diagnostics.md) -------------------
 */

/* What this process counted since it began, or since the last reset: {"rank", "pid", "totals":
 * {"hit", "miss", "verdict", "create_graph", "cache_graph", "build_plans", "load", "execute",
 * "evict"}, "stages": {"validate" | "build_operation_graph" | "create_execution_plans" |
 * "check_support" | "build_plans" | "load": {"count", "total_ms", "max_ms"}}, "threads":
 * [{"thread", "tid", "ended", "device": "0" | "-" | "mixed", "rows": [{"engine", "pass", "device":
 * 0 | null, "events", "stages"}]}]}. Exact once the calls that are counted have returned. */
LAWSON_API lawson_status lawson_stats_json(lawson_text** json);
/* Of what lawson_stats_json says; LAWSON_CACHE_DEBUG's summary stays that of the whole process. */
LAWSON_API lawson_status lawson_stats_reset(void);

/* From here on the process, and its workers, note each step with its time. One trace at a time. A
 * path that cannot be written is LAWSON_INVALID_ARGUMENT here, before anything is traced. */
LAWSON_API lawson_status lawson_trace_start(const char* path);
/* Writes the trace: a file that Perfetto (ui.perfetto.dev) and chrome://tracing open, whole or not
 * at all. Also done when the process ends, by exit or by returning from main. */
LAWSON_API lawson_status lawson_trace_stop(void);

#ifdef __cplusplus
}
#endif

#include <lawson/attention.h>
#include <lawson/fusion.h>

#endif /* LAWSON_LAWSON_H_ */
