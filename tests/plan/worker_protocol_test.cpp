#include "plan/worker_protocol.h"

#include <gtest/gtest.h>

#include <random>
#include <span>

#include "base/hash.h"
#include "fake_engine.h"

namespace lawson::plan {
namespace {

TEST(Frames, SurviveAnySplit) {
  std::string stream;
  for (int i = 0; i < 20; ++i) {
    stream += *encode_frame(
        {{"number", i}, {"text", std::string(static_cast<std::size_t>(i) * 37, 'a')}});
  }
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    FrameReader reader;
    std::string_view rest{stream};
    int received = 0;
    while (!rest.empty()) {
      const std::size_t take = std::min<std::size_t>(1 + random() % 300, rest.size());
      ASSERT_TRUE(reader.feed({rest.data(), take}).ok());
      rest.remove_prefix(take);
      for (;;) {
        auto document = reader.next();
        ASSERT_TRUE(document.ok());
        if (!document->has_value()) break;
        EXPECT_EQ((**document).at("number"), received++);
      }
    }
    EXPECT_EQ(received, 20);
    EXPECT_TRUE(reader.empty());
  }
}

TEST(Frames, AnAbsurdLengthIsRefusedAtOnce) {
  FrameReader reader;
  const std::string prefix(8, '\x7F');
  const Status fed = reader.feed(prefix);
  ASSERT_FALSE(fed.ok());
  EXPECT_NE(fed.error().message.find("announces"), std::string::npos);
}

TEST(Frames, ABadDocumentCostsOnlyItself) {
  const std::string bad{"\x02\0\0\0\0\0\0\0\xFF\xFF", 10};
  FrameReader reader;
  ASSERT_TRUE(reader.feed(bad + *encode_frame({{"fine", true}})).ok());
  EXPECT_FALSE(reader.next().ok());
  const auto next = reader.next();
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_EQ((**next).at("fine"), true);
}

TEST(Cbor, DepthIsBounded) {
  std::string arrays;
  arrays.resize(10 << 20, '\x81');
  const auto deep = parse_cbor(arrays);
  ASSERT_FALSE(deep.ok());
  EXPECT_NE(deep.error().message.find("nested"), std::string::npos);
}

TEST(Cbor, DepthIsBoundedInPlansToo) {
  const std::string arrays(10 << 20, '\x81');
  std::string bytes = "LAWSONP1";
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((arrays.size() >> (8 * i)) & 0xFF);
  bytes += arrays;
  bytes += hash_hex(bytes);
  const auto plan = plan_from_bytes(std::as_bytes(std::span{bytes}));
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.error().message.find("nested"), std::string::npos) << plan.error().message;
}

TEST(Cbor, NoPrefixAndNoChangedByteCrashes) {
  const std::string whole =
      encode_frame(request_to_json(Verb::probe, relu_graph("g"), fake_gpu("h200"), {}, {}))
          ->substr(8);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(parse_cbor(std::string_view{whole}.substr(0, size)).ok()) << size;
  }
  std::mt19937 random(11);
  int accepted = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string changed = whole;
    changed[random() % changed.size()] = static_cast<char>(random());
    const auto document = parse_cbor(changed);
    if (document.ok() && request_from_json(*document).ok()) ++accepted;
  }
  EXPECT_LT(accepted, 5000);
}

TEST(Requests, RoundTrip) {
  Options options;
  options.strength = Strength::built;
  options.workspace_limit = 12345;
  options.deterministic = true;
  options.tuning = Tuning::exhaustive;
  options.deadline_ms = 1.5;
  const Device device = fake_gpu("h200");
  const ir::Graph graph = relu_graph("g");
  const Json sent = request_to_json(Verb::compile, graph, device, options, Candidate{"eng9_k1=2"});
  const auto frame = encode_frame(sent);
  const auto arrived = parse_cbor(std::string_view{*frame}.substr(8));
  ASSERT_TRUE(arrived.ok());
  const auto request = request_from_json(*arrived);
  ASSERT_TRUE(request.ok()) << request.error().message;
  EXPECT_EQ(request->verb, Verb::compile);
  EXPECT_EQ(request->graph.name, "g");
  ASSERT_TRUE(request->candidate.has_value());
  EXPECT_EQ(request->candidate->name, "eng9_k1=2");
  EXPECT_EQ(make_key(request->graph, request->device, "cudnn", "1", request->options),
            make_key(graph, device, "cudnn", "1", options));
  EXPECT_EQ(request->options.strength, Strength::built);
  EXPECT_EQ(request->options.tuning, Tuning::exhaustive);
  EXPECT_EQ(request->options.deadline_ms, 1.5);
}

TEST(Requests, AGraphThatChangedOnTheWayIsNoticed) {
  Json sent = request_to_json(Verb::probe, relu_graph("g"), fake_gpu("h200"), {}, {});
  sent["graph_hash"] = std::string(32, '0');
  const auto request = request_from_json(sent);
  ASSERT_FALSE(request.ok());
  EXPECT_NE(request.error().message.find("changed on its way"), std::string::npos);
}

TEST(Requests, WrongOnesAreNamed) {
  const Json good = request_to_json(Verb::probe, relu_graph("g"), fake_gpu("h200"), {}, {});
  for (const char* field : {"request", "graph", "graph_hash", "device", "options"}) {
    for (const Json& value : {Json{}, Json(17), Json("word"), Json::array()}) {
      Json bad = good;
      bad[field] = value;
      EXPECT_FALSE(request_from_json(bad).ok()) << field << " = " << value;
    }
    Json missing = good;
    missing.erase(field);
    EXPECT_FALSE(request_from_json(missing).ok()) << field;
  }
}

TEST(Errors, RoundTripForEveryKind) {
  for (int kind = 0; kind <= static_cast<int>(ErrorKind::internal); ++kind) {
    Error sent{static_cast<ErrorKind>(kind), "what happened", {{"code", "message", "field"}}};
    const Error arrived = error_from_json(error_to_json(sent));
    EXPECT_EQ(arrived.kind, sent.kind);
    EXPECT_EQ(arrived.message, sent.message);
    EXPECT_EQ(arrived.reasons, sent.reasons);
  }
  EXPECT_EQ(error_from_json(Json::array()).kind, ErrorKind::internal);
}

}  // namespace
}  // namespace lawson::plan
