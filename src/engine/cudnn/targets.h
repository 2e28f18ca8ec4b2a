// The target library's files, embedded by CMake.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lawson::cudnn {

struct TargetFile {
  std::string name;  // "h200.json"
  std::string_view text;
};

extern const std::vector<TargetFile> kTargetFiles;

}  // namespace lawson::cudnn
