/* Plain C: asks whether a fusion will run as one kernel on a GPU that need not be here.
 *   probe [TARGET]      (default h200)
 * Exit 0: yes, 1: no, 3: no answer. */
#include <lawson/lawson.h>
#include <stdio.h>
#include <string.h>

static const char kSpec[] =
    "{\"lawson\": 1, \"kind\": \"graph\", \"name\": \"int8-matmul\","
    " \"inputs\": [{\"name\": \"x\", \"dtype\": \"i8\", \"shape\": [2, 16, 16]},"
    "              {\"name\": \"y\", \"dtype\": \"bf16\", \"shape\": [2, 16, 16]},"
    "              {\"name\": \"z\", \"dtype\": \"f32\", \"shape\": [2, 16, 16]}],"
    " \"ops\": [{\"op\": \"convert\", \"in\": \"x\", \"out\": \"xb\", \"dtype\": \"bf16\"},"
    "           {\"op\": \"matmul\", \"in\": [\"xb\", \"y\"], \"out\": \"m\", \"dtype\": \"f32\"},"
    "           {\"op\": \"add\", \"in\": [\"m\", \"z\"], \"out\": \"o\"}],"
    " \"outputs\": [\"o\"]}";

int main(int argc, char** argv) {
  lawson_spec* spec = NULL;
  lawson_device* device = NULL;
  lawson_verdict* verdict = NULL;
  int exit_code = 3;
  if (lawson_spec_from_json(kSpec, strlen(kSpec), "probe.c", &spec) == LAWSON_OK &&
      lawson_device_find(argc > 1 ? argv[1] : "h200", &device) == LAWSON_OK &&
      lawson_probe_spec(spec, device, NULL, &verdict) == LAWSON_OK) {
    const int supported = lawson_verdict_decision(verdict) == LAWSON_SUPPORTED;
    printf("%s on %s: %s\n", lawson_spec_name(spec), lawson_device_name(device),
           supported ? "one kernel" : "not one kernel");
    for (size_t i = 0; i < lawson_verdict_reason_count(verdict); ++i) {
      printf("  %s\n", lawson_verdict_reason_message(verdict, i));
    }
    exit_code = supported ? 0 : 1;
  } else {
    fprintf(stderr, "%s\n", lawson_last_error_message());
  }
  lawson_verdict_destroy(verdict);
  lawson_device_destroy(device);
  lawson_spec_destroy(spec);
  return exit_code;
}
