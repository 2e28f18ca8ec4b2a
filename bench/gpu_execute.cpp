// lawson-bench-execute: what one call costs on the host, for a small attention on this GPU: the
// bare cudnnBackendExecute with one variant pack, Lawson's plan through its engine and through the
// C ABI, and the attention handles; in turn, medians. Checks beside it that a scale that changes
// behind the same pointer is read anew, and that the plan is right as nodes of a CUDA graph. Writes
// one JSON document; exits 1 when something could not be measured or is wrong; how fast it was is
// for the reader.
#include <cudnn.h>
#include <dlfcn.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>

#include "engine/cudnn/driver.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/loader.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/plan_bytes.h"
#include "engine/registry.h"
#include "gpu/result.h"
#include "ir/json.h"
#include "lawson/lawson.h"

namespace lawson::bench {
namespace {

constexpr int kSkipped = 77;
constexpr int kCalls = 200;  // of one measurement: fewer than the driver's queue holds
constexpr std::int64_t kBatch = 1;
constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kLength = 128;
constexpr std::int64_t kDepth = 64;

Error from_abi(lawson_status status) {
  return error(ErrorKind::internal, "{}: {}", lawson_status_string(status),
               lawson_last_error_message());
}

#define BENCH_ABI(call) \
  if (const lawson_status status_ = (call); status_ != LAWSON_OK) return from_abi(status_)

std::string spec_text() {
  return Json{{"lawson", 1},       {"kind", "attention"}, {"name", "small"},
              {"pass", "forward"}, {"dtype", "bf16"},     {"batch", kBatch},
              {"heads", kHeads},   {"seqlen_q", kLength}, {"head_dim_qk", kDepth},
              {"layout", "bshd"},  {"mask", "causal"}}
      .dump();
}

// Microseconds of one call on the host: the median over `rounds`, the ways in turn.
struct Way {
  std::string name;
  std::function<Status()> call;
  std::vector<double> microseconds;
};

Status time_all(std::vector<Way>& ways, int rounds, const cudnn::Driver& driver, void* stream) {
  using Clock = std::chrono::steady_clock;
  for (int round = -1; round < rounds; ++round) {
    for (Way& way : ways) {
      LAWSON_CHECK(driver.synchronize(stream));
      const auto begin = Clock::now();
      for (int i = 0; i < kCalls; ++i) LAWSON_CHECK(way.call());
      const std::chrono::duration<double, std::micro> time = Clock::now() - begin;
      if (round >= 0) way.microseconds.push_back(time.count() / kCalls);
    }
  }
  return driver.synchronize(stream);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// cuDNN's own calls, as a caller without any library would make them.
class Bare {
 public:
  Bare(const cudnn::BackendPlan& plan, void* handle) : plan_{plan}, handle_{handle} {}

  Status prepare(std::span<void* const> pointers, void* workspace) {
    LAWSON_TRY(const cudnn::Libraries* found, cudnn::libraries());
    const auto function = [&](const char* name) { return dlsym(found->cudnn.handle, name); };
    execute_ = reinterpret_cast<decltype(&cudnnBackendExecute)>(function("cudnnBackendExecute"));
    const auto create = reinterpret_cast<decltype(&cudnnBackendCreateDescriptor)>(
        function("cudnnBackendCreateDescriptor"));
    const auto set =
        reinterpret_cast<decltype(&cudnnBackendSetAttribute)>(function("cudnnBackendSetAttribute"));
    const auto finalize =
        reinterpret_cast<decltype(&cudnnBackendFinalize)>(function("cudnnBackendFinalize"));
    const auto set_stream = reinterpret_cast<decltype(&cudnnSetStream)>(function("cudnnSetStream"));
    std::vector<void*> all = plan_.pointers;
    for (std::size_t i = 0; i < pointers.size(); ++i) {
      all[static_cast<std::size_t>(plan_.slots[i])] = pointers[i];
    }
    const auto count = static_cast<std::int64_t>(all.size());
    const bool ok =
        set_stream(static_cast<cudnnHandle_t>(handle_), nullptr) == CUDNN_STATUS_SUCCESS &&
        create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack_) == CUDNN_STATUS_SUCCESS &&
        set(pack_, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace) ==
            CUDNN_STATUS_SUCCESS &&
        set(pack_, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, all.data()) ==
            CUDNN_STATUS_SUCCESS &&
        set(pack_, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count,
            plan_.uids.data()) == CUDNN_STATUS_SUCCESS &&
        finalize(pack_) == CUDNN_STATUS_SUCCESS;
    if (!ok) return error(ErrorKind::cudnn, "a variant pack cannot be made");
    return {};
  }
  Status execute() {
    if (execute_(static_cast<cudnnHandle_t>(handle_), plan_.descriptor, pack_) !=
        CUDNN_STATUS_SUCCESS) {
      return error(ErrorKind::cudnn, "cudnnBackendExecute failed");
    }
    return {};
  }

 private:
  const cudnn::BackendPlan& plan_;
  void* handle_;
  decltype(&cudnnBackendExecute) execute_ = nullptr;
  cudnnBackendDescriptor_t pack_ = nullptr;  // lives as long as the process
};

struct Tensors {
  void* q = nullptr;
  void* k = nullptr;
  void* v = nullptr;
  void* o = nullptr;
  void* other_o = nullptr;
};

constexpr std::size_t kElements = kBatch * kHeads * kLength * kDepth;

Result<std::vector<std::uint16_t>> read_back(const cudnn::Driver& driver, void* data) {
  LAWSON_CHECK(driver.synchronize(nullptr));
  std::vector<std::uint16_t> host(kElements);
  LAWSON_CHECK(driver.copy_to_host(host.data(), data, kElements * 2));
  return host;
}

// Whether a graph that the plan was added to computes `expected` into o, and after an update into
// the other o.
Result<bool> check_graphs(const cudnn::Driver& driver, const lawson_plan* plan,
                          const std::vector<lawson_binding>& bindings,
                          const std::vector<lawson_binding>& other, void* workspace,
                          std::size_t workspace_size, const Tensors& tensors,
                          const std::vector<std::uint16_t>& expected) {
  LAWSON_TRY(void* const library, cudnn::driver());
  const auto create = reinterpret_cast<int (*)(void**, unsigned)>(dlsym(library, "cuGraphCreate"));
  const auto instantiate = reinterpret_cast<int (*)(void**, void*, unsigned long long)>(
      dlsym(library, "cuGraphInstantiateWithFlags"));
  if (create == nullptr || instantiate == nullptr) {
    return error(ErrorKind::unavailable, "the driver has no CUDA graphs");
  }
  void* graph = nullptr;
  if (create(&graph, 0) != 0) return error(ErrorKind::cuda, "cuGraphCreate failed");
  const std::vector<std::uint16_t> poison(kElements, 0x7FC0);
  bool right = true;
  const auto launch = [&](void* output) -> Status {
    void* executable = nullptr;
    if (instantiate(&executable, graph, 0) != 0) {
      return error(ErrorKind::cuda, "cuGraphInstantiateWithFlags failed");
    }
    LAWSON_CHECK(driver.copy_to_device(output, poison.data(), kElements * 2));
    LAWSON_CHECK(driver.launch_graph(executable, nullptr));
    LAWSON_TRY(const auto result, read_back(driver, output));
    right = right && result == expected;
    return driver.destroy_graph(executable);
  };
  BENCH_ABI(lawson_plan_prepare_graph(plan, LAWSON_GRAPH_ADD, bindings.data(), bindings.size(),
                                      workspace, workspace_size, graph));
  LAWSON_CHECK(launch(tensors.o));
  BENCH_ABI(lawson_plan_prepare_graph(plan, LAWSON_GRAPH_UPDATE, other.data(), other.size(),
                                      workspace, workspace_size, graph));
  LAWSON_CHECK(launch(tensors.other_o));
  return right;
}

Result<Json> measure(int rounds) {
  LAWSON_TRY(const cudnn::Driver* driver, cudnn::Driver::open());
  lawson_device* device = nullptr;
  BENCH_ABI(lawson_device_find("cuda:0", &device));
  lawson_spec* spec = nullptr;
  const std::string text = spec_text();
  BENCH_ABI(lawson_spec_from_json(text.data(), text.size(), "spec", &spec));
  lawson_graph* handle_graph = nullptr;
  BENCH_ABI(lawson_spec_graph(spec, 0, &handle_graph));
  lawson_plan* plan = nullptr;
  BENCH_ABI(lawson_compile(handle_graph, device, nullptr, &plan));
  BENCH_ABI(lawson_plan_load(plan, device));
  lawson_text* serialized = nullptr;
  BENCH_ABI(lawson_plan_serialize(plan, &serialized));
  LAWSON_TRY(Plan inner, plan_from_bytes(std::as_bytes(std::span{lawson_text_data(serialized),
                                                                 lawson_text_size(serialized)})));

  Engine* const engine = find_engine("cudnn");
  LAWSON_TRY(const std::vector<Device> devices, engine->live_devices());
  const Device& live = devices.front();
  LAWSON_TRY(const auto loaded, engine->load(inner, live));
  LAWSON_CHECK(driver->make_current(live.ordinal));

  Tensors tensors;
  std::vector<std::uint16_t> host(kElements);
  for (std::size_t i = 0; i < kElements; ++i) {
    const double value = static_cast<double>((i * 2654435761U) % 1000) / 500.0 - 1.0;
    store_element(&host[i], DType::bf16, 0, value);
  }
  for (void** data : {&tensors.q, &tensors.k, &tensors.v, &tensors.o, &tensors.other_o}) {
    LAWSON_TRY(*data, driver->allocate(kElements * 2));
    LAWSON_CHECK(driver->copy_to_device(*data, host.data(), kElements * 2));
  }
  const auto workspace_size = static_cast<std::size_t>(inner.workspace_bytes);
  void* workspace = nullptr;
  if (workspace_size > 0) {
    LAWSON_TRY(workspace, driver->allocate(workspace_size));
  }

  // The tensors by the graph's names.
  float scale = 0.125F;
  std::vector<lawson_binding> abi;
  const std::size_t count = lawson_graph_tensor_count(handle_graph);
  for (std::size_t i = 0; i < count; ++i) {
    lawson_tensor_info info{};
    info.struct_size = sizeof(info);
    BENCH_ABI(lawson_graph_tensor(handle_graph, i, &info));
    const std::string name = info.name;
    void* data = name == "q"   ? tensors.q
                 : name == "k" ? tensors.k
                 : name == "v" ? tensors.v
                 : name == "o" ? tensors.o
                               : nullptr;
    if (info.is_by_value != 0) data = &scale;
    if (data == nullptr) return invalid("the graph has a tensor '{}' that is not bound", name);
    abi.push_back({info.uid, data});
  }
  std::vector<Binding> bindings;
  for (const lawson_binding& binding : abi) bindings.push_back({binding.uid, binding.data});
  std::vector<lawson_binding> other = abi;
  for (lawson_binding& binding : other) {
    if (binding.data == tensors.o) binding.data = tensors.other_o;
  }

  // cuDNN's own form of the same plan.
  LAWSON_TRY(const cudnn::UnpackedPlan unpacked, cudnn::unpack_plan(inner.bytes));
  LAWSON_TRY(const cudnn::Handle cudnn_handle, cudnn::handle_for(live));
  std::unique_ptr<cudnn::Executable> executable;
  if (const cudnn::Failure failure =
          cudnn::Executable::load(unpacked.bytes.data, cudnn_handle.get(), live, executable)) {
    return error(ErrorKind::cudnn, "{}", failure->text);
  }
  if (executable->backend().descriptor == nullptr) {
    return error(ErrorKind::internal, "the plan does not run by cuDNN's backend alone");
  }
  std::vector<void*> pointers;
  for (const std::int64_t uid : executable->uids()) {
    const auto found = std::find_if(abi.begin(), abi.end(),
                                    [&](const lawson_binding& item) { return item.uid == uid; });
    if (found == abi.end()) return invalid("cuDNN's plan has tensor {} of its own", uid);
    pointers.push_back(found->data);
  }
  Bare bare{executable->backend(), cudnn_handle.get()};
  LAWSON_CHECK(bare.prepare(pointers, workspace));

  // The handles.
  lawson_attention_config* config = nullptr;
  BENCH_ABI(lawson_attention_config_create(&config));
  const auto set_size = [&](int32_t attribute, std::int64_t value) {
    return lawson_attention_config_set_attribute(config, attribute, &value, sizeof(value));
  };
  const auto set_word = [&](int32_t attribute, std::int32_t value) {
    return lawson_attention_config_set_attribute(config, attribute, &value, sizeof(value));
  };
  BENCH_ABI(set_size(LAWSON_ATTENTION_BATCH, kBatch));
  BENCH_ABI(set_size(LAWSON_ATTENTION_HEADS, kHeads));
  BENCH_ABI(set_size(LAWSON_ATTENTION_SEQLEN_Q, kLength));
  BENCH_ABI(set_size(LAWSON_ATTENTION_HEAD_DIM_QK, kDepth));
  BENCH_ABI(set_word(LAWSON_ATTENTION_PASS, LAWSON_PASS_FORWARD));
  BENCH_ABI(set_word(LAWSON_ATTENTION_DTYPE, LAWSON_DTYPE_BF16));
  BENCH_ABI(set_word(LAWSON_ATTENTION_LAYOUT, LAWSON_LAYOUT_BSHD));
  BENCH_ABI(set_word(LAWSON_ATTENTION_MASK, LAWSON_MASK_CAUSAL));
  lawson_attention_fwd_params* params = nullptr;
  BENCH_ABI(lawson_attention_fwd_params_create(&params));
  BENCH_ABI(lawson_attention_fwd_params_set_attribute(params, LAWSON_PARAM_CONFIG, &config,
                                                      sizeof(config)));
  BENCH_ABI(lawson_attention_fwd_params_set_attribute(params, LAWSON_PARAM_DEVICE, &device,
                                                      sizeof(device)));
  const struct {
    int32_t attribute;
    void* data;
  } given[] = {{LAWSON_PARAM_Q, tensors.q},
               {LAWSON_PARAM_K, tensors.k},
               {LAWSON_PARAM_V, tensors.v},
               {LAWSON_PARAM_O, tensors.o}};
  for (const auto& [attribute, data] : given) {
    lawson_tensor tensor{};
    tensor.struct_size = sizeof(tensor);
    tensor.data = data;
    BENCH_ABI(
        lawson_attention_fwd_params_set_attribute(params, attribute, &tensor, sizeof(tensor)));
  }

  const auto run_plan = [&](const std::vector<lawson_binding>& bound) -> Status {
    BENCH_ABI(
        lawson_plan_execute(plan, bound.data(), bound.size(), workspace, workspace_size, nullptr));
    return {};
  };
  bool turn = false;
  std::vector<Way> ways{
      {"bare cudnnBackendExecute", [&] { return bare.execute(); }, {}},
      {"engine execute",
       [&] { return engine->execute(*loaded, bindings, workspace, nullptr); },
       {}},
      {"lawson_plan_execute", [&] { return run_plan(abi); }, {}},
      {"lawson_plan_execute, other pointers each time",
       [&] {
         turn = !turn;
         return run_plan(turn ? other : abi);
       },
       {}},
      {"lawson_attention_forward",
       [&]() -> Status {
         BENCH_ABI(lawson_attention_forward(params, workspace, workspace_size, nullptr));
         return {};
       },
       {}}};
  LAWSON_CHECK(time_all(ways, rounds, *driver, nullptr));

  LAWSON_CHECK(run_plan(abi));
  LAWSON_TRY(const auto before, read_back(*driver, tensors.o));
  scale = 0.5F;
  LAWSON_CHECK(run_plan(abi));
  LAWSON_TRY(const auto after, read_back(*driver, tensors.o));
  LAWSON_CHECK(run_plan(other));
  LAWSON_TRY(const auto fresh, read_back(*driver, tensors.other_o));
  const bool reads_anew = before != after && after == fresh;

  // The same as nodes of a CUDA graph, and the graph given other pointers.
  LAWSON_TRY(const bool graphs_right,
             check_graphs(*driver, plan, abi, other, workspace, workspace_size, tensors, fresh));

  Json document{{"graphs_right", graphs_right},
                {"device", live.title},
                {"plan_id", inner.plan_id},
                {"plan_name", inner.plan_name},
                {"cudnn", inner.engine_version},
                {"calls", kCalls},
                {"rounds", rounds},
                {"scale_read_anew", reads_anew}};
  Json& rows = document["rows"] = Json::array();
  const double floor = median(ways.front().microseconds);
  for (const Way& way : ways) {
    const double time = median(way.microseconds);
    rows.push_back({{"name", way.name}, {"microseconds", time}, {"over_bare", time / floor}});
    std::cout << fmt::format("{:48} {:7.2f} us  {:5.2f}x\n", way.name, time, time / floor);
  }
  return document;
}

int run(int rounds, const std::string& path) {
  const auto driver = cudnn::Driver::open();
  if (!driver.ok() || (*driver)->device_count() == 0) {
    std::cout << "no GPU here\n";
    return kSkipped;
  }
  const auto document = measure(rounds);
  if (!document.ok()) {
    std::cerr << document.error().message << '\n';
    return 1;
  }
  if (const Status written = cases::write_result(path, *document); !written.ok()) {
    std::cerr << written.error().message << '\n';
    return 1;
  }
  int wrong = 0;
  for (const char* check : {"scale_read_anew", "graphs_right"}) {
    if (document->at(check) == true) continue;
    std::cerr << check << ": no\n";
    wrong = 1;
  }
  return wrong;
}

}  // namespace
}  // namespace lawson::bench

int main(int argc, char** argv) {
  int rounds = 25;
  std::string path;
  CLI::App app{"What one call of a small attention costs on the host."};
  app.add_option("--rounds", rounds, "measurements of every way")->check(CLI::PositiveNumber);
  app.add_option("--json", path, "write the result to this file");
  CLI11_PARSE(app, argc, argv);
  return lawson::bench::run(rounds, path);
}
