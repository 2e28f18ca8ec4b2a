// Options, verdicts and explanations.
#include <array>

#include "core/bind.h"

namespace lawson::python {
namespace {

constexpr std::array kStrengths{"judged", "built", "verified"};
constexpr std::array kTunings{"off", "quick", "exhaustive"};
constexpr std::array kDecisions{"supported", "unsupported", "undecided"};

template <typename Enum, std::size_t N>
Enum word(const std::array<const char*, N>& words, const char* field, const std::string& given) {
  std::string allowed;
  for (std::size_t i = 0; i < N; ++i) {
    if (given == words[i]) return static_cast<Enum>(i);
    allowed += (i == 0 ? "" : i + 1 < N ? ", " : " or ") + std::string{words[i]};
  }
  throw Error(LAWSON_INVALID_ARGUMENT,
              std::string{field} + ": '" + given + "' is not allowed; expected " + allowed);
}

Options make_options(const std::optional<std::string>& engine, const std::string& strength,
                     std::int64_t workspace_limit, bool deterministic, double deadline_ms,
                     const std::string& tuning, bool retune, bool dynamic_shapes) {
  return {engine.value_or(""),
          word<lawson_strength>(kStrengths, "strength", strength),
          workspace_limit,
          deterministic,
          deadline_ms,
          word<lawson_tuning>(kTunings, "tuning", tuning),
          retune,
          dynamic_shapes};
}

}  // namespace

void bind_verdicts(nb::module_& module) {
  nb::class_<Options>(module, "Options", "How to judge, build and choose. Immutable.")
      .def(
          "__init__",
          [](Options* self, const std::optional<std::string>& engine, const std::string& strength,
             std::int64_t workspace_limit, bool deterministic, double deadline_ms,
             const std::string& tuning, bool retune, bool dynamic_shapes) {
            new (self) Options{make_options(engine, strength, workspace_limit, deterministic,
                                            deadline_ms, tuning, retune, dynamic_shapes)};
          },
          "engine"_a = nb::none(), "strength"_a = "built", "workspace_limit"_a = -1,
          "deterministic"_a = false, "deadline_ms"_a = 0.0, "tuning"_a = "off", "retune"_a = false,
          "dynamic_shapes"_a = false,
          "`engine`: \"cudnn\", \"cpu\", \"reference\"; None: cudnn for GPUs, cpu for the CPU.\n"
          "`strength`: \"judged\", \"built\" or \"verified\". `workspace_limit`: bytes; negative:\n"
          "none. `deadline_ms`: for building and tuning; 0: none. `tuning`: \"off\", \"quick\" or\n"
          "\"exhaustive\". `retune`: time the stored candidates again. `dynamic_shapes`: one "
          "kernel\n"
          "for all lengths, where the engine has such plans.")
      .def_prop_ro("engine",
                   [](const Options& self) {
                     return self.engine.empty() ? std::nullopt : std::optional{self.engine};
                   })
      .def_prop_ro(
          "strength",
          [](const Options& self) { return kStrengths[static_cast<std::size_t>(self.strength)]; })
      .def_ro("workspace_limit", &Options::workspace_limit, "Bytes; negative: none.")
      .def_ro("deterministic", &Options::deterministic)
      .def_ro("deadline_ms", &Options::deadline_ms)
      .def_prop_ro(
          "tuning",
          [](const Options& self) { return kTunings[static_cast<std::size_t>(self.tuning)]; })
      .def_ro("retune", &Options::retune)
      .def_ro("dynamic_shapes", &Options::dynamic_shapes);

  nb::class_<Verdict>(module, "Verdict", "The answer to: does this run as one fused kernel?")
      .def_prop_ro(
          "decision",
          [](const Verdict& self) { return kDecisions[static_cast<std::size_t>(self.decision())]; },
          "\"supported\", \"unsupported\" or \"undecided\" (only the live device can tell).")
      .def_prop_ro("supported", &Verdict::supported)
      .def_prop_ro(
          "strength",
          [](const Verdict& self) { return kStrengths[static_cast<std::size_t>(self.strength())]; },
          "\"judged\", \"built\" or \"verified\".")
      .def_prop_ro("engine", &Verdict::engine)
      .def_prop_ro("key", &Verdict::key)
      .def_prop_ro("plan_id", &Verdict::plan_id, "\"\" when there is none.")
      .def_prop_ro(
          "reasons",
          [](const Verdict& self) {
            std::vector<std::pair<std::string, nb::str>> list;
            for (const Reason& reason : self.reasons()) {
              list.emplace_back(reason.code, text(reason.message));
            }
            return list;
          },
          "Pairs of code and message: why not.")
      .def("json", &Verdict::json, Unlocked{}, "All of it, as JSON.")
      .def("__bool__", &Verdict::supported)
      .def("__repr__", [](const Verdict& self) {
        return "<lawson.Verdict " +
               std::string{kDecisions[static_cast<std::size_t>(self.decision())]} + ">";
      });

  module.def(
      "probe",
      [](const Graph& graph, const NamedDevice& device, const Options* options) {
        return lawson::probe(graph, device.device, or_default(options));
      },
      "graph"_a, "device"_a, "options"_a = nb::none(), Unlocked{},
      "Judges a graph, or all graphs of a spec. Unsupported is an answer; what is raised is a\n"
      "fault or bad input.");
  module.def(
      "probe",
      [](const Spec& spec, const NamedDevice& device, const Options* options) {
        return lawson::probe(spec, device.device, or_default(options));
      },
      "spec"_a, "device"_a, "options"_a = nb::none(), Unlocked{});
  module.def(
      "explain",
      [](const Spec& spec, const NamedDevice& device, const Options* options, std::size_t limit) {
        return lawson::explain(spec, device.device, or_default(options), limit);
      },
      "spec"_a, "device"_a, "options"_a = nb::none(), "limit"_a = 0, Unlocked{},
      "The verdict, every failing condition and the nearest neighbours, each probed, as JSON.\n"
      "`limit`: the most neighbours to probe; 0: the default.");
  module.def(
      "compile_key",
      [](const Graph& graph, const NamedDevice& device, const Options* options) {
        return lawson::compile_key(graph, device.device, or_default(options));
      },
      "graph"_a, "device"_a, "options"_a = nb::none(), Unlocked{},
      "The key that a plan of this has, found without judging or building.");
}

}  // namespace lawson::python
