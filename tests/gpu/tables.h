// What a run of the case list says of features, ops and reasons.
#pragma once

#include <vector>

#include "gpu/examine.h"

namespace lawson::cases {

// Of attention, by feature and pass: [accepted, refused, wrong].
Json feature_table(const std::vector<Row>& rows);
// Of fusions, by op that is in them: the same.
Json op_table(const std::vector<Row>& rows);
// Reasons by code and field, each with its shortest message as an example.
Json reason_table(const std::vector<Row>& rows);

}  // namespace lawson::cases
