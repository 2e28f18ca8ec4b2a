// Which code this is. What an engine's build is to a key, the library's own is to the store: what
// it judges, how it lowers a graph and how it words a reason may change with every build of it.
#pragma once

#include <string>

namespace lawson::plan {

// "VERSION+ID" with the identity that the linker gave to this library (or program); "VERSION" where
// it gave none.
const std::string& library_build();

}  // namespace lawson::plan
