// lawson-bench-attention: is the plan that Lawson chooses the fastest that cuDNN has? Needs a live
// device. For each shape, forward and backward: every plan of the heuristics' list is built and
// timed (Engine::measure), the plans in turn; prints the chosen plan's time against the best, with
// engine config and plan id. --short: of short sequences. Writes one JSON document. Exits 1 when
// something could not be measured; how fast it was is for the reader.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <random>

#include "cases/cases.h"
#include "cases/judge.h"
#include "engine/cudnn/driver.h"
#include "engine/registry.h"
#include "gpu/result.h"

namespace lawson::cases {
namespace {

struct Flags {
  int rounds = 15;
  double slack = 0.01;
  std::string json;
  std::string only;  // "forward", "backward" or part of a shape's name
  bool are_short = false;
};

struct Shape {
  std::int64_t batch, heads, kv_heads, length, depth;
  bool causal;

  std::string text() const {
    return fmt::format("{}x{}/{}x{}x{} {}", batch, heads, kv_heads, length, depth,
                       causal ? "causal" : "full");
  }
  // Of the forward: two products of two operations; causal counts half.
  double flop() const {
    const double all = 4.0 * static_cast<double>(batch * heads * depth) *
                       static_cast<double>(length) * static_cast<double>(length);
    return causal ? all / 2 : all;
  }
};

// Shapes whose rates on an H200 are known: torch 2.11, and NVIDIA's own figures for cuDNN.
const std::vector<Shape> kShapes{
    {2, 16, 16, 4096, 128, false}, {2, 16, 16, 4096, 128, true},   {1, 32, 8, 8192, 128, true},
    {1, 16, 16, 16384, 128, true}, {1, 16, 16, 16384, 128, false}, {4, 16, 16, 2048, 64, true},
    {8, 16, 16, 1024, 128, true},  {1, 16, 16, 16384, 64, true},   {1, 16, 16, 16384, 64, false},
    {1, 64, 8, 4096, 128, true},   {1, 64, 8, 8192, 128, false}};

// From a kernel that is all launch to one that fills the device.
std::vector<Shape> short_shapes() {
  std::vector<Shape> shapes;
  for (const auto& [batch, heads] : {std::pair{1, 2}, {2, 16}, {8, 16}}) {
    for (const std::int64_t length : {64, 128, 256, 512}) {
      for (const std::int64_t depth : {64, 128}) {
        for (const bool causal : {true, false}) {
          if (causal || depth == 64) shapes.push_back({batch, heads, heads, length, depth, causal});
        }
      }
    }
  }
  return shapes;
}

struct Machine {
  Engine& cudnn;
  const Device& live;
  const cudnn::Driver& driver;
};

Result<ir::Graph> graph_of(const Shape& shape, bool backward, bool stats) {
  Case item;
  item.name = shape.text();
  item.spec = {{"lawson", 1},
               {"kind", "attention"},
               {"pass", backward ? "backward" : "forward"},
               {"dtype", "bf16"},
               {"batch", shape.batch},
               {"heads", shape.heads},
               {"kv_heads", shape.kv_heads},
               {"seqlen_q", shape.length},
               {"head_dim_qk", shape.depth},
               {"mask", shape.causal ? "causal" : "none"},
               {"return_stats", stats}};
  return graph_of(item);
}

// Device memory by tensor name: what a forward writes, its backward reads.
class Tensors {
 public:
  explicit Tensors(Machine& machine) : machine_{machine} {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    for (std::uint16_t& bits : pattern_) {
      store_element(&bits, DType::bf16, 0, static_cast<double>(normal(engine)));
    }
  }
  ~Tensors() {
    for (const auto& [name, data] : data_) static_cast<void>(machine_.driver.release(data));
    for (void* data : workspaces_) static_cast<void>(machine_.driver.release(data));
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  // Inputs that are not there yet are random normal bf16; by-value scalars come with the plan.
  Result<std::vector<Binding>> bindings(const ir::Graph& graph) {
    std::vector<Binding> list;
    for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      if (tensor.by_value) continue;
      LAWSON_TRY(void* data, find_or_make(tensor, graph.is_input(id)));
      list.push_back({ir::Graph::uid(id), data});
    }
    return list;
  }

  Result<void*> workspace(std::int64_t bytes) {
    if (bytes == 0) return static_cast<void*>(nullptr);
    LAWSON_TRY(void* data, machine_.driver.allocate(static_cast<std::size_t>(bytes)));
    workspaces_.push_back(data);
    return data;
  }

 private:
  Result<void*> find_or_make(const ir::Tensor& tensor, bool input) {
    if (const auto found = data_.find(tensor.name); found != data_.end()) return found->second;
    const auto bytes = static_cast<std::size_t>(
        byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0)));
    LAWSON_TRY(void* data, machine_.driver.allocate(bytes));
    data_[tensor.name] = data;
    if (!input) return data;
    std::vector<std::byte> host(bytes);
    // Another start for every tensor, and a period that is no multiple of a row.
    std::size_t at = std::hash<std::string>{}(tensor.name) % pattern_.size();
    for (std::size_t i = 0; i + 1 < bytes; i += 2) {
      std::copy_n(reinterpret_cast<const std::byte*>(&pattern_[at]), 2, &host[i]);
      at = at + 1 == pattern_.size() ? 0 : at + 1;
    }
    LAWSON_CHECK(machine_.driver.copy_to_device(data, host.data(), bytes));
    return data;
  }

  Machine& machine_;
  std::vector<std::uint16_t> pattern_ = std::vector<std::uint16_t>(1'000'003);
  std::map<std::string, void*> data_;
  std::vector<void*> workspaces_;
};

// One plan, loaded, and its times.
class Timed {
 public:
  Timed(Machine& machine, std::string name) : name_{std::move(name)}, machine_{machine} {}

  Status load(const ir::Graph& graph, const Plan& plan, Tensors& tensors) {
    plan_id_ = plan.plan_id;
    workspace_bytes_ = plan.workspace_bytes;
    LAWSON_TRY(loaded_, machine_.cudnn.load(plan, machine_.live));
    LAWSON_TRY(bindings_.emplace_back(), tensors.bindings(graph));
    LAWSON_TRY(workspace_, tensors.workspace(plan.workspace_bytes));
    LAWSON_CHECK(measure());
    executions_ = std::clamp(static_cast<int>(3 / std::max(times_.front(), 0.01)), 1, 20);
    times_.clear();
    return {};
  }

  Status measure() {
    LAWSON_TRY(const auto times,
               machine_.cudnn.measure(*loaded_, bindings_, workspace_, executions_, 1));
    times_.push_back(times.front());
    return {};
  }

  double median() const {
    std::vector<double> sorted = times_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
  const std::string& name() const { return name_; }
  const std::string& plan_id() const { return plan_id_; }
  std::int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  std::string name_;
  std::string plan_id_;
  std::int64_t workspace_bytes_ = 0;
  Machine& machine_;
  std::shared_ptr<Loaded> loaded_;
  std::vector<std::vector<Binding>> bindings_;  // one set
  void* workspace_ = nullptr;
  int executions_ = 1;
  std::vector<double> times_;
};

struct Outcome {
  Json json;
  double ratio = 0;  // chosen / best
};

Json rate(const Timed& timed, double flop) {
  const double time = timed.median();
  const auto rounded = [](double x, double unit) { return std::round(x * unit) / unit; };
  return {{"plan", timed.name()},
          {"ms", rounded(time, 1e5)},
          {"tflops", rounded(flop / time * 1e-9, 10)},
          {"workspace_bytes", timed.workspace_bytes()}};
}

Result<Outcome> measure(const Flags& flags, Machine& machine, const Shape& shape, bool backward,
                        void* stream) {
  Tensors tensors(machine);
  if (backward) {  // the backward's o and stats
    LAWSON_TRY(const ir::Graph forward, graph_of(shape, false, true));
    LAWSON_TRY(const Plan plan, compiled(machine.cudnn, machine.live, forward, {}));
    LAWSON_TRY(const auto loaded, machine.cudnn.load(plan, machine.live));
    LAWSON_TRY(const auto bindings, tensors.bindings(forward));
    LAWSON_TRY(void* workspace, tensors.workspace(plan.workspace_bytes));
    LAWSON_CHECK(machine.driver.synchronize(nullptr));
    LAWSON_CHECK(machine.cudnn.execute(*loaded, bindings, workspace, stream));
    LAWSON_CHECK(machine.driver.synchronize(stream));
  }
  LAWSON_TRY(const ir::Graph graph, graph_of(shape, backward, false));
  LAWSON_TRY(const Plan chosen, compiled(machine.cudnn, machine.live, graph, {}));
  LAWSON_TRY(const auto candidates, machine.cudnn.candidates(graph, machine.live, {}));
  std::vector<std::unique_ptr<Timed>> timed;
  Json refused = Json::array();
  for (const Candidate& candidate : candidates) {
    auto plan = candidate.name == chosen.plan_name
                    ? Result<Plan>{chosen}
                    : machine.cudnn.compile(graph, machine.live, {}, candidate, {});
    if (!plan.ok()) {
      refused.push_back({{"plan", candidate.name}, {"message", plan.error().message}});
      continue;
    }
    timed.push_back(std::make_unique<Timed>(machine, candidate.name));
    LAWSON_CHECK(timed.back()->load(graph, *plan, tensors));
  }
  // In turn, so that clocks and neighbours are the same for all.
  for (int round = 0; round < flags.rounds; ++round) {
    for (const auto& one : timed) LAWSON_CHECK(one->measure());
  }
  const Timed* own = nullptr;
  const Timed* best = nullptr;
  for (const auto& one : timed) {
    if (one->name() == chosen.plan_name) own = one.get();
    if (best == nullptr || one->median() < best->median()) best = one.get();
  }
  if (own == nullptr) {
    return error(ErrorKind::internal, "the chosen plan {} is none of the candidates",
                 chosen.plan_name);
  }
  const double flop = backward ? 2.5 * shape.flop() : shape.flop();
  Outcome outcome;
  outcome.ratio = own->median() / best->median();
  outcome.json = {{"shape", shape.text()},
                  {"pass", backward ? "backward" : "forward"},
                  {"engine", chosen.engine},
                  {"plan_id", chosen.plan_id},
                  {"chosen", rate(*own, flop)},
                  {"best", rate(*best, flop)},
                  {"ratio", std::round(outcome.ratio * 1e4) / 1e4},
                  {"plans", Json::array()}};
  for (const auto& one : timed) outcome.json["plans"].push_back(rate(*one, flop));
  if (!refused.empty()) outcome.json["not_built"] = std::move(refused);
  return outcome;
}

void print(const Json& item) {
  std::cout << fmt::format(
      "{:<26}{:<9}{:<28}{:>9.4f} ms{:>7.1f} TF  ratio {:.4f} of {} plans\n",
      item["shape"].get<std::string>(), item["pass"].get<std::string>(),
      item["chosen"]["plan"].get<std::string>(), item["chosen"]["ms"].get<double>(),
      item["chosen"]["tflops"].get<double>(), item["ratio"].get<double>(), item["plans"].size());
  if (item["chosen"]["plan"] == item["best"]["plan"]) return;
  std::cout << fmt::format("{:<35}{:<28}{:>9.4f} ms{:>7.1f} TF\n",
                           "  best:", item["best"]["plan"].get<std::string>(),
                           item["best"]["ms"].get<double>(), item["best"]["tflops"].get<double>());
}

int fail(const Error& error) {
  std::cerr << "lawson-bench-attention: " << to_string(error.kind) << ": " << error.message << "\n";
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
  Machine machine{*engine, *live, **driver};
  const auto stream = machine.driver.create_stream();
  if (!stream.ok()) return fail(stream.error());

  Json document{{"device", live->title}, {"rounds", flags.rounds}};
  Json& rows = document["rows"] = Json::array();
  int broken = 0;
  int slower = 0;
  double worst = 0;
  for (const Shape& shape : flags.are_short ? short_shapes() : kShapes) {
    for (const bool backward : {false, true}) {
      const std::string name = shape.text() + (backward ? " backward" : " forward");
      if (name.find(flags.only) == std::string::npos) continue;
      auto outcome = measure(flags, machine, shape, backward, *stream);
      if (!outcome.ok()) {
        ++broken;
        rows.push_back({{"shape", name}, {"error", outcome.error().message}});
        std::cout << name << ": " << outcome.error().message << '\n';
        continue;
      }
      slower += outcome->ratio > 1 + flags.slack ? 1 : 0;
      worst = std::max(worst, outcome->ratio);
      print(outcome->json);
      rows.push_back(std::move(outcome->json));
    }
  }
  document["worst_ratio"] = worst;
  document["measured"] = rows.size();
  document["beyond_slack"] = slower;
  document["not_measured"] = broken;
  if (const Status written = write_result(flags.json, document); !written.ok()) {
    return fail(written.error());
  }
  static_cast<void>(machine.driver.destroy_stream(*stream));
  return broken == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lawson::cases

int main(int argc, char** argv) {
  lawson::cases::Flags flags;
  CLI::App app{"The chosen attention plan against every other plan that cuDNN lists."};
  app.add_option("--rounds", flags.rounds, "measurements of every plan")
      ->check(CLI::PositiveNumber);
  app.add_option("--slack", flags.slack,
                 "count chosen plans that are so much slower than the best");
  app.add_option("--only", flags.only, "shapes and passes whose name contains this");
  app.add_flag("--short", flags.are_short,
               "short sequences instead of those of the peers' figures");
  app.add_option("--json", flags.json, "write the result to this file");
  CLI11_PARSE(app, argc, argv);
  return lawson::cases::run(flags);
}
