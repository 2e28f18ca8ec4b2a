/* Fusions: a computation built op by op, and the plan that must come of it.
 *
 * Part of lawson.h, whose rules hold here too; docs/fusion.md is the guide. In C++ the same with
 * operators: lawson/fusion.hpp.
 */
#ifndef LAWSON_FUSION_H_
#define LAWSON_FUSION_H_

#ifndef LAWSON_LAWSON_H_
#error "include lawson/lawson.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- building a graph ------------------------------------------------------------------------ */

/* One thread at a time. Every call checks what it adds, and an error leaves the builder as it was:
 * its message names the source, the op, the operands with dtypes and shapes, and what is wrong.
 * Names are UTF-8 of at most 256 bytes; there are at most 4096 inputs and as many ops. */
typedef struct lawson_graph_builder lawson_graph_builder;

/* A tensor of one builder; another builder refuses it. */
typedef int64_t lawson_tensor_id;
#define LAWSON_NO_TENSOR ((lawson_tensor_id)0) /* an optional operand that is absent */

/* `name` NULL: "graph". */
LAWSON_API lawson_status lawson_graph_builder_create(const char* name,
                                                     lawson_graph_builder** builder);
LAWSON_API void lawson_graph_builder_destroy(lawson_graph_builder* builder);

/* Non-zero: intermediates are rounded exactly as written, or the graph is refused. */
LAWSON_API lawson_status lawson_graph_builder_strict(lawson_graph_builder* builder, int strict);

/* Where what is added from now on was written ("mlp.c:12"); NULL: unknown. Errors and refusals name
 * it; no part of a key. */
LAWSON_API lawson_status lawson_graph_builder_source(lawson_graph_builder* builder,
                                                     const char* source);
#define LAWSON_TEXT_OF_(x) #x
#define LAWSON_TEXT_OF(x) LAWSON_TEXT_OF_(x)
#define LAWSON_HERE __FILE__ ":" LAWSON_TEXT_OF(__LINE__)

typedef struct lawson_graph_input {
  size_t struct_size;
  const char* name; /* NULL: "x0", "x1", ... in the order of the inputs */
  int32_t dtype;    /* lawson_dtype */
  int32_t rank;
  int64_t shape[LAWSON_MAX_RANK];
  const int64_t* strides; /* elements, one per dim; NULL: contiguous */
  int32_t alignment;      /* bytes of which its address will be a multiple; 0: 16 */
  int32_t by_value;       /* one element, bound by a host pointer on every device */
} lawson_graph_input;

LAWSON_API lawson_status lawson_graph_builder_input(lawson_graph_builder* builder,
                                                    const lawson_graph_input* input,
                                                    lawson_tensor_id* tensor);

/* Append-only. */
typedef enum lawson_attribute_type {
  LAWSON_ATTRIBUTE_INTEGER = 1,  /* integer */
  LAWSON_ATTRIBUTE_NUMBER = 2,   /* number */
  LAWSON_ATTRIBUTE_FLAG = 3,     /* integer: 0 or 1 */
  LAWSON_ATTRIBUTE_DTYPE = 4,    /* integer: a lawson_dtype */
  LAWSON_ATTRIBUTE_INTEGERS = 5, /* integer: how many; integers */
  LAWSON_ATTRIBUTE_TEXT = 6      /* text */
} lawson_attribute_type;

/* An attribute of an op, under the name that it has in a spec (docs/spec.md): "axes", "value", ...
 * "dtype" is that of the (first) result. */
typedef struct lawson_attribute {
  const char* name;
  int32_t type; /* lawson_attribute_type */
  int64_t integer;
  double number;
  const int64_t* integers;
  const char* text;
} lawson_attribute;

/* Initialisers of a lawson_attribute. */
#define LAWSON_INTEGER(name, value) \
  { (name), LAWSON_ATTRIBUTE_INTEGER, (value), 0, NULL, NULL }
#define LAWSON_NUMBER(name, value) \
  { (name), LAWSON_ATTRIBUTE_NUMBER, 0, (value), NULL, NULL }
#define LAWSON_FLAG(name, value) \
  { (name), LAWSON_ATTRIBUTE_FLAG, (value), 0, NULL, NULL }
#define LAWSON_DTYPE(value) \
  { "dtype", LAWSON_ATTRIBUTE_DTYPE, (value), 0, NULL, NULL }
#define LAWSON_INTEGERS(name, list) \
  { (name), LAWSON_ATTRIBUTE_INTEGERS, sizeof(list) / sizeof((list)[0]), 0, (list), NULL }

/* Adds the op of that name ("matmul", "gelu_tanh", "reduce_sum", ...). `inputs` in the order of its
 * slots; optional ones may be LAWSON_NO_TENSOR, or left away at the end. `result`: its result, the
 * first where it has several. */
LAWSON_API lawson_status lawson_graph_builder_op(lawson_graph_builder* builder, const char* op,
                                                 const lawson_tensor_id* inputs, size_t input_count,
                                                 const lawson_attribute* attributes,
                                                 size_t attribute_count, lawson_tensor_id* result);
/* The same for an op that was written at `source` ("mlp.c:12"; NULL: unknown), whatever
 * lawson_graph_builder_source says of the others. */
LAWSON_API lawson_status lawson_graph_builder_op_at(
    lawson_graph_builder* builder, const char* source, const char* op,
    const lawson_tensor_id* inputs, size_t input_count, const lawson_attribute* attributes,
    size_t attribute_count, lawson_tensor_id* result);
/* lawson_graph_builder_op for ops with several results, in their order: where `results` has NULL,
 * that result is not computed (only optional ones). */
LAWSON_API lawson_status lawson_graph_builder_op_results(
    lawson_graph_builder* builder, const char* op, const lawson_tensor_id* inputs,
    size_t input_count, const lawson_attribute* attributes, size_t attribute_count,
    lawson_tensor_id* const* results, size_t result_count);

#ifndef __cplusplus
/* In C: an op without attributes, written here. LAWSON_OP(builder, "add", &sum, a, b) */
#define LAWSON_OP(builder, op, result, ...)                              \
  lawson_graph_builder_op_at(                                            \
      builder, LAWSON_HERE, op, (const lawson_tensor_id[]){__VA_ARGS__}, \
      sizeof((const lawson_tensor_id[]){__VA_ARGS__}) / sizeof(lawson_tensor_id), NULL, 0, result)
#endif

/* dtype, shape and strides of a tensor so far; `uid` is 0. The name lives until the builder's next
 * call. */
LAWSON_API lawson_status lawson_graph_builder_tensor(const lawson_graph_builder* builder,
                                                     lawson_tensor_id tensor,
                                                     lawson_tensor_info* info);

typedef struct lawson_graph_output {
  size_t struct_size;
  const char* name;       /* NULL: the name that it has */
  const int64_t* strides; /* elements, one per dim; NULL: contiguous */
  int32_t alignment;      /* bytes; 0: 16 */
} lawson_graph_output;

/* `layout` NULL: contiguous, under the name that it has. An output is the result of an op, once. */
LAWSON_API lawson_status lawson_graph_builder_output(lawson_graph_builder* builder,
                                                     lawson_tensor_id tensor,
                                                     const lawson_graph_output* layout);

/* The graph: inputs and outputs bound by uid in the order in which they were declared (inputs from
 * 1 on, then outputs). What no output needs is left out. Afterwards the builder takes nothing more;
 * after an error it does. */
LAWSON_API lawson_status lawson_graph_builder_finish(lawson_graph_builder* builder,
                                                     lawson_graph** graph);

/* The backward graph of a float graph, for the inputs named in `wrt`. Its inputs: those of the
 * graph that it reads, then a cotangent `d_NAME` for each float output NAME; its outputs: a
 * gradient `d_NAME` for each name of `wrt`, in that order, with that input's shape and dtype.
 * LAWSON_UNSUPPORTED, with the op and where it was written: an op without a gradient. */
LAWSON_API lawson_status lawson_graph_gradient(const lawson_graph* graph, const char* const* wrt,
                                               size_t count, lawson_graph** gradient);

/* ---- fusing: exactly this graph as one plan, or an error ---------------------------------------
 */

/* Append-only. */
typedef enum lawson_policy {
  LAWSON_POLICY_UNSET = 0,   /* LAWSON_POLICY of the environment, else require */
  LAWSON_POLICY_REQUIRE = 1, /* the one engine builds it, or it is an error */
  LAWSON_POLICY_ALLOW = 2    /* engines in order; the fusion says which one runs, and why */
} lawson_policy;

typedef struct lawson_fuse_options {
  size_t struct_size;
  int32_t policy; /* lawson_policy */
  /* NULL: LAWSON_ENGINE of the environment (names with commas between), else cudnn, with policy
   * allow cudnn, then cpu. */
  const char* const* engines;
  size_t engine_count;
  /* NULL: defaults. Its `engine` must be NULL; its strength is at least LAWSON_BUILT in any case,
   * and LAWSON_VERIFIED is for lawson_probe. */
  const lawson_options* options;
  void* stream; /* a CUstream: while it captures, a plan that is not ready is an error */
} lawson_fuse_options;

/* A loaded plan, and how it was chosen. Immutable: read and executed by several threads at once. */
typedef struct lawson_fusion lawson_fusion;

/* The loaded plan for this graph, from the process's cache; built once however many threads ask.
 * `device` NULL: where the engine runs: cudnn on this machine's first GPU, cpu and reference on the
 * host. `options` NULL: defaults.
 * LAWSON_UNSUPPORTED: the message has every reason, the op and where it was written, and the
 * nearest supported form. LAWSON_UNAVAILABLE: the engine or its device is not there; the message
 * says how to name another engine. With policy allow these two lead to the next engine, and
 * anything else that goes wrong is an error all the same. */
LAWSON_API lawson_status lawson_fuse(const lawson_graph* graph, const lawson_device* device,
                                     const lawson_fuse_options* options, lawson_fusion** fusion);
LAWSON_API void lawson_fusion_destroy(lawson_fusion* fusion);

/* Borrowed; they live as long as the fusion. NULL of NULL. */
LAWSON_API const lawson_plan* lawson_fusion_plan(const lawson_fusion* fusion);
LAWSON_API const lawson_verdict* lawson_fusion_verdict(const lawson_fusion* fusion);
LAWSON_API const lawson_device* lawson_fusion_device(const lawson_fusion* fusion);
LAWSON_API const lawson_graph* lawson_fusion_graph(const lawson_fusion* fusion);
/* {"policy", "policy_from", "engines", "engines_from", "engine", "target", "plan_id",
 * "tried": [{"engine", "status", "reasons"}], "verdict", "graph"}; `_from`: "argument",
 * "environment" or "default"; `tried`: the engines before the one that runs, and why they do not.
 */
LAWSON_API lawson_status lawson_fusion_json(const lawson_fusion* fusion, lawson_text** json);

/* lawson_plan_execute of its plan. Bindings: host memory where its device is the CPU. */
LAWSON_API lawson_status lawson_fusion_execute(const lawson_fusion* fusion,
                                               const lawson_binding* bindings, size_t count,
                                               void* workspace, size_t workspace_size,
                                               void* stream);

#ifdef __cplusplus
}
#endif

#endif /* LAWSON_FUSION_H_ */
