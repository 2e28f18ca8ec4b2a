/* A fused MLP in C: y = gelu(x W1 + b1) W2 + b2 as two fusions, built op by op, each one kernel or
 * an error. The numbers are compared with a plain loop.
 *   fused_mlp_c [ENGINE]      cpu (default), or cudnn: on this machine's first GPU
 * Exit 0: right numbers, 1: wrong ones, 3: an error. */
#include <lawson/lawson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kRows = 64, kWidth = 128, kHidden = 256 };

static float x[kRows * kWidth], w1[kWidth * kHidden], b1[kHidden], h[kRows * kHidden];
static float w2[kHidden * kWidth], b2[kWidth], y[kRows * kWidth], want[kRows * kWidth];

static void check(lawson_status status) {
  if (status == LAWSON_OK) return;
  fprintf(stderr, "%s: %s\n", lawson_status_string(status), lawson_last_error_message());
  exit(3);
}

/* [example: build] */
/* f(x W + b), with x [1, rows, depth], W [1, depth, columns], b [1, 1, columns]; f NULL: none. */
static lawson_graph* layer(const char* name, int64_t rows, int64_t depth, int64_t columns,
                           const char* f) {
  const lawson_graph_input inputs[] = {{.struct_size = sizeof(inputs[0]),
                                        .name = "x",
                                        .dtype = LAWSON_DTYPE_F32,
                                        .rank = 3,
                                        .shape = {1, rows, depth}},
                                       {.struct_size = sizeof(inputs[0]),
                                        .name = "w",
                                        .dtype = LAWSON_DTYPE_F32,
                                        .rank = 3,
                                        .shape = {1, depth, columns}},
                                       {.struct_size = sizeof(inputs[0]),
                                        .name = "b",
                                        .dtype = LAWSON_DTYPE_F32,
                                        .rank = 3,
                                        .shape = {1, 1, columns}}};
  lawson_graph_builder* builder = NULL;
  lawson_graph* graph = NULL;
  lawson_tensor_id in[3], result;
  check(lawson_graph_builder_create(name, &builder));
  for (int i = 0; i < 3; ++i) check(lawson_graph_builder_input(builder, &inputs[i], &in[i]));
  check(LAWSON_OP(builder, "matmul", &result, in[0], in[1]));
  check(LAWSON_OP(builder, "add", &result, result, in[2]));
  if (f != NULL) check(LAWSON_OP(builder, f, &result, result));
  check(lawson_graph_builder_output(builder, result, NULL));
  check(lawson_graph_builder_finish(builder, &graph));
  lawson_graph_builder_destroy(builder);
  return graph;
}
/* [example: end] */

static lawson_memory* place(const lawson_device* device, const float* values, size_t size) {
  lawson_memory* memory = NULL;
  check(lawson_memory_create(device, size, &memory));
  if (values != NULL) check(lawson_memory_write(memory, 0, values, size));
  return memory;
}

static void run(const lawson_fusion* fusion, const lawson_memory* a, const lawson_memory* w,
                const lawson_memory* b, const lawson_memory* out) {
  /* [example: run] */
  const size_t size = lawson_plan_workspace_size(lawson_fusion_plan(fusion));
  lawson_memory* workspace = place(lawson_fusion_device(fusion), NULL, size);
  const lawson_binding bindings[] = {{1, lawson_memory_data(a)},
                                     {2, lawson_memory_data(w)},
                                     {3, lawson_memory_data(b)},
                                     {4, lawson_memory_data(out)}};
  check(lawson_fusion_execute(fusion, bindings, 4, lawson_memory_data(workspace), size, NULL));
  lawson_memory_destroy(workspace);
  /* [example: end] */
}

static void expected(const float* in, const float* w, const float* b, float* out, int depth,
                     int columns, int activate) {
  for (int i = 0; i < kRows * columns; ++i) {
    double sum = b[i % columns];
    for (int k = 0; k < depth; ++k) {
      sum += (double)in[i / columns * depth + k] * w[k * columns + i % columns];
    }
    out[i] = (float)(activate ? sum / 2 * erfc(-sum / sqrt(2.0)) : sum);
  }
}

static void fill(float* values, int count, double step) {
  for (int i = 0; i < count; ++i) values[i] = (float)(sin(step * i) / 8);
}

int main(int argc, char** argv) {
  fill(x, kRows * kWidth, 0.37);
  fill(w1, kWidth * kHidden, 0.71);
  fill(b1, kHidden, 1.3);
  fill(w2, kHidden * kWidth, 0.53);
  fill(b2, kWidth, 0.9);

  /* [example: fuse] */
  lawson_graph* graphs[] = {layer("mlp-up", kRows, kWidth, kHidden, "gelu"),
                            layer("mlp-down", kRows, kHidden, kWidth, NULL)};
  const char* const engines[] = {argc > 1 ? argv[1] : "cpu"};
  const lawson_fuse_options options = {.struct_size = sizeof(options),
                                       .policy = LAWSON_POLICY_REQUIRE,
                                       .engines = engines,
                                       .engine_count = 1};
  lawson_fusion* fusions[2] = {NULL, NULL};
  for (int i = 0; i < 2; ++i) {
    check(lawson_fuse(graphs[i], NULL, &options, &fusions[i]));
    const lawson_plan* plan = lawson_fusion_plan(fusions[i]);
    printf("%s: plan %s of engine %s\n", lawson_graph_name(graphs[i]), lawson_plan_id(plan),
           lawson_plan_engine(plan));
  }
  /* [example: end] */

  const lawson_device* device = lawson_fusion_device(fusions[0]);
  lawson_memory* memory[] = {place(device, x, sizeof x),   place(device, w1, sizeof w1),
                             place(device, b1, sizeof b1), place(device, NULL, sizeof h),
                             place(device, w2, sizeof w2), place(device, b2, sizeof b2),
                             place(device, NULL, sizeof y)};
  run(fusions[0], memory[0], memory[1], memory[2], memory[3]);
  run(fusions[1], memory[3], memory[4], memory[5], memory[6]);
  check(lawson_memory_read(memory[6], 0, y, sizeof y));

  expected(x, w1, b1, h, kWidth, kHidden, 1);
  expected(h, w2, b2, want, kHidden, kWidth, 0);
  double worst = 0;
  for (int i = 0; i < kRows * kWidth; ++i) worst = fmax(worst, fabs((double)y[i] - want[i]));
  /* A GPU multiplies f32 in TF32, with 11 bits. */
  const double allowed = strcmp(engines[0], "cudnn") == 0 ? 2e-3 : 1e-5;
  printf("largest error %g, allowed %g\n", worst, allowed);

  for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); ++i) lawson_memory_destroy(memory[i]);
  for (int i = 0; i < 2; ++i) {
    lawson_fusion_destroy(fusions[i]);
    lawson_graph_destroy(graphs[i]);
  }
  return worst <= allowed ? 0 : 1;
}
