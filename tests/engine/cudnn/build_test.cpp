// The build itself: what it costs must not grow unnoticed.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <set>
#include <string>

namespace {

// Every object file whose compile read cudnn_frontend.h, from ninja's dependency data.
TEST(Build, OneTranslationUnitIncludesTheFrontend) {
  const std::string program = BUILD_PROGRAM;
  if (program.find("ninja") == std::string::npos) GTEST_SKIP() << "the build is not ninja's";
  const std::string command = program + " -C " + LAWSON_BINARY_DIR + " -t deps 2>/dev/null";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::set<std::string> objects;
  std::string object;
  std::string line;
  std::array<char, 4096> buffer{};
  bool any = false;
  while (std::fgets(buffer.data(), static_cast<int>(buffer.size()), pipe) != nullptr) {
    line = buffer.data();
    any = true;
    if (line.front() != ' ') {
      object = line.substr(0, line.find(':'));
    } else if (line.find("/cudnn_frontend.h") != std::string::npos) {
      objects.insert(object);
    }
  }
  pclose(pipe);
  ASSERT_TRUE(any) << command;
  ASSERT_EQ(objects.size(), 1U);
  EXPECT_NE(objects.begin()->find("lowering.cpp"), std::string::npos) << *objects.begin();
}

}  // namespace
