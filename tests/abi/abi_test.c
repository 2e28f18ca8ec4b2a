/* The C ABI from C11: links every function, prints the layout (--layout), calls everything with
 * NULL, then once through the life of a spec, a graph, a verdict, a plan, a bundle and its data.
 *   abi_test [FOLDER] | abi_test --layout
 * Files are written to FOLDER, else to a folder of its own that does not stay. */
#define _POSIX_C_SOURCE 200809L
#include <lawson/lawson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fusion_abi.h"

static int failures = 0;

#define EXPECT(condition)                                              \
  do {                                                                 \
    if (!(condition)) {                                                \
      printf("line %d: %s (last message: %s)\n", __LINE__, #condition, \
             lawson_last_error_message());                             \
      ++failures;                                                      \
    }                                                                  \
  } while (0)
#define EXPECT_OK(call) EXPECT((call) == LAWSON_OK)
#define EXPECT_INVALID(call) \
  EXPECT((call) == LAWSON_INVALID_ARGUMENT && strstr(lawson_last_error_message(), "is NULL"))

/* Every function but those of attention_abi.c, so that the program does not link without it. */
static AbiFunction const kFunctions[] = {
    (AbiFunction)lawson_bundle_append,
    (AbiFunction)lawson_bundle_destroy,
    (AbiFunction)lawson_bundle_entry_info,
    (AbiFunction)lawson_bundle_find,
    (AbiFunction)lawson_bundle_open,
    (AbiFunction)lawson_bundle_plan,
    (AbiFunction)lawson_bundle_size,
    (AbiFunction)lawson_bundle_write,
    (AbiFunction)lawson_compile,
    (AbiFunction)lawson_compile_key,
    (AbiFunction)lawson_configure,
    (AbiFunction)lawson_data_buffer,
    (AbiFunction)lawson_data_destroy,
    (AbiFunction)lawson_data_generate,
    (AbiFunction)lawson_data_verify,
    (AbiFunction)lawson_device_destroy,
    (AbiFunction)lawson_device_find,
    (AbiFunction)lawson_device_is_present,
    (AbiFunction)lawson_device_limits,
    (AbiFunction)lawson_device_name,
    (AbiFunction)lawson_devices_json,
    (AbiFunction)lawson_explain,
    (AbiFunction)lawson_graph_destroy,
    (AbiFunction)lawson_graph_dot,
    (AbiFunction)lawson_graph_from_json,
    (AbiFunction)lawson_graph_json,
    (AbiFunction)lawson_graph_name,
    (AbiFunction)lawson_graph_print,
    (AbiFunction)lawson_graph_tensor,
    (AbiFunction)lawson_graph_tensor_count,
    (AbiFunction)lawson_info,
    (AbiFunction)lawson_last_error_message,
    (AbiFunction)lawson_model_workloads,
    (AbiFunction)lawson_plan_deserialize,
    (AbiFunction)lawson_plan_destroy,
    (AbiFunction)lawson_plan_engine,
    (AbiFunction)lawson_plan_execute,
    (AbiFunction)lawson_plan_prepare_graph,
    (AbiFunction)lawson_plan_graph,
    (AbiFunction)lawson_plan_id,
    (AbiFunction)lawson_plan_key,
    (AbiFunction)lawson_plan_load,
    (AbiFunction)lawson_plan_keep,
    (AbiFunction)lawson_plan_name,
    (AbiFunction)lawson_plan_run,
    (AbiFunction)lawson_plan_bench,
    (AbiFunction)lawson_plan_tuning,
    (AbiFunction)lawson_graph_simplified,
    (AbiFunction)lawson_plan_serialize,
    (AbiFunction)lawson_plan_target,
    (AbiFunction)lawson_plan_workspace_size,
    (AbiFunction)lawson_probe,
    (AbiFunction)lawson_probe_spec,
    (AbiFunction)lawson_spec_destroy,
    (AbiFunction)lawson_spec_from_json,
    (AbiFunction)lawson_spec_graph,
    (AbiFunction)lawson_spec_graph_count,
    (AbiFunction)lawson_spec_json,
    (AbiFunction)lawson_spec_name,
    (AbiFunction)lawson_stats_json,
    (AbiFunction)lawson_stats_reset,
    (AbiFunction)lawson_status_string,
    (AbiFunction)lawson_store_destroy,
    (AbiFunction)lawson_store_folder,
    (AbiFunction)lawson_store_keep,
    (AbiFunction)lawson_store_list,
    (AbiFunction)lawson_store_open,
    (AbiFunction)lawson_store_plan,
    (AbiFunction)lawson_store_prune,
    (AbiFunction)lawson_store_verify,
    (AbiFunction)lawson_text_data,
    (AbiFunction)lawson_text_destroy,
    (AbiFunction)lawson_text_size,
    (AbiFunction)lawson_trace_start,
    (AbiFunction)lawson_trace_stop,
    (AbiFunction)lawson_verdict_decision,
    (AbiFunction)lawson_verdict_destroy,
    (AbiFunction)lawson_verdict_engine,
    (AbiFunction)lawson_verdict_json,
    (AbiFunction)lawson_verdict_key,
    (AbiFunction)lawson_verdict_plan_id,
    (AbiFunction)lawson_verdict_reason_code,
    (AbiFunction)lawson_verdict_reason_count,
    (AbiFunction)lawson_verdict_reason_message,
    (AbiFunction)lawson_verdict_strength,
    (AbiFunction)lawson_version,
};

static void layout(void) {
#define VALUE(name) printf("%s %d\n", #name, (int)name)
#define SIZE(type) printf("%s %zu\n", #type, sizeof(type))
#define FIELD(type, field) printf("  %s %zu\n", #field, offsetof(type, field))
  VALUE(LAWSON_MAX_RANK);
  VALUE(LAWSON_OK);
  VALUE(LAWSON_UNSUPPORTED);
  VALUE(LAWSON_INVALID_ARGUMENT);
  VALUE(LAWSON_UNAVAILABLE);
  VALUE(LAWSON_OUT_OF_MEMORY);
  VALUE(LAWSON_CUDA);
  VALUE(LAWSON_CUDNN);
  VALUE(LAWSON_IO);
  VALUE(LAWSON_CANCELLED);
  VALUE(LAWSON_INTERNAL);
  VALUE(LAWSON_SUPPORTED);
  VALUE(LAWSON_NOT_SUPPORTED);
  VALUE(LAWSON_UNDECIDED);
  VALUE(LAWSON_JUDGED);
  VALUE(LAWSON_BUILT);
  VALUE(LAWSON_VERIFIED);
  VALUE(LAWSON_TUNING_OFF);
  VALUE(LAWSON_TUNING_QUICK);
  VALUE(LAWSON_TUNING_EXHAUSTIVE);
  VALUE(LAWSON_GRAPH_ADD);
  VALUE(LAWSON_GRAPH_UPDATE);
  SIZE(lawson_settings);
  FIELD(lawson_settings, struct_size);
  FIELD(lawson_settings, cudnn_path);
  FIELD(lawson_settings, max_workers);
  SIZE(lawson_tensor_info);
  FIELD(lawson_tensor_info, struct_size);
  FIELD(lawson_tensor_info, uid);
  FIELD(lawson_tensor_info, name);
  FIELD(lawson_tensor_info, dtype);
  FIELD(lawson_tensor_info, rank);
  FIELD(lawson_tensor_info, shape);
  FIELD(lawson_tensor_info, strides);
  FIELD(lawson_tensor_info, is_input);
  FIELD(lawson_tensor_info, is_by_value);
  FIELD(lawson_tensor_info, alignment);
  FIELD(lawson_tensor_info, size);
  SIZE(lawson_model_options);
  FIELD(lawson_model_options, struct_size);
  FIELD(lawson_model_options, batch);
  FIELD(lawson_model_options, seqlen);
  FIELD(lawson_model_options, context);
  FIELD(lawson_model_options, passes);
  FIELD(lawson_model_options, dtype);
  SIZE(lawson_options);
  FIELD(lawson_options, struct_size);
  FIELD(lawson_options, engine);
  FIELD(lawson_options, strength);
  FIELD(lawson_options, workspace_limit);
  FIELD(lawson_options, deterministic);
  FIELD(lawson_options, deadline_ms);
  FIELD(lawson_options, tuning);
  FIELD(lawson_options, retune);
  FIELD(lawson_options, dynamic_shapes);
  SIZE(lawson_binding);
  FIELD(lawson_binding, uid);
  FIELD(lawson_binding, data);
  SIZE(lawson_run_result);
  FIELD(lawson_run_result, struct_size);
  FIELD(lawson_run_result, milliseconds_min);
  FIELD(lawson_run_result, milliseconds_median);
  FIELD(lawson_run_result, milliseconds_max);
  printf("lawson_bundle_entry %zu\n", sizeof(lawson_bundle_entry));
  FIELD(lawson_bundle_entry, struct_size);
  FIELD(lawson_bundle_entry, key);
  FIELD(lawson_bundle_entry, plan_id);
  FIELD(lawson_bundle_entry, target);
  FIELD(lawson_bundle_entry, engine);
  FIELD(lawson_bundle_entry, engine_version);
  FIELD(lawson_bundle_entry, device_fingerprint);
  FIELD(lawson_bundle_entry, size);
  FIELD(lawson_bundle_entry, stored_size);
  attention_layout();
  fusion_layout();
}

static void nulls(void) {
  EXPECT_INVALID(lawson_configure(NULL));
  EXPECT_INVALID(lawson_info(NULL));
  EXPECT_INVALID(lawson_device_find(NULL, NULL));
  EXPECT_INVALID(lawson_devices_json(NULL));
  EXPECT_INVALID(lawson_spec_from_json(NULL, 0, NULL, NULL));
  EXPECT_INVALID(lawson_spec_json(NULL, NULL));
  EXPECT_INVALID(lawson_spec_graph(NULL, 0, NULL));
  EXPECT_INVALID(lawson_graph_from_json(NULL, 0, NULL, NULL));
  EXPECT_INVALID(lawson_graph_json(NULL, NULL));
  EXPECT_INVALID(lawson_graph_print(NULL, NULL));
  EXPECT_INVALID(lawson_graph_dot(NULL, NULL));
  EXPECT_INVALID(lawson_graph_tensor(NULL, 0, NULL));
  EXPECT_INVALID(lawson_model_workloads(NULL, 0, NULL, NULL, NULL));
  EXPECT_INVALID(lawson_probe(NULL, NULL, NULL, NULL));
  EXPECT_INVALID(lawson_probe_spec(NULL, NULL, NULL, NULL));
  EXPECT_INVALID(lawson_verdict_json(NULL, NULL));
  EXPECT_INVALID(lawson_explain(NULL, NULL, NULL, 0, NULL));
  EXPECT_INVALID(lawson_compile(NULL, NULL, NULL, NULL));
  EXPECT_INVALID(lawson_plan_graph(NULL, NULL));
  EXPECT_INVALID(lawson_graph_simplified(NULL, NULL));
  EXPECT_INVALID(lawson_plan_tuning(NULL, NULL));
  EXPECT_INVALID(lawson_plan_bench(NULL, 0, 1, NULL));
  EXPECT_INVALID(lawson_device_limits(NULL, NULL, NULL));
  EXPECT_INVALID(lawson_plan_serialize(NULL, NULL));
  EXPECT_INVALID(lawson_plan_deserialize(NULL, 0, NULL));
  EXPECT_INVALID(lawson_plan_load(NULL, NULL));
  EXPECT_INVALID(lawson_plan_keep(NULL, NULL, NULL));
  EXPECT_INVALID(lawson_plan_execute(NULL, NULL, 0, NULL, 0, NULL));
  EXPECT_INVALID(lawson_plan_prepare_graph(NULL, LAWSON_GRAPH_ADD, NULL, 0, NULL, 0, NULL));
  EXPECT_INVALID(lawson_bundle_write(NULL, NULL, 0));
  EXPECT_INVALID(lawson_bundle_open(NULL, NULL));
  EXPECT_INVALID(lawson_bundle_plan(NULL, 0, NULL));
  EXPECT_INVALID(lawson_bundle_append(NULL, NULL, 0));
  EXPECT_INVALID(lawson_bundle_find(NULL, NULL, NULL));
  EXPECT_INVALID(lawson_bundle_entry_info(NULL, 0, NULL));
  EXPECT_INVALID(lawson_compile_key(NULL, NULL, NULL, NULL));
  EXPECT_INVALID(lawson_store_open(NULL));
  EXPECT_INVALID(lawson_store_list(NULL, NULL));
  EXPECT_INVALID(lawson_store_verify(NULL, 0, NULL));
  EXPECT_INVALID(lawson_store_prune(NULL, -1, -1, NULL));
  EXPECT_INVALID(lawson_store_plan(NULL, NULL, NULL));
  EXPECT_INVALID(lawson_store_keep(NULL, NULL));
  EXPECT_INVALID(lawson_data_generate(NULL, 0, NULL));
  EXPECT_INVALID(lawson_data_buffer(NULL, 0, NULL, NULL));
  EXPECT_INVALID(lawson_plan_run(NULL, NULL, 0, NULL));
  EXPECT_INVALID(lawson_data_verify(NULL, NULL, NULL, NULL));
  EXPECT_INVALID(lawson_stats_json(NULL));
  EXPECT_INVALID(lawson_trace_start(NULL));
  EXPECT_INVALID(lawson_attention_config_create(NULL));
  EXPECT_INVALID(lawson_attention_config_set_attribute(NULL, 1, NULL, 0));
  EXPECT_INVALID(lawson_attention_config_get_attribute(NULL, 1, NULL, 0, NULL));
  EXPECT_INVALID(lawson_attention_config_from_spec(NULL, 0, NULL, NULL));
  EXPECT_INVALID(lawson_attention_config_spec(NULL, NULL));
  EXPECT_INVALID(lawson_graph_from_attention(NULL, LAWSON_PASS_FORWARD, NULL));
  EXPECT_INVALID(lawson_attention_select(NULL, NULL, NULL, NULL));
  EXPECT_INVALID(lawson_attention_fwd_params_create(NULL));
  EXPECT_INVALID(lawson_attention_fwd_params_set_attribute(NULL, 1, NULL, 0));
  EXPECT_INVALID(lawson_attention_fwd_params_get_attribute(NULL, 1, NULL, 0, NULL));
  EXPECT_INVALID(lawson_attention_fwd_params_set_pointers(NULL, NULL, 0));
  EXPECT_INVALID(lawson_attention_fwd_params_derive(NULL, NULL));
  EXPECT_INVALID(lawson_attention_fwd_params_plan(NULL, NULL));
  EXPECT_INVALID(lawson_attention_fwd_params_workspace_size(NULL, NULL));
  EXPECT_INVALID(lawson_attention_bwd_params_create(NULL));
  EXPECT_INVALID(lawson_attention_bwd_params_set_attribute(NULL, 1, NULL, 0));
  EXPECT_INVALID(lawson_attention_bwd_params_get_attribute(NULL, 1, NULL, 0, NULL));
  EXPECT_INVALID(lawson_attention_bwd_params_set_pointers(NULL, NULL, 0));
  EXPECT_INVALID(lawson_attention_bwd_params_derive(NULL, NULL));
  EXPECT_INVALID(lawson_attention_bwd_params_plan(NULL, NULL));
  EXPECT_INVALID(lawson_attention_bwd_params_workspace_size(NULL, NULL));
  EXPECT_INVALID(lawson_attention_forward(NULL, NULL, 0, NULL));
  EXPECT_INVALID(lawson_attention_backward(NULL, NULL, 0, NULL));

  /* Accessors and destroyers of nothing. */
  EXPECT(strcmp(lawson_text_data(NULL), "") == 0 && lawson_text_size(NULL) == 0);
  EXPECT(strcmp(lawson_device_name(NULL), "") == 0 && lawson_device_is_present(NULL) == 0);
  EXPECT(strcmp(lawson_spec_name(NULL), "") == 0 && lawson_spec_graph_count(NULL) == 0);
  EXPECT(strcmp(lawson_graph_name(NULL), "") == 0 && lawson_graph_tensor_count(NULL) == 0);
  EXPECT(lawson_verdict_decision(NULL) == LAWSON_UNDECIDED);
  EXPECT(lawson_verdict_strength(NULL) == LAWSON_JUDGED);
  EXPECT(lawson_verdict_reason_count(NULL) == 0);
  EXPECT(strcmp(lawson_verdict_engine(NULL), "") == 0 && strcmp(lawson_verdict_key(NULL), "") == 0);
  EXPECT(strcmp(lawson_verdict_plan_id(NULL), "") == 0);
  EXPECT(strcmp(lawson_verdict_reason_code(NULL, 0), "") == 0);
  EXPECT(strcmp(lawson_verdict_reason_message(NULL, 0), "") == 0);
  EXPECT(strcmp(lawson_plan_id(NULL), "") == 0 && strcmp(lawson_plan_key(NULL), "") == 0);
  EXPECT(strcmp(lawson_plan_engine(NULL), "") == 0 && strcmp(lawson_plan_name(NULL), "") == 0);
  EXPECT(strcmp(lawson_store_folder(NULL), "") == 0);
  EXPECT(strcmp(lawson_plan_target(NULL), "") == 0 && lawson_plan_workspace_size(NULL) == 0);
  EXPECT(lawson_bundle_size(NULL) == 0);
  lawson_text_destroy(NULL);
  lawson_device_destroy(NULL);
  lawson_spec_destroy(NULL);
  lawson_graph_destroy(NULL);
  lawson_verdict_destroy(NULL);
  lawson_plan_destroy(NULL);
  lawson_bundle_destroy(NULL);
  lawson_store_destroy(NULL);
  lawson_data_destroy(NULL);
  lawson_attention_config_destroy(NULL);
  lawson_attention_fwd_params_destroy(NULL);
  lawson_attention_bwd_params_destroy(NULL);
  EXPECT(strcmp(lawson_status_string((lawson_status)77), "unknown status") == 0);
}

static const char kSpec[] =
    "{\"lawson\": 1, \"kind\": \"graph\", \"name\": \"abi\","
    " \"inputs\": [{\"name\": \"x\", \"dtype\": \"f32\", \"shape\": [1, 8, 4]},"
    "              {\"name\": \"y\", \"dtype\": \"f32\", \"shape\": [1, 4, 8]}],"
    " \"ops\": [{\"op\": \"matmul\", \"in\": [\"x\", \"y\"], \"out\": \"z\"}], \"outputs\": "
    "[\"z\"]}";

/* A JSON document that some function hands out. */
static void expect_text(lawson_text* text, const char* part) {
  EXPECT(text != NULL && strstr(lawson_text_data(text), part) != NULL);
  EXPECT(strlen(lawson_text_data(text)) == lawson_text_size(text));
  lawson_text_destroy(text);
}

static void execute(lawson_plan* plan) {
  static float x[32];
  static float y[32];
  static float z[64];
  for (int i = 0; i < 32; ++i) {
    x[i] = (float)(i % 5);
    y[i] = (float)(i % 3);
  }
  const lawson_binding bindings[] = {{1, x}, {2, y}, {3, z}};
  const size_t workspace_size = lawson_plan_workspace_size(plan);
  void* workspace = aligned_alloc(64, (workspace_size / 64 + 1) * 64);
  EXPECT_OK(lawson_plan_execute(plan, bindings, 3, workspace, workspace_size, NULL));
  int graph = 0; /* nobody looks into it */
  EXPECT(lawson_plan_prepare_graph(plan, LAWSON_GRAPH_ADD, bindings, 3, workspace, workspace_size,
                                   &graph) == LAWSON_UNSUPPORTED);
  EXPECT(strstr(lawson_last_error_message(), "cpu") != NULL);
  EXPECT(lawson_plan_prepare_graph(plan, (lawson_graph_use)7, bindings, 3, workspace,
                                   workspace_size, &graph) == LAWSON_INVALID_ARGUMENT);
  EXPECT(strstr(lawson_last_error_message(), "use: 7") != NULL);
  EXPECT_INVALID(lawson_plan_prepare_graph(plan, LAWSON_GRAPH_UPDATE, bindings, 3, workspace,
                                           workspace_size, NULL));
  free(workspace);
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = 0;
      for (int k = 0; k < 4; ++k) sum += x[i * 4 + k] * y[k * 8 + j];
      EXPECT(z[i * 8 + j] == sum); /* small integers: exact in any order */
    }
  }
}

static void life(const char* folder) {
  lawson_text* text = NULL;
  lawson_device* device = NULL;
  lawson_spec* spec = NULL;
  lawson_graph* graph = NULL;
  lawson_verdict* verdict = NULL;
  lawson_plan* plan = NULL;
  EXPECT_OK(lawson_info(&text));
  expect_text(text, "\"version\"");
  EXPECT_OK(lawson_devices_json(&text));
  expect_text(text, "\"cpu\"");
  EXPECT_OK(lawson_device_find("cpu", &device));
  EXPECT(lawson_device_is_present(device) == 1 && strcmp(lawson_device_name(device), "cpu") == 0);

  EXPECT_OK(lawson_spec_from_json(kSpec, strlen(kSpec), "abi.json", &spec));
  EXPECT(strcmp(lawson_spec_name(spec), "abi") == 0 && lawson_spec_graph_count(spec) == 1);
  EXPECT_OK(lawson_spec_json(spec, &text));
  expect_text(text, "\"matmul\"");
  EXPECT_OK(lawson_graph_from_json(kSpec, strlen(kSpec), NULL, &graph));
  lawson_graph_destroy(graph);
  EXPECT_OK(lawson_spec_graph(spec, 0, &graph));
  EXPECT(strcmp(lawson_graph_name(graph), "abi") == 0);
  EXPECT_OK(lawson_graph_json(graph, &text));
  expect_text(text, "\"inputs\"");
  EXPECT_OK(lawson_graph_print(graph, &text));
  expect_text(text, "matmul(x, y)");
  EXPECT_OK(lawson_graph_dot(graph, &text));
  expect_text(text, "digraph");
  EXPECT(lawson_graph_tensor_count(graph) == 3);
  lawson_tensor_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  EXPECT_OK(lawson_graph_tensor(graph, 2, &info));
  EXPECT(info.uid == 3 && strcmp(info.name, "z") == 0 && strcmp(info.dtype, "f32") == 0);
  EXPECT(info.rank == 3 && info.shape[1] == 8 && info.strides[0] == 64 && info.size == 256);
  EXPECT(info.is_input == 0 && info.is_by_value == 0 && info.alignment == 16);

  lawson_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.engine = "reference";
  options.workspace_limit = -1;
  EXPECT_OK(lawson_probe(graph, device, &options, &verdict));
  EXPECT(lawson_verdict_decision(verdict) == LAWSON_SUPPORTED);
  EXPECT(strcmp(lawson_verdict_engine(verdict), "reference") == 0);
  lawson_verdict_destroy(verdict);
  EXPECT_OK(lawson_probe_spec(spec, device, NULL, &verdict));
  EXPECT(lawson_verdict_decision(verdict) == LAWSON_SUPPORTED);
  EXPECT(lawson_verdict_strength(verdict) == LAWSON_JUDGED);
  EXPECT(strlen(lawson_verdict_key(verdict)) == 32);
  EXPECT(lawson_verdict_reason_count(verdict) == 0);
  EXPECT_OK(lawson_verdict_json(verdict, &text));
  expect_text(text, "\"verdict\": \"supported\"");
  EXPECT_OK(lawson_explain(spec, device, NULL, 4, &text));
  expect_text(text, "\"neighbours\"");

  EXPECT_OK(lawson_compile(graph, device, NULL, &plan));
  EXPECT(strcmp(lawson_plan_key(plan), lawson_verdict_key(verdict)) == 0);
  EXPECT(strcmp(lawson_plan_engine(plan), "cpu") == 0);
  EXPECT(strcmp(lawson_plan_target(plan), "cpu") == 0);
  EXPECT(strlen(lawson_plan_id(plan)) == 32 && lawson_plan_name(plan)[0] != '\0');
  lawson_text* bytes = NULL;
  EXPECT_OK(lawson_plan_serialize(plan, &bytes));
  lawson_plan* read = NULL;
  EXPECT_OK(lawson_plan_deserialize(lawson_text_data(bytes), lawson_text_size(bytes), &read));
  EXPECT(strcmp(lawson_plan_id(read), lawson_plan_id(plan)) == 0);
  EXPECT(lawson_plan_deserialize(lawson_text_data(bytes), lawson_text_size(bytes) - 1, &read) ==
         LAWSON_INVALID_ARGUMENT);
  lawson_text_destroy(bytes);
  EXPECT(lawson_plan_execute(read, NULL, 0, NULL, 0, NULL) == LAWSON_INVALID_ARGUMENT);
  EXPECT_OK(lawson_plan_load(read, device));
  execute(read);

  char path[1024];
  snprintf(path, sizeof path, "%s/abi_test.bundle", folder);
  const lawson_plan* plans[] = {plan};
  EXPECT_OK(lawson_bundle_write(path, plans, 1));
  lawson_bundle* bundle = NULL;
  EXPECT_OK(lawson_bundle_open(path, &bundle));
  EXPECT(lawson_bundle_size(bundle) == 1);
  lawson_plan* bundled = NULL;
  EXPECT_OK(lawson_bundle_plan(bundle, 0, &bundled));
  EXPECT(strcmp(lawson_plan_id(bundled), lawson_plan_id(plan)) == 0);
  lawson_bundle_entry entry;
  memset(&entry, 0, sizeof entry);
  EXPECT(lawson_bundle_entry_info(bundle, 0, &entry) == LAWSON_INVALID_ARGUMENT); /* struct_size */
  entry.struct_size = sizeof entry;
  EXPECT(lawson_bundle_entry_info(bundle, 1, &entry) == LAWSON_INVALID_ARGUMENT);
  EXPECT_OK(lawson_bundle_entry_info(bundle, 0, &entry));
  EXPECT(strcmp(entry.key, lawson_plan_key(plan)) == 0);
  EXPECT(strcmp(entry.plan_id, lawson_plan_id(plan)) == 0);
  EXPECT(strcmp(entry.target, "cpu") == 0 && strcmp(entry.engine, "cpu") == 0);
  EXPECT(entry.engine_version[0] != '\0' && strlen(entry.device_fingerprint) == 32);
  EXPECT(entry.size > 0 && entry.stored_size > 0);
  EXPECT_OK(lawson_compile_key(graph, device, NULL, &text));
  lawson_plan* found = NULL;
  EXPECT_OK(lawson_bundle_find(bundle, lawson_text_data(text), &found));
  EXPECT(found != NULL && strcmp(lawson_plan_id(found), lawson_plan_id(plan)) == 0);
  lawson_text_destroy(text);
  lawson_plan_destroy(found);
  EXPECT_OK(lawson_bundle_find(bundle, "another", &found));
  EXPECT(found == NULL);
  lawson_bundle_destroy(bundle);
  EXPECT_OK(lawson_bundle_append(path, plans, 1));
  EXPECT_OK(lawson_bundle_open(path, &bundle));
  EXPECT(lawson_bundle_size(bundle) == 1);
  lawson_bundle_destroy(bundle);
  remove(path);

  lawson_graph* of_plan = NULL;
  EXPECT_OK(lawson_plan_graph(plan, &of_plan));
  lawson_data* data = NULL;
  EXPECT_OK(lawson_data_generate(of_plan, 7, &data));
  void* buffer = NULL;
  size_t size = 0;
  EXPECT_OK(lawson_data_buffer(data, 1, &buffer, &size));
  EXPECT(size == 128 && buffer != NULL);
  EXPECT(lawson_data_buffer(data, 4, &buffer, &size) == LAWSON_INVALID_ARGUMENT);
  lawson_run_result result;
  memset(&result, 0, sizeof result);
  result.struct_size = sizeof result;
  EXPECT_OK(lawson_plan_run(read, data, 3, &result));
  EXPECT(result.milliseconds_min > 0 && result.milliseconds_min <= result.milliseconds_median);
  EXPECT(result.milliseconds_median <= result.milliseconds_max);
  int ok = 0;
  EXPECT_OK(lawson_data_verify(read, data, &ok, &text));
  EXPECT(ok == 1);
  expect_text(text, "\"ok\": true");
  ((float*)buffer)[0] += 1; /* another input: the outputs no longer fit */
  EXPECT_OK(lawson_data_verify(read, data, &ok, NULL));
  EXPECT(ok == 0);

  EXPECT_OK(lawson_plan_tuning(plan, &text));
  expect_text(text, "{}");
  EXPECT_OK(lawson_plan_bench(read, 1, 3, &text));
  expect_text(text, "\"rounds\": 3");
  EXPECT(lawson_plan_bench(read, 1, 0, &text) == LAWSON_INVALID_ARGUMENT);
  EXPECT(lawson_plan_bench(plan, 1, 1, &text) == LAWSON_INVALID_ARGUMENT); /* not loaded */
  EXPECT(lawson_device_limits(device, "no such engine", &text) == LAWSON_INVALID_ARGUMENT);
  lawson_graph* simplified = NULL;
  EXPECT_OK(lawson_graph_simplified(graph, &simplified));
  EXPECT(lawson_graph_tensor_count(simplified) == lawson_graph_tensor_count(graph));
  lawson_graph_destroy(simplified);

  lawson_data_destroy(data);
  lawson_graph_destroy(of_plan);
  lawson_plan_destroy(bundled);
  lawson_plan_destroy(read);
  lawson_plan_destroy(plan);
  lawson_verdict_destroy(verdict);
  lawson_graph_destroy(graph);
  lawson_spec_destroy(spec);
  lawson_device_destroy(device);
}

static void model(void) {
  static const char config[] =
      "{\"model_type\": \"llama\", \"hidden_size\": 512, \"num_hidden_layers\": 2,"
      " \"num_attention_heads\": 8, \"intermediate_size\": 1024, \"vocab_size\": 1000}";
  lawson_model_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.passes = "decode";
  lawson_text* json = NULL;
  EXPECT_OK(lawson_model_workloads(config, strlen(config), "llama.json", &options, &json));
  expect_text(json, "attention.full.decode");
}

/* Around the life of a plan: what was counted, and a trace of it. */
static void diagnostics(const char* folder) {
  EXPECT(lawson_trace_stop() == LAWSON_INVALID_ARGUMENT);
  EXPECT(lawson_trace_start("") == LAWSON_INVALID_ARGUMENT);
  EXPECT(lawson_trace_start(folder) == LAWSON_INVALID_ARGUMENT); /* a folder */
  char path[512];
  snprintf(path, sizeof path, "%s/nowhere/trace.json", folder);
  EXPECT(lawson_trace_start(path) == LAWSON_INVALID_ARGUMENT);
  EXPECT(strstr(lawson_last_error_message(), path) != NULL);
  snprintf(path, sizeof path, "%s/abi-trace.json", folder);
  EXPECT_OK(lawson_trace_start(path));
  EXPECT(lawson_trace_start(path) == LAWSON_INVALID_ARGUMENT); /* one at a time */
  EXPECT_OK(lawson_stats_reset());
  life(folder);
  EXPECT_OK(lawson_trace_stop());
  FILE* file = fopen(path, "r");
  char start[16] = "";
  EXPECT(file != NULL && fread(start, 1, 15, file) == 15 &&
         strcmp(start, "{\"traceEvents\":") == 0);
  if (file != NULL) fclose(file);
  lawson_text* json = NULL;
  EXPECT_OK(lawson_stats_json(&json));
  EXPECT(json != NULL && strstr(lawson_text_data(json), "\"engine\":\"cpu\"") != NULL);
  lawson_text_destroy(json);
  EXPECT_OK(lawson_stats_reset());
  EXPECT_OK(lawson_stats_json(&json));
  expect_text(json, "\"threads\":[]");
}

int main(int argc, char** argv) {
  if (argc > 1 && strcmp(argv[1], "--layout") == 0) {
    layout();
    return 0;
  }
  for (size_t i = 0; i < sizeof kFunctions / sizeof kFunctions[0]; ++i) {
    EXPECT(kFunctions[i] != NULL);
  }
  for (size_t i = 0; i < kAttentionFunctionCount; ++i) {
    EXPECT(kAttentionFunctions[i] != NULL);
  }
  for (size_t i = 0; i < kFusionFunctionCount; ++i) {
    EXPECT(kFusionFunctions[i] != NULL);
  }
  EXPECT(strcmp(lawson_last_error_message(), "") == 0);
  EXPECT(strcmp(lawson_status_string(LAWSON_OK), "ok") == 0);
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", LAWSON_VERSION_MAJOR, LAWSON_VERSION_MINOR,
           LAWSON_VERSION_PATCH);
  EXPECT(strcmp(lawson_version(), version) == 0);
  nulls();
  lawson_settings settings;
  memset(&settings, 0, sizeof settings);
  settings.struct_size = sizeof settings;
  settings.max_workers = 1;
  EXPECT_OK(lawson_configure(&settings));
  char own[] = "/tmp/lawson-abi-test.XXXXXX";
  const char* folder = argc > 1 ? argv[1] : mkdtemp(own);
  EXPECT(folder != NULL);
  if (folder == NULL) return 1;
  diagnostics(folder);
  EXPECT(lawson_configure(&settings) == LAWSON_INVALID_ARGUMENT); /* too late */
  model();
  failures += fusion_calls();
  if (argc <= 1) {
    char path[512];
    snprintf(path, sizeof path, "%s/abi-trace.json", folder);
    EXPECT(remove(path) == 0);
    EXPECT(rmdir(folder) == 0); /* nothing else is left there */
  }
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
