// The JSON form of graphs (kind "graph" of the spec).
#pragma once

#include <string>

#include "base/json.h"
#include "ir/graph.h"

namespace lawson::ir {

// What a document holds at most: bytes of a name; inputs, ops and outputs.
inline constexpr std::size_t kMaxNameBytes = 256;
inline constexpr std::size_t kMaxEntries = 4096;

// Whether its document would be read back: plans carry their graph as one.
Status check_size(const Graph& graph);

// `source` names the document in messages. Unknown fields, wrong types, impossible shapes are
// errors that name field, value and what was allowed.
Result<Graph> graph_from_json(const Json& document, const std::string& source);

// The op of that name with the attributes in the reader's object ("axes", "value", ...); the
// object's other fields, and finish(), are the caller's.
Result<Op> op_from_json(const std::string& name, ObjectReader& reader);

// A document that graph_from_json reads back to an equal graph.
Json graph_to_json(const Graph& graph);

}  // namespace lawson::ir
