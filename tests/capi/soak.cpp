// Random questions, plans and executions on the CPU engine from several threads, over caches that
// are much too small for them: numbers stay right, caches within their budgets, memory flat.
//   lawson-soak [--seconds N] [--threads N] [--seed N]
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/cpu/cpu.h"
#include "engine/reference/reference.h"
#include "front/attention.h"
#include "plan/planner.h"

namespace {

using namespace lawson;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kPlans = 16;
constexpr std::size_t kVerdicts = 32;
constexpr std::int64_t kShapes = 400;
constexpr std::int64_t kDim = 8;

struct Arguments {
  double seconds = 20;
  int threads = 4;
  unsigned seed = 1;
};

std::size_t resident_bytes() {
  std::ifstream file{"/proc/self/statm"};
  std::size_t total = 0;
  std::size_t resident = 0;
  file >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// Attention over rows that are all alike: each result is a value row, whatever the weights are.
ir::Graph attention_of(std::int64_t length) {
  front::AttentionSpec spec;
  spec.batch = 1;
  spec.heads = 1 + length % 3;
  spec.kv_heads = spec.heads;
  spec.seqlen_q = length;
  spec.seqlen_kv = length;
  spec.head_dim_qk = kDim;
  spec.head_dim_v = kDim;
  spec.dtype = DType::f32;
  return front::attention_graph(spec, front::Pass::forward).value();
}

class Soak {
 public:
  explicit Soak(const Arguments& arguments) : arguments_{arguments}, planner_{config()} {}

  int run() {
    const auto begin = Clock::now();
    const auto end = begin + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(arguments_.seconds));
    std::vector<std::jthread> threads;
    for (int t = 0; t < arguments_.threads; ++t) {
      threads.emplace_back(
          [this, t, end] { work(arguments_.seed + static_cast<unsigned>(t), end); });
    }
    // A quarter of the time fills the caches and the allocator's own.
    std::size_t settled = 0;
    std::size_t most = 0;
    while (Clock::now() < end && failure_.empty()) {
      std::this_thread::sleep_for(std::chrono::milliseconds{200});
      const std::size_t now = resident_bytes();
      if (Clock::now() - begin < (end - begin) / 4) {
        settled = std::max(settled, now);
      } else {
        most = std::max(most, now);
      }
      if (planner_.cache().size() > kPlans + static_cast<std::size_t>(arguments_.threads)) {
        fail("the cache has grown beyond its budget and what is in use");
      }
    }
    threads.clear();
    const auto counters = planner_.cache().counters();
    std::printf(
        "%.0f s, %d threads, seed %u: %llu executions, %llu builds, %llu evictions; "
        "resident %.1f MiB after a quarter, at most %.1f MiB later; %zu plans with %.1f KiB\n",
        arguments_.seconds, arguments_.threads, arguments_.seed,
        static_cast<unsigned long long>(executions_.load()),
        static_cast<unsigned long long>(counters.builds),
        static_cast<unsigned long long>(counters.evictions), static_cast<double>(settled) / 0x1p20,
        static_cast<double>(most) / 0x1p20, planner_.cache().size(),
        static_cast<double>(planner_.cache().bytes()) / 0x1p10);
    if (most > settled + settled / 10 + (std::size_t{16} << 20)) fail("memory grows");
    if (executions_ == 0 || counters.evictions == 0) fail("nothing was executed or evicted");
    if (failure_.empty()) return 0;
    std::fprintf(stderr, "lawson-soak: %s\n", failure_.c_str());
    return 1;
  }

 private:
  static plan::PlannerConfig config() {
    plan::PlannerConfig config;
    config.engines = {make_cpu_engine(), make_reference_engine()};
    config.plans = {kPlans, std::uint64_t{1} << 20};
    config.verdicts = {kVerdicts, std::uint64_t{1} << 20};
    config.built = {4, std::uint64_t{1} << 20};
    return config;
  }

  void fail(const std::string& what) {
    const std::lock_guard lock{mutex_};
    if (failure_.empty()) failure_ = what;
    over_ = true;
  }

  void work(unsigned seed, Clock::time_point end) {
    std::mt19937 random{seed};
    const Device cpu = cpu_device();
    while (Clock::now() < end && !over_) {
      // Half of all questions are about a few lengths.
      const std::int64_t length = random() % 2 == 0
                                      ? 1 + static_cast<std::int64_t>(random() % 8)
                                      : 1 + static_cast<std::int64_t>(random() % kShapes);
      const ir::Graph graph = attention_of(length);
      if (random() % 4 == 0) {
        const auto verdict = planner_.probe(graph, cpu, "", {});
        if (!verdict.ok() || verdict->decision != Decision::supported) return fail("no verdict");
      }
      const auto loaded = planner_.acquire(graph, cpu, "", {}, nullptr);
      if (!loaded.ok()) return fail(loaded.error().message);
      if (const std::string wrong = execute(graph, **loaded, random() % 1000); !wrong.empty()) {
        return fail(wrong);
      }
      ++executions_;
    }
  }

  std::string execute(const ir::Graph& graph, const Loaded& loaded, std::uint64_t seed) {
    std::vector<std::vector<float>> memory;
    std::vector<Binding> bindings;
    float scale = 0.3F;
    const std::size_t output = static_cast<std::size_t>(graph.input_count);
    for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      if (tensor.by_value) {
        bindings.push_back({ir::Graph::uid(id), &scale});
        memory.emplace_back();
        continue;
      }
      const auto extent =
          static_cast<std::size_t>(storage_extent(tensor.shape, tensor.strides).value());
      auto& values = memory.emplace_back(extent + 16, NAN);
      for (std::size_t i = 0; i < values.size() && memory.size() <= output; ++i) {
        values[i] = std::sin(static_cast<float>(seed + i % kDim));
      }
      void* start = values.data();
      std::size_t space = values.size() * sizeof(float);
      bindings.push_back(
          {ir::Graph::uid(id), std::align(64, extent * sizeof(float), start, space)});
      auto* data = static_cast<float*>(bindings.back().data);
      for (std::size_t i = 0; i < extent && memory.size() <= output; ++i) {
        data[i] = std::sin(static_cast<float>(seed + i % kDim));
      }
    }
    std::vector<std::byte> workspace(static_cast<std::size_t>(loaded.plan().workspace_bytes) + 64);
    void* start = workspace.data();
    std::size_t space = workspace.size();
    const Status done =
        planner_.execute(loaded.plan(), loaded, bindings, std::align(64, 1, start, space),
                         workspace.size() - 64, nullptr);
    if (!done.ok()) return done.error().message;
    const auto* result = static_cast<const float*>(bindings[output].data);
    const ir::Tensor& o = graph.tensor(static_cast<ir::TensorId>(output));
    const auto extent = static_cast<std::size_t>(storage_extent(o.shape, o.strides).value());
    for (std::size_t i = 0; i < extent; ++i) {
      const float expected = std::sin(static_cast<float>(seed + i % kDim));
      if (!(std::abs(result[i] - expected) <= 1e-5F)) {
        return "element " + std::to_string(i) + " of " + graph.name + " is " +
               std::to_string(result[i]) + ", not " + std::to_string(expected);
      }
    }
    return {};
  }

  Arguments arguments_;
  plan::Planner planner_;
  std::atomic<std::uint64_t> executions_{0};
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::string failure_;
};

bool parse(int argc, char** argv, Arguments& arguments) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const double value = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--seconds") == 0 && value > 0) {
      arguments.seconds = value;
    } else if (std::strcmp(argv[i], "--threads") == 0 && value >= 1 && value <= 256) {
      arguments.threads = static_cast<int>(value);
    } else if (std::strcmp(argv[i], "--seed") == 0 && value >= 0) {
      arguments.seed = static_cast<unsigned>(value);
    } else {
      return false;
    }
  }
  return argc % 2 == 1;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) {
    std::fputs("usage: lawson-soak [--seconds N] [--threads N] [--seed N]\n", stderr);
    return 2;
  }
  return Soak{arguments}.run();
}
