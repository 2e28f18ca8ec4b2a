// The engine contract. An engine says whether it takes a graph on a device, compiles it to bytes,
// loads those bytes and executes them; it never knows who asks (planner, worker, tests).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "engine/device.h"
#include "ir/graph.h"

namespace lawson {

enum class Decision { supported, unsupported, undecided };
enum class Strength { judged, built, verified };
std::string_view to_string(Decision decision);
std::string_view to_string(Strength strength);

// How a plan is chosen among an engine's candidates. off: the first that builds, the same every
// time. quick: the first eight are timed on the live device. exhaustive: all that are worth it.
enum class Tuning { off, quick, exhaustive };
std::string_view to_string(Tuning tuning);
std::optional<Tuning> tuning_from_string(std::string_view text);

// What the caller asks for. Fields that change the choice of a plan are part of the key.
struct Options {
  Strength strength = Strength::judged;
  std::int64_t workspace_limit = -1;  // bytes; -1: no limit
  bool deterministic = false;
  Tuning tuning = Tuning::off;
  double deadline_ms = -1;  // for building and tuning; negative: none. Not part of the key.
  // Fusions that share compiled kernels with those of other sizes, where the engine has such plans.
  bool dynamic_shapes = false;
};

struct Verdict {
  Decision decision = Decision::unsupported;
  Strength strength = Strength::judged;
  Evidence evidence = Evidence::live;
  std::string engine;          // the engine that was asked (or that would have to answer)
  std::string key;             // what was asked
  std::string plan_id;         // what will run; empty until an engine config is chosen
  std::string target;          // device name
  std::string engine_version;  // cuDNN's version ("9.19.0"), or Lawson's for its own engines
  std::vector<Reason> reasons;
  std::optional<std::int64_t> workspace_bytes;
  std::string plan_name;                // cuDNN's name of the engine config ("eng9_k1=2")
  std::vector<std::string> plan_names;  // every candidate the heuristics listed, in order
  std::vector<std::string> rewrites;    // exact graph rewrites that were applied
  std::string defect;                   // the known defect that this verdict is about
  std::string choice;                   // where tuning was asked for: what the choice rests on
};

Json verdict_to_json(const Verdict& verdict);
Result<Verdict> verdict_from_json(const Json& document);

// One engine config that could run a graph.
struct Candidate {
  std::string name;  // cuDNN: "eng9_k1=2..."; engines with one way to run: their own name
};

// A compiled artefact: bytes and metadata. Serialised form: plan_to_bytes.
struct Plan {
  std::string key;
  std::string plan_id;
  std::string engine;
  std::string engine_version;
  std::string target;
  std::string device_fingerprint;
  std::string plan_name;
  std::int64_t workspace_bytes = 0;
  std::string graph_json;  // the canonical graph, for bindings and inspection
  std::string choice;      // as in Verdict
  // Chosen without the device, among the engine configs that can be built without it: a process
  // that has the device may have faster ones.
  bool deviceless = false;
  std::vector<std::byte> bytes;  // the engine's own
};

// The graph as a plan keeps it: without given contents of its inputs, but for by-value scalars.
std::string plan_graph_json(const ir::Graph& graph);

std::vector<std::byte> plan_to_bytes(const Plan& plan);
// Any defect of the bytes is an error that says what is wrong; never trusts a length.
Result<Plan> plan_from_bytes(std::span<const std::byte> bytes);

// The host's memory that it takes, as far as it is ours.
std::size_t host_bytes(const Plan& plan);
std::size_t host_bytes(const ir::Graph& graph);

// A plan that can be executed. Thread-safe to execute unless an engine says otherwise.
class Loaded {
 public:
  // What events about it say besides its plan's engine and key; set before it is handed out.
  struct Label {
    std::string_view pass;  // engine/subject.h
    int ordinal = -1;       // of the live GPU
  };

  virtual ~Loaded() = default;
  virtual const Plan& plan() const = 0;
  // The plan and what the engine made of it; without what a library behind it holds.
  virtual std::size_t host_bytes() const { return lawson::host_bytes(plan()); }

  Label label;
};

// Where an input or output lives: device memory for a CUDA device, host memory for cpu; by-value
// tensors are always host pointers.
struct Binding {
  std::int64_t uid = 0;  // ir::Graph::uid
  void* data = nullptr;
};

// What is done to a CUDA graph: one execution is added to an empty one, or a graph that one was
// added to gets other pointers.
enum class GraphUse { add, update };

// How an engine rounds, for error bounds: unit roundoff of the products' operands, of the
// accumulation, and whether intermediates may be kept wider than written.
struct Arithmetic {
  double operand_roundoff = 0;      // extra rounding of matmul operands (TF32: 2^-11); 0: none
  double accumulate_roundoff = 0;   // per addition (f32: 2^-24)
  double probability_roundoff = 0;  // storage of softmax probabilities between the two matmuls
  double function_roundoff = 0;     // relative error of exp, tanh, ...
  bool own_dropout = false;         // dropout's random stream is the engine's, not ops.h's
  double partial_roundoff = 0;  // storage of gradients that are then added: dK and dV of each head
                                // of a group, the scores' gradients for dBias
};

// The oracle's answer for one output: float64 values and, per element, a bound on how far a
// correct engine with the given arithmetic may be away. Contiguous, in logical order.
struct OracleOutput {
  ir::TensorId id = ir::kNone;
  std::vector<double> values;
  std::vector<double> bounds;  // infinite: anything goes
  // Where not empty: the leading box of the shape that a correct engine writes. The rest it leaves
  // as it is: rows of a ragged tensor behind the last sequence's end need not be in memory.
  Dims there;
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual std::string_view name() const = 0;
  virtual bool accepts(const Device& device) const = 0;  // runs on devices of this kind
  // The build that answers in this process, as in Verdict::engine_version. Cheap after the first
  // call, which may open libraries; an error where they are missing.
  virtual Result<std::string> version() = 0;
  // Whether it records diag::Event::create_graph itself, since it may need several graphs to judge
  // one; else one is counted for each question that it is asked first.
  virtual bool tells_graphs() const { return false; }

  virtual Result<Verdict> probe(const ir::Graph& graph, const Device& device,
                                const Options& options) = 0;
  // Engine configs, preferred first.
  virtual Result<std::vector<Candidate>> candidates(const ir::Graph& graph, const Device& device,
                                                    const Options& options) = 0;
  // `candidate` nullopt: the preferred one that builds within the options.
  virtual Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                               const std::optional<Candidate>& candidate, std::stop_token stop) = 0;
  virtual Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) = 0;
  virtual Status execute(const Loaded& loaded, std::span<const Binding> bindings, void* workspace,
                         void* stream) = 0;

  // Optional: an execution as nodes of a CUDA graph (a CUgraph), without a stream. UNSUPPORTED
  // where a plan cannot be had that way.
  virtual Status prepare_graph(const Loaded& loaded, GraphUse use,
                               std::span<const Binding> bindings, void* workspace, void* graph);

  virtual Arithmetic arithmetic(const ir::Graph& graph) const = 0;

  // Optional: float64 results with error bounds. Host pointers. Only the reference engine has it.
  virtual Result<std::vector<OracleOutput>> oracle(const ir::Graph& graph,
                                                   std::span<const Binding> inputs,
                                                   const Arithmetic& arithmetic);

  // Optional: GPUs of this machine and known targets; and what `info` reports (libraries found).
  virtual Result<std::vector<Device>> live_devices();
  virtual std::vector<Device> known_targets() const;
  virtual Json info();

  // Optional: memory on a live device, for callers without a framework of their own.
  virtual Result<void*> allocate(const Device& device, std::size_t bytes);
  virtual Status release(const Device& device, void* data);
  virtual Status copy_to_device(const Device& device, void* dst, const void* src,
                                std::size_t bytes);
  virtual Status copy_to_host(const Device& device, void* dst, const void* src, std::size_t bytes);
  virtual Status synchronize(const Device& device, void* stream);

  // Optional: times of a loaded plan on its device. Each of `rounds` rounds executes it
  // `executions` times, with the sets of bindings in turn; one more round before warms up. One
  // number per round: milliseconds of an execution, by the device's clock (a GPU's events around
  // captured work).
  virtual Result<std::vector<double>> measure(const Loaded& loaded,
                                              std::span<const std::vector<Binding>> sets,
                                              void* workspace, int executions, int rounds);

  // Optional: whether the stream is being captured into a graph. Nothing may be built or loaded
  // meanwhile.
  virtual Result<bool> capturing(const Device& device, void* stream);
};

// The key: hash of the canonical graph, the device fingerprint, the engine and its build, and the
// options that change the choice. The one place that derives it.
std::string make_key(const ir::Graph& graph, const Device& device, std::string_view engine,
                     std::string_view engine_version, const Options& options);

// The plan id: key + engine config + rewrites.
std::string make_plan_id(std::string_view key, std::string_view plan_name,
                         const std::vector<std::string>& rewrites);

}  // namespace lawson
