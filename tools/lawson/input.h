// Reading what the person names: specs and model configs.
#pragma once

#include <string>
#include <vector>

#include "api.h"

namespace lawson::cli {

struct Document {
  std::string source;  // the file's name, for messages
  std::string text;
};

// A file, a folder with a config.json (a model's download), or "-" for standard input. At most
// 8 MiB. Anything that cannot be read is a bad input.
Document read_document(const std::string& path);

// The spec that a document is; of a model's config the error names the verbs for that.
Spec read_spec(const Document& document);

// A bundle that is to be read. One that cannot be is a bad input.
Bundle open_bundle(const std::string& path);

// Is it a spec (its top level has the field "lawson")? Whatever else is taken for a model's config.
bool is_spec(const Document& document);

struct ModelOptions {
  std::int64_t batch = 0;
  std::int64_t seqlen = 0;
  std::int64_t context = 0;
  std::string passes;
  std::string dtype;
};

// The library's answer: {"model", "model_type", "layers", "warnings", "workloads": [...]}.
Json model_workloads(const Document& document, const ModelOptions& options);

// {"model", "layers"?, "workloads": [{"name", "group", "layers", "note", "spec"}]}: a model's
// workloads, or a spec as the one workload of a group "spec". Warnings go to standard error.
Json workloads_of(const Document& document, const ModelOptions& options);

// "a,b" "c" -> a b c; without repetitions.
std::vector<std::string> split_list(const std::vector<std::string>& values);

}  // namespace lawson::cli
