// print SPEC: the lowered graphs.
#include "input.h"
#include "terminal.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

struct PrintArguments {
  std::string spec;
  bool dot = false;
};

int run_print(const Session& session, const PrintArguments& arguments) {
  const Document document = read_document(arguments.spec);
  const Spec spec = read_spec(document);
  const std::size_t count = lawson_spec_graph_count(spec.get());
  Json graphs = Json::array();
  std::string out;
  for (std::size_t i = 0; i < count; ++i) {
    const Graph graph = make<Graph>(lawson_spec_graph, spec.get(), i);
    if (session.json) {
      graphs.push_back(json_of(lawson_graph_json, graph.get()));
    } else {
      out += text_of(arguments.dot ? lawson_graph_dot : lawson_graph_print, graph.get());
    }
  }
  if (session.json) {
    emit({{"name", lawson_spec_name(spec.get())},
          {"spec", json_of(lawson_spec_json, spec.get())},
          {"graphs", std::move(graphs)}});
  }
  if (count == 0) {
    // Why it has no graph does not depend on the device.
    const Json verdict = probe(spec, find_device("cpu"), {});
    std::string message = document.source + ": this spec has no graph";
    for (const Json& reason : verdict["reasons"]) {
      message += "; " + reason["message"].get<std::string>();
    }
    if (session.json) return kExitNo;
    throw Failure("unsupported", kExitNo, message);
  }
  print_out(out);
  return kExitOk;
}

}  // namespace

void add_print(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<PrintArguments>();
  CLI::App* verb =
      add_plain_verb(app, session, "print", "the graph that a spec stands for",
                     "lawson print examples/specs/seed.json --dot | dot -Tsvg > seed.svg");
  verb->add_option("spec", arguments->spec, "a spec file (docs/spec.md), or - for standard input")
      ->required()
      ->type_name("SPEC");
  verb->add_flag("--dot", arguments->dot, "for Graphviz");
  verb->callback([arguments, &session] {
    session.action = [arguments, &session] { return run_print(session, *arguments); };
  });
}

}  // namespace lawson::cli
