// run SPEC: generated inputs, one plan per graph, times, and the check against the oracle.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cctype>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "input.h"
#include "npy.h"
#include "place.h"
#include "terminal.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

namespace fs = std::filesystem;

struct RunArguments {
  std::string spec;
  ProbeOptions options;
  std::string target;
  std::string plan;
  std::string save;
  std::string load;
  std::uint64_t seed = 0;
  std::int32_t repeat = 5;
  bool verify = false;
};

// The graph without names and run-time data: equal texts are the same computation.
std::string anonymous_text(const Graph& graph) {
  Json document = json_of(lawson_graph_json, graph.get());
  std::map<std::string, std::string> names;
  const auto rename = [&](Json& name) {
    if (!name.is_string()) return;
    const auto old = name.get<std::string>();
    name = names.emplace(old, std::to_string(names.size())).first->second;
  };
  document.erase("name");
  for (Json& input : document["inputs"]) {
    rename(input["name"]);
    input.erase("values");
    input.erase("domain");
  }
  for (Json& op : document["ops"]) {
    for (Json& name : op["in"]) rename(name);
    for (Json& name : op["out"]) rename(name);
  }
  for (Json& output : document["outputs"]) rename(output["name"]);
  return document.dump();
}

// A tensor may be named anything; a file in the folder may not.
std::string file_name(std::string_view tensor) {
  std::string out;
  for (const char c : tensor) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_plain =
        std::isalnum(byte) != 0 || c == '_' || c == '-' || (c == '.' && !out.empty());
    out += is_plain ? std::string(1, c) : fmt::format("%{:02X}", byte);
  }
  return out + ".npy";
}

Json reasons_of(const Spec& spec, const Place& place) {
  ProbeOptions options;
  options.engine = place.engine;
  return probe(spec, place.device, options).value("reasons", Json::array());
}

// One graph with its plan, its data and what came out.
struct Part {
  Graph graph;
  std::vector<lawson_tensor_info> tensors;
  Plan plan;
  Data data;
  lawson_run_result time{};
  Json verified;  // null without --verify
};

void* buffer_of(const Part& part, const lawson_tensor_info& tensor) {
  void* buffer = nullptr;
  std::size_t size = 0;
  check(lawson_data_buffer(part.data.get(), tensor.uid, &buffer, &size));
  return buffer;
}

class Runner {
 public:
  explicit Runner(const RunArguments& arguments)
      : arguments_{arguments},
        document_{read_document(arguments.spec)},
        spec_{read_spec(document_)},
        place_{choose_place(arguments.options.engine, arguments.target)} {}

  void run() {
    const std::size_t count = lawson_spec_graph_count(spec_.get());
    if (count == 0) refuse();
    const bool folder = !arguments_.save.empty() || !arguments_.load.empty();
    if (folder && json_of(lawson_spec_json, spec_.get()).contains("context_parallel")) {
      throw bad_input(
          fmt::format("{}: {} is for the tensors of one graph or of training; each step of "
                      "context_parallel has its own of the same names",
                      document_.source, arguments_.save.empty() ? "--load" : "--save"));
    }
    for (std::size_t i = 0; i < count; ++i) {
      Part part;
      part.graph = make<Graph>(lawson_spec_graph, spec_.get(), i);
      part.tensors = tensors_of(part.graph);
      part.plan = arguments_.plan.empty() ? compile(part) : from_bundle(part);
      check(lawson_plan_load(part.plan.get(), place_.device.get()));
      part.data = make<Data>(lawson_data_generate, part.graph.get(), arguments_.seed);
      if (!arguments_.load.empty()) load(part);
      for (const Part& earlier : parts_) {
        if (computation_of(earlier) == computation_of(part)) feed(earlier, part);
      }
      part.time.struct_size = sizeof(part.time);
      check(lawson_plan_run(part.plan.get(), part.data.get(), arguments_.repeat, &part.time));
      if (arguments_.verify) verify(part);
      parts_.push_back(std::move(part));
    }
    if (!arguments_.save.empty()) save();
  }

  bool verified() const {
    for (const Part& part : parts_) {
      if (!part.verified.is_null() && !part.verified.value("ok", false)) return false;
    }
    return true;
  }

  Json json() const {
    Json graphs = Json::array();
    for (const Part& part : parts_) {
      Json item{{"name", lawson_graph_name(part.graph.get())},
                {"plan_id", lawson_plan_id(part.plan.get())},
                {"key", lawson_plan_key(part.plan.get())},
                {"plan_name", lawson_plan_name(part.plan.get())},
                {"workspace_bytes", lawson_plan_workspace_size(part.plan.get())},
                {"milliseconds",
                 {{"min", part.time.milliseconds_min},
                  {"median", part.time.milliseconds_median},
                  {"max", part.time.milliseconds_max}}}};
      if (!part.verified.is_null()) item["verify"] = part.verified;
      graphs.push_back(std::move(item));
    }
    Json out{{"spec", document_.source},
             {"engine", place_.engine},
             {"target", lawson_device_name(place_.device.get())},
             {"seed", arguments_.seed},
             {"repeat", arguments_.repeat},
             {"graphs", std::move(graphs)}};
    if (arguments_.verify) out["ok"] = verified();
    if (!arguments_.save.empty()) out["saved"] = arguments_.save;
    return out;
  }

  std::string text() const {
    std::string out;
    for (const Part& part : parts_) {
      out += paint(lawson_graph_name(part.graph.get()), Style::bold) +
             paint(fmt::format("  on {} · {} {} · plan {}\n",
                               lawson_device_name(place_.device.get()), place_.engine,
                               lawson_plan_name(part.plan.get()), lawson_plan_id(part.plan.get())),
                   Style::dim);
      out += fmt::format("  time     median {}, min {}, max {} ({})\n",
                         milliseconds_text(part.time.milliseconds_median),
                         milliseconds_text(part.time.milliseconds_min),
                         milliseconds_text(part.time.milliseconds_max),
                         counted(static_cast<std::size_t>(arguments_.repeat), "run"));
      if (part.verified.is_null()) continue;
      for (const Json& output : part.verified["outputs"]) out += verified_line(output);
    }
    if (!arguments_.save.empty()) out += fmt::format("saved to {}\n", arguments_.save);
    return out;
  }

 private:
  static std::string verified_line(const Json& output) {
    const bool ok = output.value("ok", false);
    const auto number = [&](const char* field) {
      return output.contains(field) && output[field].is_number() ? output[field].get<double>() : 0;
    };
    std::string text = fmt::format(
        "{} within the oracle's bound: largest error {:.3g}, at most {:.0f}% of an element's bound",
        ok ? "is" : "is not", number("max_error"), 100 * number("max_error_over_bound"));
    if (!ok) text += ". " + output.value("message", std::string{});
    return paragraph("  " + paint(ok ? "✓" : "✗", ok ? Style::good : Style::bad) + " " +
                         padded(output.value("name", std::string{}), 6) + " ",
                     text);
  }

  [[noreturn]] void refuse() const {
    std::vector<std::string> messages;
    for (const Json& reason : reasons_of(spec_, place_)) {
      messages.push_back(reason.value("message", std::string{}));
    }
    throw Failure("unsupported", kExitNo,
                  fmt::format("{}: {}", document_.source, fmt::join(messages, "; ")));
  }

  Plan compile(const Part& part) const {
    ProbeOptions options = arguments_.options;
    options.engine = place_.engine;
    const lawson_options c_options = options.c();
    return make<Plan>(lawson_compile, part.graph.get(), place_.device.get(), &c_options);
  }

  Plan from_bundle(const Part& part) const {
    const Bundle bundle = open_bundle(arguments_.plan);
    // Plans are of the graph after clean-ups.
    const std::string wanted =
        anonymous_text(make<Graph>(lawson_graph_simplified, part.graph.get()));
    std::vector<std::string> targets;
    for (std::size_t i = 0; i < lawson_bundle_size(bundle.get()); ++i) {
      Plan plan = make<Plan>(lawson_bundle_plan, bundle.get(), i);
      const Graph graph = make<Graph>(lawson_plan_graph, plan.get());
      if (anonymous_text(graph) != wanted) continue;
      const std::string target = lawson_plan_target(plan.get());
      if (lawson_plan_engine(plan.get()) == place_.engine &&
          target == lawson_device_name(place_.device.get())) {
        return plan;
      }
      targets.push_back(fmt::format("{} for {}", lawson_plan_engine(plan.get()), target));
    }
    if (!targets.empty()) {
      throw bad_input(
          fmt::format("{}: has this graph for other places only: {}; this run is {} "
                      "on {}",
                      arguments_.plan, fmt::join(targets, ", "), place_.engine,
                      lawson_device_name(place_.device.get())));
    }
    throw bad_input(fmt::format("{}: has no plan of graph '{}' ({} of other graphs)",
                                arguments_.plan, lawson_graph_name(part.graph.get()),
                                counted(lawson_bundle_size(bundle.get()), "plan")));
  }

  // Forward and backward of one computation: "NAME.forward", "NAME.backward".
  static std::string computation_of(const Part& part) {
    const std::string name = lawson_graph_name(part.graph.get());
    return name.substr(0, name.rfind('.'));
  }

  // The outputs and inputs of an earlier graph are the inputs of the same name of a later one.
  static void feed(const Part& from, const Part& to) {
    for (const lawson_tensor_info& target : to.tensors) {
      if (target.is_input == 0) continue;
      for (const lawson_tensor_info& source : from.tensors) {
        if (std::strcmp(source.name, target.name) != 0 ||
            std::strcmp(source.dtype, target.dtype) != 0 || shape_of(source) != shape_of(target)) {
          continue;
        }
        fill_tensor(target, buffer_of(to, target), array_of(source, buffer_of(from, source)));
      }
    }
  }

  void load(const Part& part) const {
    const fs::path folder = arguments_.load;
    std::error_code code;
    if (!fs::is_directory(folder, code)) {
      throw bad_input(fmt::format("--load {}: is not a folder", arguments_.load));
    }
    const Json saved = manifest_tensors(folder / "manifest.json");
    for (const lawson_tensor_info& tensor : part.tensors) {
      if (tensor.is_input == 0) continue;
      const std::string path = (folder / file_name(tensor.name)).string();
      // Left out, a scalar keeps the spec's value; an earlier graph's outputs are computed.
      if (!fs::exists(path, code) && (tensor.is_by_value != 0 || computed_earlier(tensor)))
        continue;
      if (saved.contains(tensor.name) && saved[tensor.name] != tensor.dtype) {
        throw bad_input(fmt::format("{}: tensor '{}' was saved as {}; expected {}",
                                    (folder / "manifest.json").string(), tensor.name,
                                    saved[tensor.name].dump(), tensor.dtype));
      }
      const Array array = read_npy(path, std::size_t{1} << 40);
      if (array.descr != npy_type(tensor.dtype)) {
        throw bad_input(fmt::format("{}: has element type {}; expected {} for {} '{}'", path,
                                    array.descr, npy_type(tensor.dtype), tensor.dtype,
                                    tensor.name));
      }
      if (array.shape != shape_of(tensor)) {
        throw bad_input(fmt::format("{}: has shape {}; expected {}", path, shape_text(array.shape),
                                    shape_text(shape_of(tensor))));
      }
      fill_tensor(tensor, buffer_of(part, tensor), array);
    }
  }

  bool computed_earlier(const lawson_tensor_info& tensor) const {
    for (const Part& part : parts_) {
      for (const lawson_tensor_info& other : part.tensors) {
        if (std::strcmp(other.name, tensor.name) == 0) return true;
      }
    }
    return false;
  }

  // {name: dtype}; empty when there is no manifest, which files of other tools do without.
  static Json manifest_tensors(const fs::path& path) {
    Json out = Json::object();
    std::error_code code;
    if (!fs::exists(path, code)) return out;
    const Document document = read_document(path.string());
    const Json manifest = Json::parse(document.text, nullptr, false);
    if (!manifest.is_object() || !manifest.contains("tensors") || !manifest["tensors"].is_array()) {
      throw bad_input(fmt::format("{}: is not a manifest: expected an object with field 'tensors'",
                                  path.string()));
    }
    for (const Json& tensor : manifest["tensors"]) {
      if (tensor.is_object() && tensor.contains("name") && tensor["name"].is_string()) {
        out[tensor["name"].get<std::string>()] = tensor.value("dtype", Json());
      }
    }
    return out;
  }

  static void verify(Part& part) {
    int ok = 0;
    part.verified = json_of(lawson_data_verify, part.plan.get(), part.data.get(), &ok);
  }

  void save() const {
    const fs::path folder = arguments_.save;
    std::error_code code;
    fs::create_directories(folder, code);
    if (!fs::is_directory(folder)) {
      throw bad_input(fmt::format("--save {}: the folder cannot be made ({})", arguments_.save,
                                  code.message()));
    }
    Json tensors = Json::array();
    Json graphs = Json::array();
    std::map<std::string, bool> written;
    for (const Part& part : parts_) {
      for (const lawson_tensor_info& tensor : part.tensors) {
        if (!written.emplace(tensor.name, true).second) continue;
        const std::string file = file_name(tensor.name);
        const Array array = array_of(tensor, buffer_of(part, tensor));
        write_npy((folder / file).string(), array);
        tensors.push_back({{"name", tensor.name},
                           {"role", tensor.is_input != 0 ? "input" : "output"},
                           {"dtype", tensor.dtype},
                           {"shape", array.shape},
                           {"file", file},
                           {"npy_type", array.descr}});
      }
      graphs.push_back({{"name", lawson_graph_name(part.graph.get())},
                        {"plan_id", lawson_plan_id(part.plan.get())},
                        {"key", lawson_plan_key(part.plan.get())},
                        {"plan_name", lawson_plan_name(part.plan.get())}});
    }
    const Json manifest{{"lawson", 1},
                        {"kind", "run"},
                        {"version", lawson_version()},
                        {"engine", place_.engine},
                        {"target", lawson_device_name(place_.device.get())},
                        {"seed", arguments_.seed},
                        {"spec", json_of(lawson_spec_json, spec_.get())},
                        {"graphs", std::move(graphs)},
                        {"tensors", std::move(tensors)}};
    std::ofstream file(folder / "manifest.json");
    file << manifest.dump(2) << '\n';
    file.close();
    if (!file) {
      throw Failure("io", kExitEnvironment,
                    fmt::format("{}: cannot be written", (folder / "manifest.json").string()));
    }
  }

  const RunArguments& arguments_;
  Document document_;
  Spec spec_;
  Place place_;
  std::vector<Part> parts_;
};

int run_run(const Session& session, const RunArguments& arguments) {
  Runner runner(arguments);
  runner.run();
  if (session.json) {
    emit(runner.json());
  } else {
    print_out(runner.text());
  }
  return runner.verified() ? kExitOk : kExitNo;
}

}  // namespace

void add_run(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* verb =
      add_verb(app, session, "run",
               "execute a spec on generated inputs; the backward of a training pass "
               "gets the forward's results",
               "lawson run examples/specs/attention-causal.json --engine cpu --verify");
  verb->add_option("spec", arguments->spec, "a spec file (docs/spec.md), or - for standard input")
      ->required()
      ->type_name("SPEC");
  verb->add_option("-e,--engine", arguments->options.engine,
                   "cudnn, cpu or reference (default: LAWSON_ENGINE, else cudnn)")
      ->type_name("NAME");
  verb->add_option("-t,--target", arguments->target, "the GPU of this machine to run on")
      ->type_name("NAME");
  verb->add_option("--plan", arguments->plan, "take the plans from this bundle; compile nothing")
      ->type_name("BUNDLE");
  verb->add_flag("--verify", arguments->verify,
                 "compare with the float64 oracle; exit 1 if not ok");
  add_tuning_options(verb, arguments->options, true);
  add_seed_option(verb, arguments->seed);
  verb->add_option("--repeat", arguments->repeat, "timed executions after one warm-up (default 5)")
      ->type_name("N")
      ->check(CLI::Range(1, 1000000));
  verb->add_option("--save", arguments->save, "write all inputs and outputs as NAME.npy")
      ->type_name("DIR");
  verb->add_option("--load", arguments->load, "take the inputs from such a folder")
      ->type_name("DIR");
  add_trace_option(verb, session);
  verb->callback([arguments, &session] {
    session.action = [arguments, &session] { return run_run(session, *arguments); };
  });
}

}  // namespace lawson::cli
