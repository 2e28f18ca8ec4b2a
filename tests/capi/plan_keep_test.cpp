// A plan from elsewhere, kept for those of this process who ask for its key.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "small_attention.h"

namespace {

std::int64_t counted(const char* event) {
  return nlohmann::json::parse(lawson::stats()).at("totals").at(event).get<std::int64_t>();
}

lawson::Plan from_elsewhere(const lawson::Graph& graph, const lawson::Options& options = {}) {
  const lawson::Plan plan = lawson::compile(graph, lawson::Device::find("cpu"), options);
  return lawson::Plan::deserialize(plan.serialize());
}

TEST(PlanKeep, IsWhatAttentionHandlesRun) {
  small::Attention attention(3001);
  const lawson::Plan plan = from_elsewhere(attention.config().graph(LAWSON_PASS_FORWARD));
  plan.keep(lawson::Device::find("cpu"));
  const std::int64_t loads = counted("load");
  const std::int64_t hits = counted("hit");
  attention.run();
  EXPECT_EQ(counted("load"), loads);
  EXPECT_GT(counted("hit"), hits);
  plan.keep(lawson::Device::find("cpu"));  // there already
  EXPECT_EQ(counted("load"), loads);
}

TEST(PlanKeep, OfAnotherQuestionIsRefused) {
  small::Attention attention(3002);
  const lawson::Plan plan = from_elsewhere(attention.config().graph(LAWSON_PASS_FORWARD));
  lawson::Options options;
  options.deterministic = true;
  try {
    plan.keep(lawson::Device::find("cpu"), options);
    FAIL() << "kept";
  } catch (const lawson::Error& error) {
    EXPECT_EQ(error.status(), LAWSON_INVALID_ARGUMENT);
    EXPECT_NE(std::string{error.what()}.find(plan.key()), std::string::npos) << error.what();
  }
  EXPECT_EQ(lawson_plan_keep(nullptr, nullptr, nullptr), LAWSON_INVALID_ARGUMENT);
}

}  // namespace
