// Counters and traces of a program's own.
#include <gtest/gtest.h>
#include <unistd.h>
#include <lawson/lawson.hpp>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const char* const kGraph = R"({"lawson": 1, "kind": "graph", "name": "told",
  "inputs": [{"name": "x", "dtype": "f32", "shape": [1, 13, 11]},
             {"name": "y", "dtype": "f32", "shape": [1, 11, 17]}],
  "ops": [{"op": "matmul", "in": ["x", "y"], "out": "z"}],
  "outputs": ["z"]})";

class Folder {
 public:
  Folder() : path_{fs::temp_directory_path() / ("lawson-told-" + std::to_string(::getpid()))} {
    fs::create_directories(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  fs::path operator/(const char* name) const { return path_ / name; }
  void remove() const { fs::remove_all(path_); }

 private:
  fs::path path_;
};

void work(int runs) {
  const auto device = lawson::Device::find("cpu");
  lawson::Plan plan = lawson::compile(lawson::Graph::from_json(kGraph), device);
  plan.load(device);
  auto data = lawson::Data::generate(plan.graph(), 1);
  plan.run(data, runs);  // and one that warms up
}

std::uint64_t count(const Json& stats, const char* event) {
  return stats.at("totals").at(event).get<std::uint64_t>();
}

Json read(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return Json::parse(text.str());
}

std::size_t events(const Json& trace, std::string_view name) {
  std::size_t found = 0;
  for (const Json& event : trace.at("traceEvents"))
    found += event.at("name") == name ? std::size_t{1} : 0;
  return found;
}

TEST(Diagnostics, StatsSinceTheReset) {
  work(1);
  lawson::reset_stats();
  EXPECT_TRUE(Json::parse(lawson::stats()).at("threads").empty());
  work(4);
  const Json stats = Json::parse(lawson::stats());
  EXPECT_EQ(count(stats, "execute"), 5U);
  EXPECT_EQ(count(stats, "load"), 1U);
  EXPECT_EQ(stats.at("stages").at("load").at("count"), 1);
  EXPECT_EQ(stats.at("pid"), ::getpid());
  ASSERT_EQ(stats.at("threads").size(), 1U);
  const Json& thread = stats.at("threads")[0];
  EXPECT_EQ(thread.at("device"), "-");
  ASSERT_EQ(thread.at("rows").size(), 1U);
  EXPECT_EQ(thread.at("rows")[0].at("engine"), "cpu");
  EXPECT_EQ(thread.at("rows")[0].at("pass"), "fusion");
  EXPECT_TRUE(thread.at("rows")[0].at("device").is_null());
}

TEST(Diagnostics, ATraceIsWrittenAtItsEnd) {
  const Folder folder;
  {
    const lawson::Trace trace{(folder / "a.json").string()};
    EXPECT_THROW(lawson::Trace{(folder / "b.json").string()}, lawson::Error);
    work(2);
    EXPECT_FALSE(fs::exists(folder / "a.json"));
  }
  const Json first = read(folder / "a.json");
  EXPECT_EQ(events(first, "execute"), 6U);  // spans and events of three runs
  EXPECT_EQ(events(first, "load"), 2U);
  EXPECT_FALSE(fs::exists(folder / "b.json"));

  lawson::Trace trace{(folder / "b.json").string()};
  trace.stop();
  EXPECT_EQ(events(read(folder / "b.json"), "execute"), 0U);
  EXPECT_THROW(trace.stop(), lawson::Error);
}

TEST(Diagnostics, ATraceThatCannotBeWrittenIsSaid) {
  const Folder folder;
  for (const std::string& path : {std::string{}, (folder / "").string(),
                                  (folder / "none/t.json").string(), std::string{"/dev/null"}}) {
    try {
      const lawson::Trace trace{path};
      ADD_FAILURE() << path;
    } catch (const lawson::Error& error) {
      EXPECT_EQ(error.status(), LAWSON_INVALID_ARGUMENT) << path;
      EXPECT_EQ(std::string{error.what()}.rfind("path: ", 0), 0U) << error.what();
    }
  }
  lawson::Trace trace{(folder / "t.json").string()};
  folder.remove();
  try {
    trace.stop();
    ADD_FAILURE();
  } catch (const lawson::Error& error) {
    EXPECT_EQ(error.status(), LAWSON_IO);
    EXPECT_NE(std::string{error.what()}.find("t.json"), std::string::npos) << error.what();
  }
  // The next one is not in its way.
  const Folder other;
  lawson::Trace next{(other / "t.json").string()};
  next.stop();
  EXPECT_TRUE(fs::exists(other / "t.json"));
}

}  // namespace
