/* The fusion part of the ABI from C11. */
#include "fusion_abi.h"

#include <lawson/lawson.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      printf("fusion_abi.c:%d: %s (last message: %s)\n", __LINE__, #condition, \
             lawson_last_error_message());                                     \
      ++failures;                                                              \
    }                                                                          \
  } while (0)
#define EXPECT_OK(call) EXPECT((call) == LAWSON_OK)
#define EXPECT_INVALID(call, part) \
  EXPECT((call) == LAWSON_INVALID_ARGUMENT && strstr(lawson_last_error_message(), part))

AbiFunction const kFusionFunctions[] = {
    (AbiFunction)lawson_graph_builder_create,
    (AbiFunction)lawson_graph_builder_destroy,
    (AbiFunction)lawson_graph_builder_strict,
    (AbiFunction)lawson_graph_builder_source,
    (AbiFunction)lawson_graph_builder_input,
    (AbiFunction)lawson_graph_builder_op,
    (AbiFunction)lawson_graph_builder_op_at,
    (AbiFunction)lawson_graph_builder_op_results,
    (AbiFunction)lawson_graph_builder_tensor,
    (AbiFunction)lawson_graph_builder_output,
    (AbiFunction)lawson_graph_builder_finish,
    (AbiFunction)lawson_graph_gradient,
    (AbiFunction)lawson_fuse,
    (AbiFunction)lawson_fusion_destroy,
    (AbiFunction)lawson_fusion_plan,
    (AbiFunction)lawson_fusion_verdict,
    (AbiFunction)lawson_fusion_device,
    (AbiFunction)lawson_fusion_graph,
    (AbiFunction)lawson_fusion_json,
    (AbiFunction)lawson_fusion_execute,
    (AbiFunction)lawson_device_capturing,
    (AbiFunction)lawson_memory_create,
    (AbiFunction)lawson_memory_destroy,
    (AbiFunction)lawson_memory_data,
    (AbiFunction)lawson_memory_size,
    (AbiFunction)lawson_memory_write,
    (AbiFunction)lawson_memory_read,
};
const size_t kFusionFunctionCount = sizeof(kFusionFunctions) / sizeof(kFusionFunctions[0]);

void fusion_layout(void) {
#define VALUE(name) printf("%s %d\n", #name, (int)name)
#define SIZE(type) printf("%s %zu\n", #type, sizeof(type))
#define FIELD(type, field) printf("  %s %zu\n", #field, offsetof(type, field))
  VALUE(LAWSON_NO_TENSOR);
  VALUE(LAWSON_ATTRIBUTE_INTEGER);
  VALUE(LAWSON_ATTRIBUTE_NUMBER);
  VALUE(LAWSON_ATTRIBUTE_FLAG);
  VALUE(LAWSON_ATTRIBUTE_DTYPE);
  VALUE(LAWSON_ATTRIBUTE_INTEGERS);
  VALUE(LAWSON_ATTRIBUTE_TEXT);
  VALUE(LAWSON_POLICY_UNSET);
  VALUE(LAWSON_POLICY_REQUIRE);
  VALUE(LAWSON_POLICY_ALLOW);
  SIZE(lawson_tensor_id);
  SIZE(lawson_graph_input);
  FIELD(lawson_graph_input, struct_size);
  FIELD(lawson_graph_input, name);
  FIELD(lawson_graph_input, dtype);
  FIELD(lawson_graph_input, rank);
  FIELD(lawson_graph_input, shape);
  FIELD(lawson_graph_input, strides);
  FIELD(lawson_graph_input, alignment);
  FIELD(lawson_graph_input, by_value);
  SIZE(lawson_attribute);
  FIELD(lawson_attribute, name);
  FIELD(lawson_attribute, type);
  FIELD(lawson_attribute, integer);
  FIELD(lawson_attribute, number);
  FIELD(lawson_attribute, integers);
  FIELD(lawson_attribute, text);
  SIZE(lawson_graph_output);
  FIELD(lawson_graph_output, struct_size);
  FIELD(lawson_graph_output, name);
  FIELD(lawson_graph_output, strides);
  FIELD(lawson_graph_output, alignment);
  SIZE(lawson_fuse_options);
  FIELD(lawson_fuse_options, struct_size);
  FIELD(lawson_fuse_options, policy);
  FIELD(lawson_fuse_options, engines);
  FIELD(lawson_fuse_options, engine_count);
  FIELD(lawson_fuse_options, options);
  FIELD(lawson_fuse_options, stream);
}

static void nulls(void) {
  lawson_graph_builder* builder = NULL;
  lawson_tensor_id id = LAWSON_NO_TENSOR;
  EXPECT_INVALID(lawson_graph_builder_create("x", NULL), "'builder' is NULL");
  EXPECT_OK(lawson_graph_builder_create(NULL, &builder));
  EXPECT_INVALID(lawson_graph_builder_strict(NULL, 1), "'builder' is NULL");
  EXPECT_INVALID(lawson_graph_builder_source(NULL, ""), "'builder' is NULL");
  EXPECT_INVALID(lawson_graph_builder_input(NULL, NULL, &id), "'builder' is NULL");
  EXPECT_INVALID(lawson_graph_builder_input(builder, NULL, &id), "'input' is NULL");
  EXPECT_INVALID(lawson_graph_builder_op(NULL, "neg", NULL, 0, NULL, 0, &id), "'builder' is NULL");
  EXPECT_INVALID(lawson_graph_builder_op(builder, NULL, NULL, 0, NULL, 0, &id), "'op' is NULL");
  EXPECT_INVALID(lawson_graph_builder_op(builder, "neg", NULL, 1, NULL, 0, &id),
                 "'inputs' is NULL");
  EXPECT_INVALID(lawson_graph_builder_op(builder, "neg", NULL, 0, NULL, 1, &id),
                 "'attributes' is NULL");
  EXPECT_INVALID(lawson_graph_builder_op(builder, "neg", NULL, 0, NULL, 0, NULL),
                 "'result' is NULL");
  EXPECT_INVALID(lawson_graph_builder_op_at(builder, "a.c:1", "neg", NULL, 0, NULL, 0, NULL),
                 "'result' is NULL");
  EXPECT_INVALID(lawson_graph_builder_op_at(builder, "a\nb", "neg", NULL, 0, NULL, 0, &id),
                 "'source' has control");
  EXPECT_INVALID(lawson_graph_builder_op_results(builder, "neg", NULL, 0, NULL, 0, NULL, 1),
                 "'results' is NULL");
  EXPECT_INVALID(lawson_graph_builder_tensor(NULL, id, NULL), "'builder' is NULL");
  EXPECT_INVALID(lawson_graph_builder_tensor(builder, id, NULL), "'info' is NULL");
  EXPECT_INVALID(lawson_graph_builder_output(NULL, id, NULL), "'builder' is NULL");
  EXPECT_INVALID(lawson_graph_builder_finish(NULL, NULL), "'builder' is NULL");
  EXPECT_INVALID(lawson_graph_builder_finish(builder, NULL), "'graph' is NULL");
  EXPECT_INVALID(lawson_graph_gradient(NULL, NULL, 0, NULL), "'graph' is NULL");
  EXPECT_INVALID(lawson_fuse(NULL, NULL, NULL, NULL), "'graph' is NULL");
  EXPECT_INVALID(lawson_fusion_json(NULL, NULL), "'fusion' is NULL");
  EXPECT_INVALID(lawson_fusion_execute(NULL, NULL, 0, NULL, 0, NULL), "'fusion' is NULL");
  EXPECT_INVALID(lawson_device_capturing(NULL, NULL, NULL), "'device' is NULL");
  EXPECT_INVALID(lawson_memory_create(NULL, 1, NULL), "'device' is NULL");
  EXPECT_INVALID(lawson_memory_write(NULL, 0, NULL, 0), "'memory' is NULL");
  EXPECT_INVALID(lawson_memory_read(NULL, 0, NULL, 0), "'memory' is NULL");
  EXPECT(lawson_fusion_plan(NULL) == NULL && lawson_fusion_verdict(NULL) == NULL);
  EXPECT(lawson_fusion_device(NULL) == NULL && lawson_fusion_graph(NULL) == NULL);
  EXPECT(lawson_memory_data(NULL) == NULL && lawson_memory_size(NULL) == 0);
  lawson_graph_builder_destroy(builder);
  lawson_graph_builder_destroy(NULL);
  lawson_fusion_destroy(NULL);
  lawson_memory_destroy(NULL);
}

/* y = reduce_sum(x * 2 + 1) over the last axis. */
static lawson_graph* build(void) {
  lawson_graph_builder* builder = NULL;
  lawson_graph* graph = NULL;
  lawson_tensor_id x, two, one, scaled, moved, sum;
  const int64_t axes[] = {1};
  const lawson_attribute two_is[] = {LAWSON_NUMBER("value", 2), LAWSON_DTYPE(LAWSON_DTYPE_F32)};
  const lawson_attribute one_is[] = {LAWSON_INTEGER("value", 1)};
  const lawson_attribute rows[] = {LAWSON_INTEGERS("axes", axes), LAWSON_FLAG("keepdims", 0)};
  const lawson_graph_input input = {.struct_size = sizeof input,
                                    .name = "x",
                                    .dtype = LAWSON_DTYPE_F32,
                                    .rank = 2,
                                    .shape = {3, 4}};
  const lawson_graph_output output = {.struct_size = sizeof output, .name = "y"};
  EXPECT_OK(lawson_graph_builder_create("abi", &builder));
  EXPECT_OK(lawson_graph_builder_strict(builder, 1));
  const char* const source = LAWSON_HERE;
  EXPECT_OK(lawson_graph_builder_source(builder, source));
  EXPECT_OK(lawson_graph_builder_input(builder, &input, &x));
  EXPECT_OK(lawson_graph_builder_op(builder, "constant", NULL, 0, two_is, 2, &two));
  EXPECT_OK(lawson_graph_builder_op(builder, "constant", NULL, 0, one_is, 1, &one));
  EXPECT_OK(LAWSON_OP(builder, "mul", &scaled, x, two));
  EXPECT_OK(LAWSON_OP(builder, "add", &moved, scaled, one));
  /* LAWSON_OP's line is its own op's, also after an error. */
  EXPECT_INVALID(LAWSON_OP(builder, "nope", &sum, x), LAWSON_HERE);
  EXPECT_INVALID(lawson_graph_builder_op(builder, "nope", &x, 1, NULL, 0, &sum), source);
  EXPECT_OK(lawson_graph_builder_op(builder, "reduce_sum", &moved, 1, rows, 2, &sum));
  lawson_tensor_info info = {.struct_size = sizeof info};
  EXPECT_OK(lawson_graph_builder_tensor(builder, sum, &info));
  EXPECT(info.rank == 1 && info.shape[0] == 3 && strcmp(info.dtype, "f32") == 0);
  EXPECT_OK(lawson_graph_builder_output(builder, sum, &output));
  EXPECT_OK(lawson_graph_builder_finish(builder, &graph));
  EXPECT_INVALID(lawson_graph_builder_finish(builder, &graph), "finished");
  lawson_graph_builder_destroy(builder);
  return graph;
}

static void life(void) {
  lawson_graph* graph = build();
  lawson_graph* gradient = NULL;
  lawson_device* device = NULL;
  lawson_fusion* fusion = NULL;
  lawson_memory* x = NULL;
  lawson_memory* y = NULL;
  lawson_text* text = NULL;
  const char* const engines[] = {"cpu"};
  const char* const wrt[] = {"x"};
  const lawson_fuse_options options = {
      .struct_size = sizeof options, .engines = engines, .engine_count = 1};
  EXPECT_OK(lawson_graph_gradient(graph, wrt, 1, &gradient));
  EXPECT_OK(lawson_fuse(graph, NULL, &options, &fusion));
  EXPECT(strcmp(lawson_plan_engine(lawson_fusion_plan(fusion)), "cpu") == 0);
  EXPECT(strcmp(lawson_device_name(lawson_fusion_device(fusion)), "cpu") == 0);
  EXPECT(lawson_verdict_strength(lawson_fusion_verdict(fusion)) == LAWSON_BUILT);
  EXPECT(strcmp(lawson_verdict_plan_id(lawson_fusion_verdict(fusion)),
                lawson_plan_id(lawson_fusion_plan(fusion))) == 0);
  EXPECT(strcmp(lawson_graph_name(lawson_fusion_graph(fusion)), "abi") == 0);
  EXPECT_OK(lawson_fusion_json(fusion, &text));
  EXPECT(strstr(lawson_text_data(text), "\"engines_from\": \"argument\"") != NULL);

  const float values[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  float sums[3] = {0, 0, 0};
  EXPECT_OK(lawson_device_find("cpu", &device));
  EXPECT_OK(lawson_memory_create(device, sizeof values, &x));
  EXPECT_OK(lawson_memory_create(device, sizeof sums, &y));
  EXPECT(lawson_memory_size(x) == sizeof values);
  int capturing = 1;
  EXPECT_OK(lawson_device_capturing(device, NULL, &capturing));
  EXPECT(capturing == 0);
  EXPECT_OK(lawson_memory_write(x, 0, values, sizeof values));
  EXPECT_INVALID(lawson_memory_write(x, 4, values, sizeof values), "not inside");
  EXPECT_INVALID(lawson_memory_read(y, sizeof sums + 1, sums, 0), "not inside");
  const lawson_binding bindings[] = {{1, lawson_memory_data(x)}, {2, lawson_memory_data(y)}};
  const size_t size = lawson_plan_workspace_size(lawson_fusion_plan(fusion));
  lawson_memory* workspace = NULL;
  EXPECT_OK(lawson_memory_create(device, size, &workspace));
  EXPECT_OK(lawson_fusion_execute(fusion, bindings, 2, lawson_memory_data(workspace), size, NULL));
  EXPECT_OK(lawson_memory_read(y, 0, sums, sizeof sums));
  EXPECT(sums[0] == 16 && sums[1] == 48 && sums[2] == 80); /* 2 * (0 + 1 + 2 + 3) + 4, ... */

  lawson_text_destroy(text);
  lawson_memory_destroy(workspace);
  lawson_memory_destroy(y);
  lawson_memory_destroy(x);
  lawson_device_destroy(device);
  lawson_fusion_destroy(fusion);
  lawson_graph_destroy(gradient);
  lawson_graph_destroy(graph);
}

int fusion_calls(void) {
  nulls();
  life();
  return failures;
}
