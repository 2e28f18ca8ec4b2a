// What a question costs that was asked before, and what a cached plan takes of the host's memory.
// CPU engine, so it runs anywhere: nothing that is timed here asks an engine. Results: NOTES.md.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "engine/cpu/cpu.h"
#include "engine/reference/reference.h"
#include "front/attention.h"
#include "lawson/lawson.h"
#include "plan/planner.h"

namespace {

using namespace lawson;

ir::Graph attention_of(std::int64_t length) {
  front::AttentionSpec spec;
  spec.batch = 2;
  spec.heads = 8;
  spec.kv_heads = 8;
  spec.seqlen_q = length;
  spec.seqlen_kv = length;
  spec.head_dim_qk = 64;
  spec.head_dim_v = 64;
  spec.dtype = DType::f32;
  return front::attention_graph(spec, front::Pass::forward).value();
}

plan::PlannerConfig config() {
  plan::PlannerConfig config;
  config.engines = {make_cpu_engine(), make_reference_engine()};
  return config;
}

lawson_device* cpu() {
  static lawson_device* const device = [] {
    lawson_device* found = nullptr;
    lawson_device_find("cpu", &found);
    return found;
  }();
  return device;
}

lawson_attention_config* config_of(const char* pass) {
  const std::string text =
      std::string{R"({"lawson": 1, "kind": "attention", "dtype": "f32", "batch": 2, "heads": 8,
        "seqlen_q": 512, "head_dim_qk": 64, "pass": ")"} +
      pass + "\"}";
  lawson_attention_config* config = nullptr;
  lawson_attention_config_from_spec(text.data(), text.size(), nullptr, &config);
  return config;
}

// lawson_probe of a graph handle.
void probe(benchmark::State& state) {
  static lawson_graph* const graph = [] {
    lawson_graph* made = nullptr;
    lawson_graph_from_attention(config_of("forward"), LAWSON_PASS_FORWARD, &made);
    return made;
  }();
  for (auto _ : state) {
    lawson_verdict* verdict = nullptr;
    if (lawson_probe(graph, cpu(), nullptr, &verdict) != LAWSON_OK) {
      state.SkipWithError(lawson_last_error_message());
      break;
    }
    lawson_verdict_destroy(verdict);
  }
}
BENCHMARK(probe)->ThreadRange(1, 2);

// lawson_attention_select of a config handle; training: a verdict over two graphs.
void select(benchmark::State& state, const char* pass) {
  lawson_attention_config* const config = config_of(pass);
  for (auto _ : state) {
    lawson_verdict* verdict = nullptr;
    if (lawson_attention_select(config, cpu(), nullptr, &verdict) != LAWSON_OK) {
      state.SkipWithError(lawson_last_error_message());
      break;
    }
    lawson_verdict_destroy(verdict);
  }
  lawson_attention_config_destroy(config);
}
BENCHMARK_CAPTURE(select, forward, "forward");
BENCHMARK_CAPTURE(select, training, "training");

// Without handles: the graph is told apart anew.
void probe_of_a_new_graph(benchmark::State& state) {
  plan::Planner planner{config()};
  const ir::Graph graph = attention_of(512);
  for (auto _ : state) {
    benchmark::DoNotOptimize(planner.probe(graph, cpu_device(), "", {}).value());
  }
}
BENCHMARK(probe_of_a_new_graph);

void acquire(benchmark::State& state) {
  static plan::Planner planner{config()};
  const ir::Graph graph = attention_of(512);
  const plan::KnownGraph known{graph};
  const plan::KnownDevice device{cpu_device()};
  for (auto _ : state) {
    benchmark::DoNotOptimize(planner.acquire(known, device, "", {}, nullptr).value());
  }
}
BENCHMARK(acquire)->ThreadRange(1, 2);

double resident_mib() {
  std::ifstream file{"/proc/self/statm"};
  double total = 0;
  double resident = 0;
  file >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 0x1p20;
}

// 10,000 shapes through a cache with its usual budget: memory after 2,000 and at the end.
void ten_thousand_shapes(benchmark::State& state) {
  for (auto _ : state) {
    plan::Planner planner{config()};
    double early = 0;
    for (std::int64_t i = 1; i <= 10'000; ++i) {
      const auto loaded = planner.acquire(attention_of(i), cpu_device(), "", {}, nullptr);
      if (!loaded.ok()) state.SkipWithError(loaded.error().message.c_str());
      if (i == 2'000) early = resident_mib();
    }
    const auto plans = static_cast<double>(planner.cache().size());
    state.counters["MiB_after_2000"] = early;
    state.counters["MiB_at_end"] = resident_mib();
    state.counters["plans"] = plans;
    state.counters["KiB_per_plan"] = static_cast<double>(planner.cache().bytes()) / plans / 0x1p10;
  }
}
BENCHMARK(ten_thousand_shapes)->Iterations(1)->Unit(benchmark::kSecond);

}  // namespace

BENCHMARK_MAIN();
