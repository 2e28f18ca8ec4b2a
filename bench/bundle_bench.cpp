// A bundle of 10,000 plans of 80 kB: opening it, finding a key, reading a plan.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "base/hash.h"
#include "plan/bundle.h"

namespace {

namespace fs = std::filesystem;
using lawson::Plan;
using lawson::plan::Bundle;

constexpr std::size_t kPlans = 10'000;
constexpr std::size_t kPlanBytes = 80'000;

std::string key_of(std::size_t i) {
  return lawson::hash_hex("key " + std::to_string(i));
}

// Made once; content about as compressible as a plan of cuDNN's (a quarter).
const std::string& bundle_path() {
  static const std::string path = [] {
    std::string made =
        (fs::temp_directory_path() / ("lawson-bench-" + std::to_string(::getpid()))).string();
    std::mt19937 random(1);
    Plan plan;
    plan.engine = "cudnn";
    plan.engine_version = "9.19.0";
    plan.target = "h200";
    plan.device_fingerprint = lawson::hash_hex("h200");
    plan.graph_json = "{}";
    plan.bytes.resize(kPlanBytes);
    for (std::size_t i = 0; i < plan.bytes.size(); ++i) {
      plan.bytes[i] = i % 4 == 0 ? static_cast<std::byte>(random() & 0xFF) : std::byte{0};
    }
    std::vector<Plan> plans(kPlans, plan);
    std::vector<const Plan*> pointers;
    for (std::size_t i = 0; i < kPlans; ++i) {
      plans[i].key = key_of(i);
      plans[i].plan_id = lawson::hash_hex("plan " + std::to_string(i));
      pointers.push_back(&plans[i]);
    }
    if (!lawson::plan::write_bundle(made, pointers).ok()) std::abort();
    std::atexit([] { fs::remove(bundle_path()); });
    return made;
  }();
  return path;
}

void open_bundle(benchmark::State& state) {
  const std::string& path = bundle_path();
  for (auto _ : state) {
    const auto bundle = Bundle::open(path);
    if (!bundle.ok()) std::abort();
  }
}

void find_key(benchmark::State& state) {
  const auto bundle = Bundle::open(bundle_path());
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < kPlans; ++i) keys.push_back(key_of(i));
  std::size_t i = 0;
  for (auto _ : state) benchmark::DoNotOptimize(bundle->find(keys[i = (i + 7919) % kPlans]));
}

void read_plan(benchmark::State& state) {
  const auto bundle = Bundle::open(bundle_path());
  std::size_t i = 0;
  for (auto _ : state) {
    if (!bundle->plan(i = (i + 7919) % kPlans).ok()) std::abort();
  }
}

}  // namespace

BENCHMARK(open_bundle)->Unit(benchmark::kMillisecond);
BENCHMARK(find_key);
BENCHMARK(read_plan)->Unit(benchmark::kMicrosecond);
