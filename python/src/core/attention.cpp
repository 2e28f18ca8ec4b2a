// Attention configs.
#include "core/bind.h"

namespace lawson::python {
namespace {

lawson_attention_pass pass_of(const std::string& pass) {
  if (pass == "forward") return LAWSON_PASS_FORWARD;
  if (pass == "backward") return LAWSON_PASS_BACKWARD;
  throw Error(LAWSON_INVALID_ARGUMENT,
              "pass: '" + pass + "' is not allowed; expected forward or backward");
}

// The handles derive the same graph from the same config, and ask the same cache for its plan.
nb::typed<nb::object, Plan> attention_plan(const std::string& spec, const std::string& pass,
                                           const NamedDevice& device, const Options* options) {
  const Options& asked = or_default(options);
  std::optional<Plan> compiled;
  std::unique_ptr<Fusion> loaded;
  {
    const nb::gil_scoped_release unlocked;
    const Graph graph = AttentionConfig::from_spec(spec, "attention").graph(pass_of(pass));
    if (device.device.is_present()) {
      FuseOptions fuse;
      fuse.device = device.asked;
      fuse.policy = LAWSON_POLICY_REQUIRE;
      fuse.engines = {!asked.engine.empty()           ? asked.engine
                      : device.device.name() == "cpu" ? "cpu"
                                                      : "cudnn"};
      fuse.options = asked;
      fuse.options.engine.clear();
      loaded = std::make_unique<Fusion>(graph, fuse);
    } else {
      compiled = lawson::compile(graph, device.device, asked);
    }
  }
  if (compiled) return nb::cast(std::move(*compiled));
  return nb::cast(std::move(loaded)).attr("plan");
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<AttentionConfig>(module, "AttentionConfig",
                              "What an attention is: everything that selects a plan.")
      .def_static(
          "from_spec",
          [](const std::string& document, const std::string& source) {
            return AttentionConfig::from_spec(document, source);
          },
          "text"_a, "source"_a = "spec", Unlocked{},
          "Of a spec document of kind \"attention\" (docs/spec.md).")
      .def("spec", &AttentionConfig::spec, Unlocked{},
           "The spec with every default filled in: the form in which configs are compared.")
      .def(
          "graph",
          [](const AttentionConfig& self, const std::string& pass) {
            return self.graph(pass_of(pass));
          },
          "pass_"_a, Unlocked{}, "The graph of the pass \"forward\" or \"backward\".");

  module.def(
      "attention_select",
      [](const AttentionConfig& config, const NamedDevice& device, const Options* options) {
        return lawson::select(config, device.device, or_default(options));
      },
      "config"_a, "device"_a, "options"_a = nb::none(), Unlocked{},
      "Judges the config: of a training config both passes, of a context-parallel one every step.");
  module.def("attention_plan", &attention_plan, "spec"_a, "pass_"_a, "device"_a,
             "options"_a = nb::none(),
             "The plan that lawson_attention_forward (\"forward\") or lawson_attention_backward\n"
             "(\"backward\") runs for this spec; loaded, where the device is in this machine.");
}

}  // namespace lawson::python
