// What an entry of the store holds, read back: that it is of the kind that its header says, and
// answers the question that its header says.
#pragma once

#include <string_view>

#include "engine/engine.h"
#include "plan/store_entry.h"

namespace lawson::plan {

// Anything else than the plan or verdict of the header is an error that says what is wrong.
Result<Plan> plan_of_content(const EntryHeader& header, std::string_view content);
Result<Verdict> verdict_of_content(const EntryHeader& header, std::string_view content);

// The same of an entry of any kind.
Status check_content(const EntryHeader& header, std::string_view content);

}  // namespace lawson::plan
