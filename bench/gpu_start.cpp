// lawson-bench-start: from the start of a process to the first result of an attention on this GPU.
//   lawson-bench-start --bundle FILE   the plans of the bundle, one after the other, each executed
//                                      once: the first with all that a process needs, the next ones
//                                      with what a new shape costs
//   lawson-bench-start                 what nobody gets around: the CUDA context and a cuDNN handle
// One JSON document on standard output, times in milliseconds since main().
#include <CLI/CLI.hpp>

#include <chrono>
#include <iostream>
#include <vector>

#include "engine/cudnn/driver.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/loader.h"
#include "lawson/lawson.h"

namespace lawson::bench {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

Error from_abi(lawson_status status) {
  return error(ErrorKind::internal, "{}: {}", lawson_status_string(status),
               lawson_last_error_message());
}

#define BENCH_ABI(call) \
  if (const lawson_status status_ = (call); status_ != LAWSON_OK) return from_abi(status_)

Result<Json> bare(Clock::time_point begin) {
  LAWSON_TRY(const cudnn::Driver* driver, cudnn::Driver::open());
  LAWSON_CHECK(driver->make_current(0));
  const double context = since(begin);
  LAWSON_CHECK(cudnn::libraries());
  const double libraries = since(begin);
  LAWSON_TRY(const cudnn::Handle handle, cudnn::borrow_handle(0));
  return Json{{"context", context}, {"libraries", libraries}, {"handle", since(begin)}};
}

// What a framework has anyway: memory for a plan's tensors and workspace.
struct Memory {
  std::vector<lawson_binding> bindings;
  void* workspace = nullptr;
  std::size_t workspace_size = 0;
};

Result<Memory> memory_for(const lawson_plan* plan, const lawson_device* device) {
  lawson_graph* graph = nullptr;
  BENCH_ABI(lawson_plan_graph(plan, &graph));
  static float scale = 0.125F;
  Memory made;
  for (std::size_t i = 0; i < lawson_graph_tensor_count(graph); ++i) {
    lawson_tensor_info info{};
    info.struct_size = sizeof(info);
    BENCH_ABI(lawson_graph_tensor(graph, i, &info));
    if (info.is_by_value != 0) {
      made.bindings.push_back({info.uid, &scale});
      continue;
    }
    lawson_memory* memory = nullptr;
    BENCH_ABI(lawson_memory_create(device, info.size, &memory));
    made.bindings.push_back({info.uid, lawson_memory_data(memory)});
  }
  made.workspace_size = lawson_plan_workspace_size(plan);
  if (made.workspace_size > 0) {
    lawson_memory* memory = nullptr;
    BENCH_ABI(lawson_memory_create(device, made.workspace_size, &memory));
    made.workspace = lawson_memory_data(memory);
  }
  return made;
}

Result<Json> bundled(const std::string& path, Clock::time_point begin) {
  lawson_device* device = nullptr;
  BENCH_ABI(lawson_device_find("cuda:0", &device));
  const double found = since(begin);
  lawson_bundle* bundle = nullptr;
  BENCH_ABI(lawson_bundle_open(path.c_str(), &bundle));
  Json plans = Json::array();
  for (std::size_t i = 0; i < lawson_bundle_size(bundle); ++i) {
    const auto start = Clock::now();
    lawson_plan* plan = nullptr;
    BENCH_ABI(lawson_bundle_plan(bundle, i, &plan));
    const double read = since(start);
    LAWSON_TRY(const Memory memory, memory_for(plan, device));
    const auto again = Clock::now();
    BENCH_ABI(lawson_plan_load(plan, device));
    const double loaded = since(again);
    BENCH_ABI(lawson_plan_execute(plan, memory.bindings.data(), memory.bindings.size(),
                                  memory.workspace, memory.workspace_size, nullptr));
    LAWSON_TRY(const cudnn::Driver* driver, cudnn::Driver::open());
    LAWSON_CHECK(driver->synchronize(nullptr));
    const double took = read + since(again);  // without memory for its tensors
    plans.push_back({{"plan_id", lawson_plan_id(plan)},
                     {"plan_name", lawson_plan_name(plan)},
                     {"read", read},
                     {"load", loaded},
                     {"took", took},
                     {"result", since(begin)}});
  }
  return Json{{"device", found}, {"plans", std::move(plans)}};
}

}  // namespace
}  // namespace lawson::bench

int main(int argc, char** argv) {
  const auto begin = lawson::bench::Clock::now();
  std::string bundle;
  CLI::App app{"From the start of a process to the first result."};
  app.add_option("--bundle", bundle, "plans for this GPU");
  CLI11_PARSE(app, argc, argv);
  const auto document =
      bundle.empty() ? lawson::bench::bare(begin) : lawson::bench::bundled(bundle, begin);
  if (!document.ok()) {
    std::cerr << document.error().message << '\n';
    return 1;
  }
  std::cout << document->dump() << '\n';
  return 0;
}
