// lawson-capture: attention inside CUDA graphs. Needs a live device.
// Forward and backward, dense, ragged and with dropout: captured once, replayed with new inputs at
// the same addresses (new lengths and offsets, new seeds too), right every time. While a stream
// captures, nothing may be built or loaded. Writes one JSON document; exits 1 when anything is
// wrong.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iostream>
#include <thread>

#include "cases/expected.h"
#include "cases/judge.h"
#include "cases/memory.h"
#include "engine/cudnn/driver.h"
#include "engine/registry.h"
#include "gpu/result.h"
#include "plan/planner.h"

namespace lawson::cases {
namespace {

struct Flags {
  int replays = 100;
  std::string libexec;
  std::string json;
  std::string only;
  unsigned threads = std::max(1U, std::thread::hardware_concurrency());
};

struct Machine {
  plan::Planner& planner;
  Engine& cudnn;
  Engine& reference;
  const Device& live;
  const cudnn::Driver& driver;
};

Json base(const std::string& name, const std::string& pass, const std::string& layout) {
  Json spec{{"lawson", 1},      {"kind", "attention"}, {"name", name},      {"pass", pass},
            {"dtype", "bf16"},  {"batch", 3},          {"heads", 4},        {"kv_heads", 2},
            {"layout", layout}, {"seqlen_q", 80},      {"head_dim_qk", 64}, {"cuda_graph", true}};
  if (pass == "forward") spec["return_stats"] = true;
  return spec;
}

// Lengths, offsets, seeds and pages are drawn anew for every replay.
std::vector<Json> specs() {
  std::vector<Json> list;
  for (const std::string pass : {"forward", "backward"}) {
    const auto add = [&](const std::string& word, const std::string& layout, const Json& fields) {
      Json spec = base(word + "-" + pass, pass, layout);
      spec.update(fields);
      list.push_back(std::move(spec));
    };
    add("dense", "bshd", {{"mask", "causal"}});
    add("dense-padding", "bshd", {{"mask", "padding_causal"}});
    add("ragged", "thd", {{"mask", "padding_causal"}});
    add("ragged-gaps", "thd", {{"mask", "padding"}, {"padded_offsets", true}});
    add("dropout", "bshd", {{"dropout", 0.2}});
    add("bias", "bhsd",
        {{"bias", "post_scale"},
         {"bias_shape", {1, 4, 80, 80}},
         {"bias_grad", pass == "backward"}});
  }
  Json paged = base("paged-append-forward", "forward", "bshd");
  paged.update({{"seqlen_q", 1},
                {"seqlen_kv", 200},
                {"mask", "padding"},
                {"append", 1},
                {"paged", {{"page_size_k", 32}}}});
  list.push_back(std::move(paged));
  return list;
}

struct Stream {
  explicit Stream(const cudnn::Driver& the_driver) : driver{the_driver} {}
  ~Stream() {
    if (graph != nullptr) static_cast<void>(driver.destroy_graph(graph));
    if (stream != nullptr) static_cast<void>(driver.destroy_stream(stream));
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const cudnn::Driver& driver;
  void* stream = nullptr;
  void* graph = nullptr;  // what was captured
};

// What one replay starts from, and what should come out.
struct Replay {
  Case item;
  Expected expected;
  std::string dropout;  // how the oracle got the mask
  std::string problem;  // "" when right
};

bool has_dropout(const Case& item) {
  return item.spec.value("dropout", 0.0) > 0;
}

void prepare(Machine& machine, const ir::Graph& graph, Replay& replay) {
  const auto expected = [&]() -> Result<Expected> {
    if (!has_dropout(replay.item)) {
      return expected_of(machine.cudnn, machine.reference, replay.item, graph);
    }
    auto mask = dumped_mask(machine.cudnn, machine.live, machine.reference, replay.item);
    replay.dropout = "dumped mask";
    if (!mask.ok() && mask.error().kind == ErrorKind::unsupported) {
      mask = read_mask(machine.cudnn, machine.live, machine.reference, replay.item);
      replay.dropout = "read weights";
    }
    LAWSON_TRY(std::vector<double> kept, std::move(mask));
    return expected_with_mask(machine.cudnn, machine.reference, replay.item, graph,
                              std::move(kept));
  };
  auto made = expected();
  if (made.ok()) {
    replay.expected = std::move(*made);
  } else {
    replay.problem = "inputs: " + made.error().message;
  }
}

template <typename Work>
void in_parallel(const Flags& flags, std::size_t count, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < flags.threads; ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < count; i = next++) work(i);
    });
  }
}

// A graph that no plan is there for.
Result<ir::Graph> unknown_graph() {
  Case item{"unknown", base("unknown", "forward", "bshd"), 1, plan::InputStyle::normal};
  item.spec["seqlen_q"] = 72;
  return graph_of(item);
}

// While the stream captures: a plan that is not ready is refused, and one that is ready is there.
Status check_refusal(Machine& machine, const ir::Graph& graph, void* stream) {
  LAWSON_TRY(const bool capturing, machine.cudnn.capturing(machine.live, stream));
  if (!capturing) return error(ErrorKind::internal, "the engine does not see the capture");
  LAWSON_TRY(const ir::Graph unknown, unknown_graph());
  const auto built = machine.planner.acquire(unknown, machine.live, "cudnn", {}, stream);
  if (built.ok()) return error(ErrorKind::internal, "a plan was built during a capture");
  if (built.error().kind != ErrorKind::invalid_argument) return built.error();
  LAWSON_CHECK(machine.planner.acquire(graph, machine.live, "cudnn", {}, stream));
  return {};
}

Status capture(Machine& machine, const ir::Graph& graph, const Loaded& loaded, const Memory& memory,
               Stream& capture) {
  LAWSON_TRY(capture.stream, machine.driver.create_stream());
  LAWSON_CHECK(machine.driver.synchronize(nullptr));
  // Once before: what is loaded lazily is loaded then.
  LAWSON_CHECK(
      machine.cudnn.execute(loaded, memory.bindings(), memory.workspace(), capture.stream));
  LAWSON_CHECK(machine.driver.synchronize(capture.stream));
  LAWSON_CHECK(machine.driver.begin_capture(capture.stream));
  const Status refused = check_refusal(machine, graph, capture.stream);
  const Status executed =
      machine.cudnn.execute(loaded, memory.bindings(), memory.workspace(), capture.stream);
  auto ended = machine.driver.end_capture(capture.stream);
  LAWSON_CHECK(refused);
  LAWSON_CHECK(executed);
  LAWSON_TRY(capture.graph, std::move(ended));
  return {};
}

// The contents of `from` into `to`, buffer by buffer.
void copy_into(const std::vector<plan::Buffer>& from, std::vector<plan::Buffer>& to) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::memcpy(to[i].data(), from[i].data(), from[i].bytes());
  }
}

struct Outcome {
  std::string plan_name;
  std::string dropout;
  int right = 0;
  std::string problem;  // the first
};

Result<Outcome> run_case(const Flags& flags, Machine& machine, const Json& spec) {
  Outcome outcome;
  const Case item{spec["name"], spec, 1000, plan::InputStyle::normal};
  LAWSON_TRY(const ir::Graph graph, graph_of(item));
  LAWSON_TRY(const auto loaded, machine.planner.acquire(graph, machine.live, "cudnn", {}, nullptr));
  outcome.plan_name = loaded->plan().plan_name;
  std::vector<Replay> replays(static_cast<std::size_t>(flags.replays));
  for (std::size_t i = 0; i < replays.size(); ++i) {
    replays[i].item = item;
    replays[i].item.seed += i;
  }
  in_parallel(flags, replays.size(), [&](std::size_t i) { prepare(machine, graph, replays[i]); });
  outcome.dropout = replays.empty() ? "" : replays.front().dropout;

  LAWSON_TRY(auto inputs, plan::make_inputs(graph, item.seed, machine.reference, item.style));
  auto outputs = plan::make_outputs(graph);
  Memory memory(machine.cudnn, machine.live, true);
  LAWSON_CHECK(memory.place(graph, inputs, outputs, loaded->plan().workspace_bytes));
  Stream stream(machine.driver);
  LAWSON_CHECK(capture(machine, graph, *loaded, memory, stream));
  std::vector<std::vector<plan::Buffer>> results(replays.size());
  for (std::size_t i = 0; i < replays.size(); ++i) {
    Replay& replay = replays[i];
    if (!replay.problem.empty()) continue;
    copy_into(replay.expected.inputs, inputs);
    LAWSON_CHECK(memory.upload());
    // A copy from pageable memory may still be under way, and the stream does not wait for it.
    LAWSON_CHECK(machine.driver.synchronize(nullptr));
    LAWSON_CHECK(machine.driver.launch_graph(stream.graph, stream.stream));
    LAWSON_CHECK(machine.driver.synchronize(stream.stream));
    LAWSON_CHECK(memory.fetch());
    replay.problem = memory.damage();
    results[i] = plan::make_outputs(graph);
    copy_into(outputs, results[i]);
  }
  in_parallel(flags, replays.size(), [&](std::size_t i) {
    if (!replays[i].problem.empty()) return;
    const auto comparison = plan::compare(graph, results[i], replays[i].expected.outputs);
    if (!comparison.ok()) replays[i].problem = comparison.text();
  });
  for (std::size_t i = 0; i < replays.size(); ++i) {
    if (replays[i].problem.empty()) {
      ++outcome.right;
    } else if (outcome.problem.empty()) {
      outcome.problem = fmt::format("replay {}: {}", i, replays[i].problem);
    }
  }
  return outcome;
}

int fail(const Error& error) {
  std::cerr << "lawson-capture: " << to_string(error.kind) << ": " << error.message << "\n";
  return error.kind == ErrorKind::unavailable ? 77 : 3;  // 77: skipped, no device here
}

int run(const Flags& flags) {
  Engine* engine = find_engine("cudnn");
  if (engine == nullptr) return fail(error(ErrorKind::unavailable, "no cuDNN engine here"));
  const auto live = device_of(*engine);
  if (!live.ok()) return fail(live.error());
  const auto driver = cudnn::Driver::open();
  if (!driver.ok()) return fail(driver.error());
  if (const Status current = (*driver)->make_current(live->ordinal); !current.ok()) {
    return fail(current.error());
  }
  plan::PlannerConfig config;
  config.engines = engines();
  config.worker_path = flags.libexec + "/lawson-worker";
  config.nodriver_path = flags.libexec + "/liblawson-nodriver.so";
  plan::Planner planner(std::move(config));
  Machine machine{planner, *engine, *find_engine("reference"), *live, **driver};

  Json document{{"device", live->title}, {"replays", flags.replays}};
  Json& list = document["cases"] = Json::array();
  int wrong = 0;
  for (const Json& spec : specs()) {
    const std::string name = spec["name"];
    if (name.find(flags.only) == std::string::npos) continue;
    auto outcome = run_case(flags, machine, spec);
    if (!outcome.ok()) {
      outcome = Outcome{"", "", 0, outcome.error().message};
    }
    const bool right = outcome->right == flags.replays && outcome->problem.empty();
    wrong += right ? 0 : 1;
    Json item{{"case", name}, {"plan_name", outcome->plan_name}, {"right", outcome->right}};
    if (!outcome->dropout.empty()) item["oracle"] = outcome->dropout;
    if (!outcome->problem.empty()) item["problem"] = outcome->problem;
    list.push_back(std::move(item));
    std::cout << fmt::format("{:<24}{:<20}{:>5} of {} right {}\n", name, outcome->plan_name,
                             outcome->right, flags.replays, outcome->problem);
  }
  document["captures"] = list.size();
  document["wrong"] = wrong;
  if (const Status written = write_result(flags.json, document); !written.ok()) {
    return fail(written.error());
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lawson::cases

int main(int argc, char** argv) {
  lawson::cases::Flags flags;
  CLI::App app{"Attention captured into CUDA graphs and replayed."};
  app.add_option("--replays", flags.replays)->check(CLI::PositiveNumber);
  app.add_option("--only", flags.only, "cases whose name contains this");
  app.add_option("--libexec", flags.libexec, "folder of the worker and the no-driver library")
      ->required();
  app.add_option("--json", flags.json, "write the result to this file");
  app.add_option("--threads", flags.threads, "of the oracle")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return lawson::cases::run(flags);
}
