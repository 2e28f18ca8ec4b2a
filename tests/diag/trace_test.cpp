#include "diag/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include "base/json.h"

namespace lawson::diag {
namespace {

constexpr Subject kSubject{"cudnn", kForward, "key-1", 0};

Json stopped() {
  const std::string text = stop_trace();
  Json document = Json::parse(text, nullptr, false);
  EXPECT_FALSE(document.is_discarded()) << text;
  return document;
}

std::vector<Json> of_kind(const Json& document, std::string_view kind) {
  std::vector<Json> events;
  for (const Json& event : document.at("traceEvents")) {
    if (event.at("ph") == kind) events.push_back(event);
  }
  return events;
}

// What the format asks of each event, and that the spans of a thread lie inside or outside of each
// other.
void expect_well_formed(const Json& document) {
  std::map<std::pair<Json, Json>, std::vector<std::pair<double, double>>> spans;
  for (const Json& event : document.at("traceEvents")) {
    for (const char* field : {"name", "ph", "pid", "tid"}) {
      ASSERT_TRUE(event.contains(field)) << field << " of " << event.dump();
    }
    EXPECT_TRUE(event.at("name").is_string());
    EXPECT_TRUE(event.at("pid").is_number_integer());
    EXPECT_TRUE(event.at("tid").is_number_integer());
    const std::string kind = event.at("ph");
    if (kind == "M") {
      EXPECT_TRUE(event.at("args").at("name").is_string());
      continue;
    }
    EXPECT_GE(event.at("ts").get<double>(), 0) << event.dump();
    for (const char* field : {"engine", "pass", "key", "device"}) {
      EXPECT_TRUE(event.at("args").contains(field)) << field;
    }
    if (kind == "i") {
      EXPECT_EQ(event.at("s"), "t");
      continue;
    }
    ASSERT_EQ(kind, "X") << event.dump();
    EXPECT_GE(event.at("dur").get<double>(), 0) << event.dump();
    spans[{event.at("pid"), event.at("tid")}].emplace_back(event.at("ts"), event.at("dur"));
  }
  constexpr double rounding = 1e-3;  // microseconds: the clock's nanosecond
  for (const auto& [thread, list] : spans) {
    for (const auto& [a, a_length] : list) {
      for (const auto& [b, b_length] : list) {
        const bool apart = a + a_length <= b + rounding || b + b_length <= a + rounding;
        const bool inside = (a >= b - rounding && a + a_length <= b + b_length + rounding) ||
                            (b >= a - rounding && b + b_length <= a + a_length + rounding);
        EXPECT_TRUE(apart || inside) << a << '+' << a_length << " and " << b << '+' << b_length;
      }
    }
  }
}

TEST(Trace, SpansAndEventsOfSeveralThreads) {
  ASSERT_TRUE(start_trace());
  EXPECT_TRUE(tracing());
  const auto work = [] {
    const Span outer{"compile", kSubject};
    for (int i = 0; i < 3; ++i) {
      const Span inner{Stage::build_plans, kSubject};
      record(Event::create_graph, kSubject);
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
  };
  std::thread other(work);
  work();
  other.join();
  const Json document = stopped();
  EXPECT_FALSE(tracing());
  expect_well_formed(document);
  const auto spans = of_kind(document, "X");
  ASSERT_EQ(spans.size(), 8U);
  EXPECT_EQ(of_kind(document, "i").size(), 6U);
  std::map<std::string, int> names;
  std::map<Json, int> threads;
  for (const Json& span : spans) {
    ++names[span["name"]];
    ++threads[span["tid"]];
    EXPECT_EQ(span["pid"], ::getpid());
    EXPECT_GE(span["dur"].get<double>(), span["name"] == "compile" ? 3000 : 1000);
    EXPECT_EQ(span["args"]["key"], "key-1");
    EXPECT_EQ(span["args"]["device"], 0);
  }
  EXPECT_EQ(names["compile"], 2);
  EXPECT_EQ(names["build_plans"], 6);
  EXPECT_EQ(threads.size(), 2U);
  // A name for the process, and one for each thread.
  EXPECT_EQ(of_kind(document, "M").size(), 3U);
}

TEST(Trace, OneAtATime) {
  ASSERT_TRUE(start_trace());
  EXPECT_FALSE(start_trace());
  expect_well_formed(stopped());
  ASSERT_TRUE(start_trace());
  expect_well_formed(stopped());
}

TEST(Trace, OnlyWhatBeganAndEndedInBetween) {
  {
    const Span before{Stage::load, kSubject};
    ASSERT_TRUE(start_trace());
  }
  { const Span between{"between", kSubject}; }
  Json document;
  {
    const Span after{"after", kSubject};
    document = stopped();
  }
  const auto spans = of_kind(document, "X");
  ASSERT_EQ(spans.size(), 1U);
  EXPECT_EQ(spans[0]["name"], "between");
  ASSERT_TRUE(start_trace());
  EXPECT_TRUE(of_kind(stopped(), "X").empty());
}

TEST(Trace, NamesAreWrittenAsTheyCome) {
  ASSERT_TRUE(start_trace());
  record(Event::hit, {"\"quoted\"\n", "\xff\xfe", "", -1});
  const Json document = stopped();
  const auto events = of_kind(document, "i");
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0]["args"]["engine"], "\"quoted\"\n");
  EXPECT_TRUE(events[0]["args"]["device"].is_null());
}

TEST(Trace, NobodyWaitsForAWriter) {
  ASSERT_TRUE(start_trace());
  std::atomic<bool> goes_on{true};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (goes_on) {
        for (int many = 0; many < 50; ++many) {
          const Span span{"busy", kSubject};
          record(Event::execute, kSubject);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
    EXPECT_FALSE(stopped().at("traceEvents").empty());
    ASSERT_TRUE(start_trace());
  }
  goes_on = false;
  for (std::thread& thread : threads) thread.join();
  stop_trace();
}

}  // namespace
}  // namespace lawson::diag
