#include "diag/passing.h"

#include <gtest/gtest.h>

#include <thread>

#include "diag/counters.h"
#include "diag/trace.h"

namespace lawson::diag {
namespace {

Json happening(const char* name, std::int64_t duration) {
  return {{"name", name},  {"engine", "away"},     {"pass", "forward"}, {"key", "k"},
          {"begun", 1000}, {"duration", duration}, {"process", 4242},   {"thread", 4243}};
}

// What a thread that accepts this has counted then.
std::vector<Row> accepted(const Json& document) {
  std::vector<Row> rows;
  std::thread([&] {
    accept_collected(document);
    for (ThreadCounts& thread : counts(Since::start)) {
      if (thread.thread == this_thread()) rows = std::move(thread.rows);
    }
  }).join();
  return rows;
}

TEST(Passing, TheHostCountsWhatItsWorkerDid) {
  const auto rows = accepted({happening("create_graph", -1), happening("create_graph", -1),
                              happening("build_plans", -1), happening("build_plans", 5'000'000),
                              happening("validate", 1'000'000)});
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].engine, "away");
  EXPECT_EQ(rows[0].device, -1);
  EXPECT_EQ(rows[0].counts.of(Event::create_graph), 2U);
  EXPECT_EQ(rows[0].counts.of(Event::build_plans), 1U);
  EXPECT_EQ(rows[0].counts.of(Stage::build_plans).count, 1U);
  EXPECT_EQ(rows[0].counts.of(Stage::build_plans).max_ns, 5'000'000U);
  EXPECT_EQ(rows[0].counts.of(Stage::validate).count, 1U);
}

TEST(Passing, ItsTraceShowsTheWorkersProcess) {
  ASSERT_TRUE(start_trace());
  Json span = happening("validate", 1'000);
  span["begun"] = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds{1};
  accept_collected({span, happening("load", 1'000)});  // the second from before the trace
  const Json document = Json::parse(stop_trace());
  std::size_t spans = 0;
  bool named = false;
  for (const Json& event : document["traceEvents"]) {
    if (event["ph"] == "X") {
      ++spans;
      EXPECT_EQ(event["pid"], 4242);
      EXPECT_EQ(event["tid"], 4243);
      EXPECT_EQ(event["name"], "validate");
    }
    named = named || (event["name"] == "process_name" && event["pid"] == 4242 &&
                      event["args"]["name"] == "lawson-worker");
  }
  EXPECT_EQ(spans, 1U);
  EXPECT_TRUE(named);
}

TEST(Passing, NonsenseIsLeftOut) {
  Json lacking = happening("validate", 1);
  lacking.erase("key");
  Json mistyped = happening("validate", 1);
  mistyped["begun"] = "soon";
  const Json unknown = happening("fly", 1);
  const auto rows = accepted({1, nullptr, Json::array(), lacking, mistyped, unknown,
                              happening("no_event", -1), happening("hit", -1)});
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].counts.of(Event::hit), 1U);
  EXPECT_EQ(rows[0].counts.of(Stage::validate).count, 0U);
  for (const Json& document : {Json{}, Json("text"), Json::object(), Json(7)}) {
    EXPECT_TRUE(accepted(document).empty());
  }
}

}  // namespace
}  // namespace lawson::diag
