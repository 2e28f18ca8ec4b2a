// Graphs and specs.
#include "core/bind.h"

namespace lawson::python {

void bind_graphs(nb::module_& module) {
  nb::class_<TensorInfo>(module, "TensorInfo", "A tensor that a graph's caller binds.")
      .def_ro("uid", &TensorInfo::uid)
      .def_ro("name", &TensorInfo::name)
      .def_ro("dtype", &TensorInfo::dtype, "As in a spec: \"bf16\", \"f8e4m3\", ...")
      .def_ro("shape", &TensorInfo::shape)
      .def_ro("strides", &TensorInfo::strides, "In elements.")
      .def_ro("is_input", &TensorInfo::is_input)
      .def_ro("is_by_value", &TensorInfo::is_by_value, "One element, bound on the host.")
      .def_ro("alignment", &TensorInfo::alignment, "Bytes.")
      .def_ro("size", &TensorInfo::size, "Bytes from the first to the last element.")
      .def("__repr__", [](const TensorInfo& self) {
        std::string shape;
        for (const std::int64_t dim : self.shape) {
          shape += (shape.empty() ? "" : ",") + std::to_string(dim);
        }
        return "<" + self.name + ": " + self.dtype + "[" + shape + "]>";
      });

  nb::class_<Graph>(module, "Graph", "A typed program over a closed set of ops (docs/spec.md).")
      .def_static(
          "from_json",
          [](const std::string& document, const std::string& source) {
            return Graph::from_json(document, source);
          },
          "text"_a, "source"_a = "graph", Unlocked{},
          "Of a document of kind \"graph\"; `source` names it in messages.")
      .def_prop_ro("name", [](const Graph& self) { return text(self.name()); })
      .def("tensors", &Graph::tensors, "Inputs first, then outputs.")
      .def("json", &Graph::json, Unlocked{}, "The document, with defaults filled in.")
      .def("print", &Graph::print, Unlocked{}, "As text, one op a line.")
      .def("dot", &Graph::dot, Unlocked{}, "As a Graphviz drawing.")
      .def("simplified", &Graph::simplified, Unlocked{},
           "After the clean-ups that change no bit: what a plan of it is of.")
      .def("__repr__",
           [](const Graph& self) { return "<lawson.Graph '" + std::string{self.name()} + "'>"; });
  module.def(
      "gradient",
      [](const Graph& graph, const std::vector<std::string>& wrt) {
        return lawson::gradient(graph, wrt);
      },
      "graph"_a, "wrt"_a, Unlocked{},
      "The backward graph for the inputs named in `wrt`. Its inputs: those of the graph that it\n"
      "reads, then a cotangent d_NAME for each float output; its outputs: d_NAME for each of\n"
      "`wrt`. UnsupportedError names an op without a gradient and where it was written.");

  nb::class_<Spec>(module, "Spec", "A spec document and the graphs that it stands for.")
      .def_static(
          "from_json",
          [](const std::string& document, const std::string& source) {
            return Spec::from_json(document, source);
          },
          "text"_a, "source"_a = "spec", Unlocked{}, "Of a document of either kind.")
      .def_prop_ro("name", [](const Spec& self) { return text(self.name()); })
      .def("json", &Spec::json, Unlocked{}, "The document, with defaults filled in.")
      .def(
          "graphs",
          [](const Spec& self) {
            std::vector<Graph> graphs;
            for (std::size_t i = 0; i < self.graph_count(); ++i) graphs.push_back(self.graph(i));
            return graphs;
          },
          Unlocked{},
          "One, two for an attention of pass \"training\", or none: what the spec asks for cannot\n"
          "be expressed, and a probe says what.");
}

}  // namespace lawson::python
