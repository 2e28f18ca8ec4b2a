#include "diag/lines.h"

#include <gtest/gtest.h>

#include <sstream>
#include <thread>

namespace lawson::diag {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream{text};
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream stream{line};
  return {std::istream_iterator<std::string>{stream}, {}};
}

Row row(std::string engine, std::string_view pass, int device, std::uint64_t hits) {
  Row made{std::move(engine), std::string{pass}, device, {}};
  made.counts.events[0] = hits;
  return made;
}

TEST(Lines, AnEventSaysItsKeyAndItsLiveDevice) {
  std::string line;
  std::thread([&] { line = event_line(Event::cache_graph, {"cudnn", kBackward, "k1", 3}); }).join();
  EXPECT_NE(line.find(" dev=3 CACHE_GRAPH engine=cudnn pass=backward key=k1"), std::string::npos)
      << line;
  EXPECT_EQ(line.find("rank="), 0U) << line;
  EXPECT_NE(line.find(" thread="), std::string::npos) << line;
  EXPECT_NE(event_line(Event::hit, {"cpu", kForward, "k", -1}).find(" dev=- HIT "),
            std::string::npos);
}

TEST(Lines, EachWordHasItsPlace) {
  const std::string line = event_line(Event::miss, {});
  EXPECT_NE(line.find(" dev=- MISS engine=- pass=- key=-"), std::string::npos) << line;
}

TEST(Lines, NamesCannotSpeakToTheTerminal) {
  const std::string line = event_line(Event::hit, {"e\x1b[2J", "p\n", "k\x7f", 0});
  EXPECT_NE(line.find("engine=e\\x1b[2J pass=p\\x0a key=k\\x7f"), std::string::npos) << line;
}

TEST(Lines, TheSummaryIsATableOfThreads) {
  ThreadCounts first{1, 100, false, {row("cudnn", kForward, 0, 5), row("cpu", kForward, -1, 1)}};
  first.rows[0].counts.stages[4] = {2, 3'000'000, 2'500'000};
  const ThreadCounts second{
      2, 101, true, {row("cudnn", kForward, 0, 10), row("cudnn", kForward, 1, 20)}};
  const ThreadCounts rest{0, 0, true, {row("cpu", kFusion, -1, 7)}};
  const auto lines = lines_of(summary_text({first, second, rest}));
  ASSERT_EQ(lines.size(), 1U + 3 + 3 + 2 + 1 + 1 + kStages);
  const auto head = words_of(lines[0]);
  EXPECT_EQ(head.size(), 4 + kEvents);
  EXPECT_EQ(head[4], "HIT");
  EXPECT_EQ(head[7], "CREATE_GRAPH");
  const auto cells = [&](std::size_t line, std::size_t count) {
    auto words = words_of(lines[line]);
    words.resize(count);
    return words;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(cells(1, 5), (Words{"1", "dev=0", "all", "all", "6"}));
  EXPECT_EQ(cells(2, 5), (Words{"1", "dev=0", "cudnn", "forward", "5"}));
  EXPECT_EQ(cells(3, 5), (Words{"1", "dev=-", "cpu", "forward", "1"}));
  EXPECT_EQ(cells(4, 5), (Words{"2", "dev=mixed", "all", "all", "30"}));
  EXPECT_EQ(cells(5, 5), (Words{"2", "dev=0", "cudnn", "forward", "10"}));
  EXPECT_EQ(cells(6, 5), (Words{"2", "dev=1", "cudnn", "forward", "20"}));
  EXPECT_EQ(cells(7, 5), (Words{"ended", "dev=-", "all", "all", "7"}));
  EXPECT_EQ(cells(9, 2), (Words{"all", "43"}));
  EXPECT_EQ(words_of(lines[10]), (Words{"stage", "count", "total", "ms", "max", "ms"}));
  EXPECT_EQ(words_of(lines[11]), (Words{"validate", "0", "0.000", "0.000"}));
  EXPECT_EQ(words_of(lines[15]), (Words{"build_plans", "2", "3.000", "2.500"}));
  EXPECT_EQ(words_of(lines[16])[0], "load");
}

}  // namespace
}  // namespace lawson::diag
