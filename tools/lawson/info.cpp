// info: what a bug report needs.
#include <fmt/format.h>

#include "terminal.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

bool is_flat(const Json& value) {
  return !value.is_structured() || value.empty();
}

std::string scalar_text(const Json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_structured()) return "none";
  return value.dump();
}

// A document as an indented list of names and values.
void describe(const Json& value, std::size_t depth, std::string& out) {
  const std::string indent(2 * depth, ' ');
  if (value.is_object()) {
    std::size_t longest = 0;
    for (const auto& [name, item] : value.items()) {
      if (is_flat(item)) longest = std::max(longest, name.size());
    }
    for (const auto& [name, item] : value.items()) {
      if (is_flat(item)) {
        out += indent + padded(name, longest + 2) + scalar_text(item) + '\n';
      } else {
        out += indent + paint(name, depth == 0 ? Style::bold : Style::plain) + '\n';
        describe(item, depth + 1, out);
      }
    }
  } else if (value.is_array()) {
    for (const Json& item : value) {
      if (is_flat(item)) {
        out += indent + "- " + scalar_text(item) + '\n';
        continue;
      }
      std::string block;
      describe(item, depth + 1, block);
      if (block.size() > indent.size()) block.replace(indent.size(), 1, "-");
      out += block;
    }
  } else {
    out += indent + scalar_text(value) + '\n';
  }
}

}  // namespace

void add_info(CLI::App& app, Session& session) {
  CLI::App* verb =
      add_verb(app, session, "info",
               "versions, libraries found and where, devices, environment: what a bug report needs",
               "lawson info --json");
  verb->callback([&session] {
    session.action = [&session] {
      const Json info = json_of(lawson_info);
      if (session.json) {
        emit(info);
      } else {
        std::string out;
        describe(info, 0, out);
        print_out(out);
      }
      return kExitOk;
    };
  });
}

}  // namespace lawson::cli
