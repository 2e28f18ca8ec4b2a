// What fuzz targets share: seeds, and how a finding ends the run.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace lawson::fuzz {

// libFuzzer takes an abort as a finding and keeps the input.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

// `PROGRAM --seeds DIR` writes the seeds and ends.
inline void write_seeds_if_asked(int argc, char** argv, const std::vector<std::string>& seeds) {
  if (argc != 3 || std::string_view{argv[1]} != "--seeds") return;
  const std::filesystem::path folder{argv[2]};
  std::filesystem::create_directories(folder);
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    std::ofstream(folder / ("seed-" + std::to_string(i)), std::ios::binary) << seeds[i];
  }
  std::exit(0);
}

}  // namespace lawson::fuzz
