// Plans, bundles, fusions.
#include <map>

#include "core/bind.h"

namespace lawson::python {
namespace {

nb::bytes serialize(const Plan& plan) {
  const std::vector<std::byte> bytes = [&] {
    const nb::gil_scoped_release unlocked;
    return plan.serialize();
  }();
  return nb::bytes{bytes.data(), bytes.size()};
}

Plan deserialize(const nb::bytes& bytes) {
  const auto* data = static_cast<const std::byte*>(bytes.data());
  const std::size_t size = bytes.size();
  const nb::gil_scoped_release unlocked;
  return Plan::deserialize({data, size});
}

void execute(const Plan& plan, const std::map<std::int64_t, std::uintptr_t>& addresses,
             std::uintptr_t workspace, std::size_t workspace_size, std::uintptr_t stream) {
  std::vector<Binding> bindings;
  bindings.reserve(addresses.size());
  for (const auto& [uid, address] : addresses) {
    bindings.push_back({uid, reinterpret_cast<void*>(address)});
  }
  plan.execute(bindings, reinterpret_cast<void*>(workspace), workspace_size,
               reinterpret_cast<void*>(stream));
}

std::pair<bool, std::string> verify(const Plan& plan, std::uint64_t seed) {
  const Graph graph = plan.graph();
  Data data = Data::generate(graph, seed);
  plan.run(data);
  Verification result = data.verify(plan);
  return {result.ok, std::move(result.json)};
}

lawson_policy policy_of(const std::optional<std::string>& policy) {
  if (!policy) return LAWSON_POLICY_UNSET;
  if (*policy == "require") return LAWSON_POLICY_REQUIRE;
  if (*policy == "allow") return LAWSON_POLICY_ALLOW;
  throw Error(LAWSON_INVALID_ARGUMENT,
              "policy: '" + *policy + "' is not allowed; expected require or allow");
}

std::unique_ptr<Fusion> fuse(const Graph& graph, const NamedDevice* device,
                             const std::optional<std::string>& policy,
                             const std::optional<std::vector<std::string>>& engines,
                             const Options* options) {
  FuseOptions fuse;
  if (device != nullptr) fuse.device = device->asked;
  fuse.policy = policy_of(policy);
  if (engines) {
    if (engines->empty()) {
      throw Error(LAWSON_INVALID_ARGUMENT, "engines: an empty list; None is for the default");
    }
    fuse.engines = *engines;
  }
  fuse.options = or_default(options);
  return std::make_unique<Fusion>(graph, fuse);
}

std::vector<const Plan*> pointers(const std::vector<const Plan*>& plans) {
  for (const Plan* plan : plans) {
    if (plan == nullptr) throw Error(LAWSON_INVALID_ARGUMENT, "plans: None is no plan");
  }
  return plans;
}

}  // namespace

void bind_plans(nb::module_& module) {
  nb::class_<Plan>(module, "Plan", "What was compiled for graph, device, engine and options.")
      .def_static("deserialize", &deserialize, "data"_a,
                  "Of serialize()'s bytes. InvalidArgumentError: bad, stale or foreign bytes.")
      .def("serialize", &serialize, "As bytes, for another process.")
      .def_prop_ro("id", &Plan::id, "Hash of what will run.")
      .def_prop_ro("key", &Plan::key, "Hash of what was asked.")
      .def_prop_ro("engine", &Plan::engine)
      .def_prop_ro("name", &Plan::name, "cuDNN's engine config.")
      .def_prop_ro("target", &Plan::target)
      .def_prop_ro("workspace_size", &Plan::workspace_size, "Bytes.")
      .def("graph", &Plan::graph, Unlocked{}, "What it computes, after clean-ups.")
      .def("tuning", &Plan::tuning, Unlocked{}, "How it was chosen, as JSON.")
      .def(
          "load", [](Plan& self, const NamedDevice& device) { self.load(device.device); },
          "device"_a, Unlocked{}, "Makes it executable on a device of this machine.")
      .def(
          "keep",
          [](const Plan& self, const NamedDevice& device, const Options* options) {
            self.keep(device.device, or_default(options));
          },
          "device"_a, "options"_a = nb::none(), Unlocked{},
          "Loads it for those of this process who ask for its key on that device. `options`: what\n"
          "it was compiled with. A plan that is there already stays.")
      .def("execute", &execute, "addresses"_a, "workspace"_a = 0, "workspace_size"_a = 0,
           "stream"_a = 0, Unlocked{},
           "Runs a loaded plan: `addresses` from uid to device address (host address for the CPU\n"
           "and for by-value tensors). `workspace`: its address; `stream`: a CUstream. The memory\n"
           "is the caller's, and is used until the work on the stream is done.")
      .def("verify", &verify, "seed"_a = 0, Unlocked{},
           "Runs a loaded plan on random data and compares with the float64 oracle: whether all\n"
           "is within the bounds, and the errors as JSON.")
      .def("bench", &Plan::bench, "seed"_a = 0, "rounds"_a = 20, Unlocked{},
           "Times a loaded plan on random data by the device's clock, as JSON.")
      .def("__repr__", [](const Plan& self) {
        return "<lawson.Plan " + std::string{self.id()} + " of " + std::string{self.engine()} +
               " for " + std::string{self.target()} + ">";
      });

  module.def(
      "compile",
      [](const Graph& graph, const NamedDevice& device, const Options* options) {
        return lawson::compile(graph, device.device, or_default(options));
      },
      "graph"_a, "device"_a, "options"_a = nb::none(), Unlocked{},
      "The plan of this graph, from the process's cache, the bundles, the store, or built.\n"
      "UnsupportedError has every reason in its message when it does not fuse.");

  nb::class_<Fusion>(module, "Fusion", "A loaded plan, and how it was chosen.")
      .def_prop_ro("plan", &Fusion::plan, nb::rv_policy::reference_internal)
      .def_prop_ro("verdict", &Fusion::verdict, nb::rv_policy::reference_internal)
      .def_prop_ro("graph", &Fusion::graph, nb::rv_policy::reference_internal)
      .def_prop_ro("engine", &Fusion::engine)
      .def_prop_ro(
          "device", [](const Fusion& self) { return text(self.device().name()); },
          "The name of the device that it runs on.")
      .def("json", &Fusion::json, Unlocked{},
           "Policy, engines, what was tried before, verdict and graph, as JSON.");
  module.def(
      "fuse", &fuse, "graph"_a, "device"_a = nb::none(), "policy"_a = nb::none(),
      "engines"_a = nb::none(), "options"_a = nb::none(), Unlocked{},
      "The loaded plan for this graph; built once however many threads ask. `device` None:\n"
      "where the engine runs. `policy` None: LAWSON_POLICY, else \"require\". `engines` None:\n"
      "LAWSON_ENGINE, else cudnn (with \"allow\": then cpu).");

  nb::class_<BundleEntry>(module, "BundleEntry", "What a bundle's index says of a plan.")
      .def_ro("key", &BundleEntry::key)
      .def_ro("plan_id", &BundleEntry::plan_id)
      .def_ro("target", &BundleEntry::target)
      .def_ro("engine", &BundleEntry::engine)
      .def_ro("engine_version", &BundleEntry::engine_version)
      .def_ro("device_fingerprint", &BundleEntry::device_fingerprint)
      .def_ro("size", &BundleEntry::size, "Bytes, as Plan.serialize() gives it.")
      .def_ro("stored_size", &BundleEntry::stored_size, "Bytes in the file.");
  nb::class_<Bundle>(module, "Bundle", "Several plans in one file (docs/bundles.md).")
      .def_static(
          "write",
          [](const std::string& path, const std::vector<const Plan*>& plans) {
            Bundle::write(path, pointers(plans));
          },
          "path"_a, "plans"_a, Unlocked{}, "Replaces the file in one step.")
      .def_static(
          "append",
          [](const std::string& path, const std::vector<const Plan*>& plans) {
            Bundle::append(path, pointers(plans));
          },
          "path"_a, "plans"_a, Unlocked{}, "Adds to the bundle, or makes it, in one step.")
      .def_static("open", &Bundle::open, "path"_a, Unlocked{},
                  "Reads the index; a plan is read when it is asked for.")
      .def("__len__", &Bundle::size)
      .def(
          "entries",
          [](const Bundle& self) { return std::vector<BundleEntry>(self.begin(), self.end()); },
          "In the order of their keys.")
      .def(
          "plan",
          [](const Bundle& self, std::size_t index) {
            return std::make_unique<Plan>(self.plan(index));
          },
          "index"_a, Unlocked{})
      .def(
          "find", [](const Bundle& self, const std::string& key) { return self.find(key); },
          "key"_a, Unlocked{}, "The plan with this key (compile_key), or None.");
}

}  // namespace lawson::python
