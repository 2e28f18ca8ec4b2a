// Printed graphs of specs, compared with tests/golden/graphs/NAME.txt: the specs of examples/specs
// and those beside the texts. LAWSON_UPDATE_GOLDEN=1 rewrites the texts: read the difference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "front/spec.h"

namespace lawson {
namespace {

namespace fs = std::filesystem;

const fs::path kGolden = fs::path{LAWSON_SOURCE_DIR} / "tests" / "golden" / "graphs";
const fs::path kExamples = fs::path{LAWSON_SOURCE_DIR} / "examples" / "specs";

std::vector<fs::path> specs() {
  std::vector<fs::path> found;
  for (const fs::path& folder : {kGolden, kExamples}) {
    if (!fs::exists(folder)) continue;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".json") found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string printed(const fs::path& path) {
  const auto text = read_file(path.string());
  if (!text.ok()) return text.error().message;
  const auto document = parse_json(*text, path.filename().string());
  if (!document.ok()) return document.error().message;
  const auto spec = front::spec_from_json(*document, path.filename().string());
  if (!spec.ok()) return "error: " + spec.error().message + "\n";
  std::string out;
  for (const auto& part : spec->parts) out += ir::print(part.graph);
  for (const Reason& reason : spec->unsupported) {
    out += fmt::format("unsupported {} ({}): {}\n", reason.code, reason.field, reason.message);
  }
  return out;
}

class Golden : public testing::TestWithParam<fs::path> {};

TEST_P(Golden, PrintsAsBefore) {
  const std::string text = printed(GetParam());
  const fs::path golden = kGolden / GetParam().stem().replace_extension(".txt");
  if (std::getenv("LAWSON_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(golden) << text;
    return;
  }
  const auto expected = read_file(golden.string());
  ASSERT_TRUE(expected.ok()) << expected.error().message << "; LAWSON_UPDATE_GOLDEN=1 writes it";
  EXPECT_EQ(text, *expected);
}

INSTANTIATE_TEST_SUITE_P(Specs, Golden, testing::ValuesIn(specs()), [](const auto& path) {
  std::string name = path.param.stem().string();
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
});

TEST(GoldenFolder, HasNoTextWithoutASpec) {
  std::set<std::string> known;
  for (const fs::path& path : specs()) known.insert(path.stem().string());
  for (const auto& entry : fs::directory_iterator(kGolden)) {
    EXPECT_TRUE(known.contains(entry.path().stem().string())) << entry.path();
  }
  EXPECT_GE(known.size(), 12U);
}

}  // namespace
}  // namespace lawson
