// Handles are read from several threads; each thread has its own message.
#include <gtest/gtest.h>
#include <lawson/lawson.hpp>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 8;

void in_threads(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

const char* const kGraph = R"({"lawson": 1, "kind": "graph", "name": "threads",
  "inputs": [{"name": "x", "dtype": "f32", "shape": [1, 16, 8]},
             {"name": "y", "dtype": "f32", "shape": [1, 8, 16]}],
  "ops": [{"op": "matmul", "in": ["x", "y"], "out": "z"}],
  "outputs": ["z"]})";

TEST(Concurrency, OnePlanIsProbedLoadedAndExecutedByMany) {
  const auto device = lawson::Device::find("cpu");
  const auto graph = lawson::Graph::from_json(kGraph);
  lawson::Plan plan = lawson::compile(graph, device);
  plan.load(device);
  std::atomic<int> right{0};
  in_threads([&](int i) {
    for (int round = 0; round < 5; ++round) {
      EXPECT_TRUE(lawson::probe(graph, device).supported());
      auto data = lawson::Data::generate(graph, static_cast<std::uint64_t>(i));
      if (round == 2) plan.load(device);  // others execute meanwhile
      plan.run(data, 2);
      right += data.verify(plan).ok ? 1 : 0;
    }
  });
  EXPECT_EQ(right, kThreads * 5);
}

TEST(Concurrency, MessagesDoNotMix) {
  in_threads([](int i) {
    const std::string source = "file" + std::to_string(i) + ".json";
    for (int round = 0; round < 200; ++round) {
      try {
        static_cast<void>(lawson::Spec::from_json("{", source));
        ADD_FAILURE();
      } catch (const lawson::Error& error) {
        EXPECT_TRUE(std::string{error.what()}.starts_with(source)) << error.what();
      }
    }
  });
}

}  // namespace
