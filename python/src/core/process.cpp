// Of the process as a whole: versions, settings, devices, models, counters, traces.
#include "core/bind.h"

namespace lawson::python {

void bind_process(nb::module_& module) {
  module.def("version", &lawson::version, "The library's version, \"0.1.0\".");
  module.def(
      "configure",
      [](std::string cudnn_path, std::int32_t max_workers) {
        configure(Settings{std::move(cudnn_path), max_workers});
      },
      "cudnn_path"_a = "", "max_workers"_a = 0, Unlocked{},
      "Process-wide settings, before the first call that needs an engine. `cudnn_path`: a\n"
      "libcudnn.so.9 or a folder with one. `max_workers`: deviceless workers at once.");
  module.def("info", &lawson::info, Unlocked{},
             "Versions, libraries found and where, devices, environment variables, as JSON.");
  module.def("devices", &lawson::devices, Unlocked{},
             "GPUs of this machine, the host CPU and the target library, as a JSON list.");
  module.def("stats", &lawson::stats, Unlocked{}, "What this process counted, as JSON.");
  module.def("reset_stats", &lawson::reset_stats, Unlocked{}, "Counts from 0 again.");
  module.def(
      "trace_start",
      [](const std::string& path) { detail::check(lawson_trace_start(path.c_str())); }, "path"_a,
      Unlocked{}, "Notes each step with its time from here on. One trace at a time.");
  module.def(
      "trace_stop", [] { detail::check(lawson_trace_stop()); }, Unlocked{},
      "Writes the trace to its file.");
  module.def(
      "model_workloads",
      [](const std::string& config, const std::string& source, std::int64_t batch,
         std::int64_t seqlen, std::int64_t context, std::string passes, std::string dtype) {
        return model_workloads(
            config, source,
            ModelOptions{batch, seqlen, context, std::move(passes), std::move(dtype)});
      },
      "config"_a, "source"_a = "config.json", nb::kw_only(), "batch"_a = 0, "seqlen"_a = 0,
      "context"_a = 0, "passes"_a = "", "dtype"_a = "", Unlocked{},
      "A model's config.json as the JSON document of its workloads. 0 and \"\": the defaults\n"
      "(batch 1, seqlen 4096, context 8192, all passes, the config's dtype).");

  nb::class_<NamedDevice>(module, "Device",
                          "A GPU of this machine, the host CPU, or a target of the library.")
      .def(nb::init<const std::string&>(), "name"_a, Unlocked{},
           "\"cpu\", \"cuda\", \"cuda:N\", or a target (\"h200\", also an alias).")
      .def_prop_ro("name", [](const NamedDevice& self) { return self.device.name(); })
      .def_prop_ro(
          "is_present", [](const NamedDevice& self) { return self.device.is_present(); },
          "Whether it is in this machine.")
      .def(
          "limits",
          [](const NamedDevice& self, const std::string& engine) {
            return self.device.limits(engine);
          },
          "engine"_a = "", Unlocked{},
          "What was measured as the most that it does, as JSON. Takes seconds.")
      .def("__repr__",
           [](const NamedDevice& self) { return "lawson.Device('" + self.asked + "')"; });
}

}  // namespace lawson::python
