// The kernels of the steps on a live GPU: each against its own rule on the host, bit by bit, with
// guards around all memory; captured and replayed; beyond 2^31 elements; and how fast they are.
// Exit code 77 means that there is no GPU here.
#include "engine/cudnn/steps.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>

#include "cases/dice.h"
#include "engine/cudnn/step_cases.h"

namespace lawson::cudnn {
namespace {

using cases::StepBuffer;
using cases::StepCase;

const Driver* driver = nullptr;

#define ASSERT_OK(expr)                                 \
  do {                                                  \
    const auto& outcome_ = (expr);                      \
    ASSERT_TRUE(outcome_.ok()) << message_of(outcome_); \
  } while (false)

template <typename Outcome>
std::string message_of(const Outcome& outcome) {
  return outcome.ok() ? "" : outcome.error().message;
}

// Memory of the GPU, freed at the end of its scope.
class Memory {
 public:
  explicit Memory(std::size_t bytes) {
    auto data = driver->allocate(bytes);
    if (data.ok()) data_ = *data;
    EXPECT_TRUE(data.ok()) << message_of(data);
  }
  Memory(Memory&& other) noexcept : data_{std::exchange(other.data_, nullptr)} {}
  Memory(const Memory&) = delete;
  ~Memory() { EXPECT_TRUE(driver->release(data_).ok()); }

  void* at(std::size_t byte = 0) const { return static_cast<std::byte*>(data_) + byte; }

 private:
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() {
    auto made = driver->create_stream();
    if (made.ok()) stream_ = *made;
    EXPECT_TRUE(made.ok()) << message_of(made);
  }
  Stream(const Stream&) = delete;
  ~Stream() { EXPECT_TRUE(driver->destroy_stream(stream_).ok()); }
  void* get() const { return stream_; }

 private:
  void* stream_ = nullptr;
};

// A case's buffers on the GPU, guards included.
class Uploaded {
 public:
  explicit Uploaded(const StepCase& item) {
    for (const StepBuffer& buffer : item.buffers) {
      // By value: the host's memory, as the caller's would be.
      void* pointer = nullptr;
      if (buffer.by_value && !buffer.bytes.empty()) {
        pointer = const_cast<void*>(buffer.data());
      } else if (!buffer.bytes.empty()) {
        memory_.emplace_back(buffer.bytes.size());
        pointer = memory_.back().at(buffer.begin);
      }
      pointers_.push_back(pointer);
    }
    upload(item);
  }

  void upload(const StepCase& item) {
    for (std::size_t i = 0; i < item.buffers.size(); ++i) {
      const StepBuffer& buffer = item.buffers[i];
      if (buffer.bytes.empty() || buffer.by_value) continue;
      EXPECT_TRUE(
          driver->copy_to_device(start(i, buffer), buffer.bytes.data(), buffer.bytes.size()).ok());
    }
    EXPECT_TRUE(driver->synchronize(nullptr).ok());
  }

  void download(StepCase& item) const {
    for (std::size_t i = 0; i < item.buffers.size(); ++i) {
      StepBuffer& buffer = item.buffers[i];
      if (buffer.bytes.empty() || buffer.by_value) continue;
      EXPECT_TRUE(
          driver->copy_to_host(buffer.bytes.data(), start(i, buffer), buffer.bytes.size()).ok());
    }
  }

  const std::vector<void*>& pointers() const { return pointers_; }

 private:
  void* start(std::size_t i, const StepBuffer& buffer) const {
    return static_cast<std::byte*>(pointers_[i]) - buffer.begin;
  }

  std::vector<Memory> memory_;
  std::vector<void*> pointers_;
};

constexpr double kLargestLogarithm = 16;  // of the random sums

// "" or the first difference. `roundings` of the element type are allowed where values differ. The
// host's NaN has other bits than the device's.
std::string difference(const StepCase& host, const StepCase& device, double roundings) {
  for (std::size_t i = 0; i < host.buffers.size(); ++i) {
    const StepBuffer& a = host.buffers[i];
    const StepBuffer& b = device.buffers[i];
    if (a.bytes == b.bytes) continue;
    const std::size_t size = byte_size(a.dtype, 1);
    for (std::size_t at = 0; at + size <= a.bytes.size(); at += size) {
      if (std::memcmp(&a.bytes[at], &b.bytes[at], size) == 0) continue;
      const double x = load_element(&a.bytes[at], a.dtype, 0);
      const double y = load_element(&b.bytes[at], a.dtype, 0);
      const double size_of_terms = std::max(std::fabs(x), kLargestLogarithm);
      if (a.written && std::isnan(x) && std::isnan(y)) continue;
      if (a.written && std::fabs(x - y) <= roundings * unit_roundoff(a.dtype) * size_of_terms) {
        continue;
      }
      return fmt::format("operand {}, byte {} (elements begin at {}): {} instead of {}", i, at,
                         a.begin, y, x);
    }
  }
  return "";
}

// Where a step computes 2^x or a logarithm: an ulp of those may differ between libraries.
double allowed_roundings(const Step& step) {
  const auto* bias = std::get_if<steps::ScoreBias>(&step);
  const auto* stats = std::get_if<steps::StatsOfRows>(&step);
  const bool slopes = bias != nullptr && bias->alibi && bias->slopes.uid == 0;
  return slopes || (stats != nullptr && stats->sum_exp.uid != 0) ? 2 : 0;
}

// Runs first: later the kernels are there.
TEST(Steps0, KernelsAreNotLoadedInsideACapture) {
  const Stream stream;
  StepCase item = cases::random_step(2, 3);
  Uploaded memory{item};
  ASSERT_OK(driver->begin_capture(stream.get()));
  const auto inside = driver->is_capturing(stream.get());
  const Status refused = launch(item.step, memory.pointers(), stream.get(), *driver);
  const auto graph = driver->end_capture(stream.get());
  ASSERT_OK(inside);
  EXPECT_TRUE(*inside);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument) << refused.error().message;
  ASSERT_OK(graph);
  ASSERT_OK(driver->destroy_graph(*graph));
  const auto outside = driver->is_capturing(stream.get());
  ASSERT_OK(outside);
  EXPECT_FALSE(*outside);
  ASSERT_OK(prepare_steps(0, *driver));
  ASSERT_OK(launch(item.step, memory.pointers(), stream.get(), *driver));
  ASSERT_OK(driver->synchronize(stream.get()));
}

class RandomSteps : public testing::TestWithParam<std::size_t> {};

TEST_P(RandomSteps, KernelsDoWhatTheRulesDo) {
  ASSERT_OK(prepare_steps(0, *driver));
  const Stream stream;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    StepCase host = cases::random_step(GetParam(), seed);
    StepCase device = host;
    const Uploaded memory{device};
    ASSERT_OK(launch(host.step, memory.pointers(), stream.get(), *driver));
    ASSERT_OK(driver->synchronize(stream.get()));
    memory.download(device);
    ASSERT_OK(cases::run_on_host(host.step, host.pointers()));
    ASSERT_EQ(difference(host, device, allowed_roundings(host.step)), "") << host.text();
  }
}

// The same launches as nodes of a graph, replayed with other contents of the same memory.
TEST_P(RandomSteps, CapturedOnceReplayedWithNewData) {
  ASSERT_OK(prepare_steps(0, *driver));
  const Stream stream;
  StepCase item = cases::random_step(GetParam(), 77);
  Uploaded memory{item};
  ASSERT_OK(driver->begin_capture(stream.get()));
  const Status launched = launch(item.step, memory.pointers(), stream.get(), *driver);
  const auto graph = driver->end_capture(stream.get());
  ASSERT_OK(launched);
  ASSERT_OK(graph);
  cases::Dice dice{GetParam()};
  for (int replay = 0; replay < 100; ++replay) {
    StepCase host = item;
    for (StepBuffer& buffer : host.buffers) {
      // Elements change places; integers stay, since they say where rows are.
      if (buffer.bytes.empty() || buffer.by_value || !is_float(buffer.dtype)) continue;
      const std::size_t size = byte_size(buffer.dtype, 1);
      const auto count = static_cast<std::int64_t>(buffer.bytes.size() / size);
      const auto by = static_cast<std::int64_t>(size) * dice.below(count);
      std::rotate(buffer.bytes.begin(), buffer.bytes.begin() + by, buffer.bytes.end());
    }
    StepCase device = host;
    memory.upload(device);
    ASSERT_OK(driver->launch_graph(*graph, stream.get()));
    ASSERT_OK(driver->synchronize(stream.get()));
    memory.download(device);
    ASSERT_OK(cases::run_on_host(host.step, host.pointers()));
    ASSERT_EQ(difference(host, device, allowed_roundings(host.step)), "") << replay << host.text();
  }
  ASSERT_OK(driver->destroy_graph(*graph));
}

INSTANTIATE_TEST_SUITE_P(Steps, RandomSteps,
                         testing::Range(std::size_t{0}, std::variant_size_v<Step>),
                         [](const auto& param) {
                           return std::string{step_name(cases::random_step(param.param, 0).step)};
                         });

// Pointers by uid, as the engine binds them.
std::vector<void*> bound_to(const Step& step, const std::vector<void*>& by_uid) {
  std::vector<void*> pointers;
  for (const std::int64_t uid : step_uids(step)) {
    pointers.push_back(uid == 0 ? nullptr : by_uid[static_cast<std::size_t>(uid)]);
  }
  return pointers;
}

// Lengths made by one step are read by the next two, all in one graph.
TEST(Steps, ChainInOneGraphFollowsTheLengths) {
  ASSERT_OK(prepare_steps(0, *driver));
  constexpr std::int64_t kBucket = 6, kHeads = 2, kRows = 40, kDepth = 64, kTokens = 300;
  enum Uid : std::size_t { kNone, kCu, kLengths, kFlags, kRowsUid, kStats, kUids };
  const std::size_t bytes[kUids] = {0,
                                    (kBucket + 1) * 4,
                                    kBucket * 4,
                                    kBucket * kRows,
                                    kHeads * kTokens * kDepth * 2,
                                    kHeads * kTokens * 4};

  steps::Ragged ragged;
  ragged.bucket = kBucket;
  ragged.max_length = kRows;
  ragged.cu_seqlens = {kCu, DType::i32, {1}};
  ragged.seqlen = {kLengths, DType::i32, {1}};
  steps::MaskedRows masked;
  masked.scores.batch = kBucket;
  masked.scores.heads = 1;
  masked.scores.rows = masked.scores.columns = kRows;
  masked.scores.seqlen_q = masked.scores.seqlen_kv = ragged.seqlen;
  masked.scores.right = 0;
  masked.scores.left = 3;
  masked.flags = {kFlags, DType::u8, {kRows, 0, 1}};
  steps::ClearRows clear;
  clear.batch = kBucket;
  clear.heads = kHeads;
  clear.rows = kRows;
  clear.flags = masked.flags;
  clear.packing = {ragged.cu_seqlens, kTokens};
  clear.tensors = {{{kRowsUid, DType::bf16, {0, kDepth, kHeads * kDepth, 1}}, kDepth}};
  clear.stats = {kStats, DType::f32, {0, 1, kHeads}};
  const std::vector<Step> chain{ragged, masked, clear};

  std::vector<Memory> memory;
  std::vector<void*> on_device{nullptr};
  for (std::size_t uid = 1; uid < kUids; ++uid) {
    memory.emplace_back(bytes[uid]);
    on_device.push_back(memory.back().at());
  }
  const Stream stream;
  ASSERT_OK(driver->begin_capture(stream.get()));
  for (const Step& step : chain) {
    ASSERT_OK(launch(step, bound_to(step, on_device), stream.get(), *driver));
  }
  const auto graph = driver->end_capture(stream.get());
  ASSERT_OK(graph);
  cases::Dice dice{5};
  for (int replay = 0; replay < 100; ++replay) {
    std::vector<std::vector<std::byte>> host(kUids);
    std::vector<void*> on_host(kUids, nullptr);
    for (std::size_t uid = 1; uid < kUids; ++uid) {
      host[uid].resize(bytes[uid]);
      for (std::byte& byte : host[uid]) byte = static_cast<std::byte>(dice.below(256));
      on_host[uid] = host[uid].data();
    }
    std::int64_t end = 0;
    for (std::int64_t n = 0; n <= kBucket; ++n) {
      store_element(on_host[kCu], DType::i32, n, static_cast<double>(end));
      end += dice.below(kRows + 1);
    }
    for (std::size_t uid = 1; uid < kUids; ++uid) {
      ASSERT_OK(driver->copy_to_device(on_device[uid], on_host[uid], bytes[uid]));
    }
    ASSERT_OK(driver->synchronize(nullptr));
    ASSERT_OK(driver->launch_graph(*graph, stream.get()));
    ASSERT_OK(driver->synchronize(stream.get()));
    for (const Step& step : chain) ASSERT_OK(cases::run_on_host(step, bound_to(step, on_host)));
    for (std::size_t uid = 1; uid < kUids; ++uid) {
      std::vector<std::byte> result(bytes[uid]);
      ASSERT_OK(driver->copy_to_host(result.data(), on_device[uid], bytes[uid]));
      ASSERT_EQ(result, host[uid]) << "replay " << replay << ", tensor " << uid;
    }
  }
  ASSERT_OK(driver->destroy_graph(*graph));
}

TEST(Steps, MoreElementsThan32BitsCount) {
  ASSERT_OK(prepare_steps(0, *driver));
  constexpr std::int64_t kRows = 140000, kColumns = 32768;  // 4.6e9 elements
  steps::ScoreBias step;
  step.scores.batch = step.scores.heads = 1;
  step.scores.rows = kRows;
  step.scores.columns = kColumns;
  step.alibi = true;
  step.slopes = {1, DType::f32, {1}};
  step.out = {2, DType::bf16, {kRows * kColumns, kRows * kColumns, kColumns, 1}};
  const std::size_t bytes = static_cast<std::size_t>(kRows * kColumns) * 2;
  const auto room = driver->allocate(bytes);
  if (!room.ok()) GTEST_SKIP() << room.error().message;
  ASSERT_OK(driver->release(*room));
  const float slope = 0x1p-10F;
  const Memory slopes{sizeof slope};
  const Memory out{bytes};
  ASSERT_OK(driver->copy_to_device(slopes.at(), &slope, sizeof slope));
  ASSERT_OK(driver->synchronize(nullptr));
  ASSERT_OK(launch(step, bound_to(step, {nullptr, slopes.at(), out.at()}), nullptr, *driver));
  ASSERT_OK(driver->synchronize(nullptr));
  std::vector<std::uint16_t> row(kColumns);
  for (const std::int64_t i : {std::int64_t{0}, kRows / 2, kRows - 1}) {
    ASSERT_OK(driver->copy_to_host(row.data(), out.at(static_cast<std::size_t>(i * kColumns) * 2),
                                   row.size() * 2));
    for (std::int64_t j = 0; j < kColumns; ++j) {
      std::uint16_t wanted = 0;
      store_element(&wanted, DType::bf16, 0, static_cast<double>(j - i) * 0x1p-10);
      ASSERT_EQ(row[static_cast<std::size_t>(j)], wanted) << i << ", " << j;
    }
  }
}

// ---- speed ----------------------------------------------------------------------------------

Json speeds = Json::object();

// Bytes read and written over the time of one launch.
// Memory is 0 but for `first`, which tensor 1 begins with.
void measure(const std::string& name, const Step& step, const std::vector<std::size_t>& bytes,
             std::int32_t first = 0) {
  ASSERT_OK(prepare_steps(0, *driver));
  ASSERT_OK(check_step(step));
  std::vector<Memory> memory;
  std::vector<void*> pointers{nullptr};
  double total = 0;
  const Stream stream;
  for (const std::size_t size : bytes) {
    memory.emplace_back(size);
    pointers.push_back(memory.back().at());
    ASSERT_OK(driver->fill(pointers.back(), 0, size, stream.get()));
    total += static_cast<double>(size);
  }
  ASSERT_OK(driver->synchronize(nullptr));
  ASSERT_OK(driver->copy_to_device(pointers[1], &first, sizeof first));
  ASSERT_OK(driver->synchronize(nullptr));
  const auto bound = bound_to(step, pointers);
  const auto begin = driver->create_event();
  const auto end = driver->create_event();
  ASSERT_OK(begin);
  ASSERT_OK(end);
  constexpr int kRuns = 20;
  for (int run = 0; run < 3; ++run) ASSERT_OK(launch(step, bound, stream.get(), *driver));
  ASSERT_OK(driver->record(*begin, stream.get()));
  for (int run = 0; run < kRuns; ++run) ASSERT_OK(launch(step, bound, stream.get(), *driver));
  ASSERT_OK(driver->record(*end, stream.get()));
  const auto elapsed = driver->milliseconds(*begin, *end);
  ASSERT_OK(elapsed);
  ASSERT_OK(driver->destroy_event(*begin));
  ASSERT_OK(driver->destroy_event(*end));
  const double milliseconds = static_cast<double>(*elapsed) / kRuns;
  const double rate = total / (milliseconds * 1e6);
  speeds[name] = {{"ms", milliseconds}, {"gb_per_s", rate}};
  std::cout << fmt::format("{:<44} {:8.4f} ms {:8.0f} GB/s\n", name, milliseconds, rate);
  EXPECT_GT(rate, 20);
}

std::size_t size_of(DType dtype, const Dims& shape) {
  return byte_size(dtype, *element_count(shape));
}

TEST(StepsSpeed, ScoreBias) {
  const Dims scores{1, 16, 4096, 4096};
  for (const DType out : {DType::f32, DType::bf16}) {
    steps::ScoreBias step;
    step.scores.batch = 1;
    step.scores.heads = 16;
    step.scores.rows = step.scores.columns = 4096;
    step.out = {2, out, contiguous_strides(scores)};
    step.terms.bias = {1, DType::bf16, contiguous_strides(scores)};
    measure(fmt::format("score_bias bf16 to {}", to_string(out)), step,
            {size_of(DType::bf16, scores), size_of(out, scores)});
    step.terms.bias = {};
    step.terms.mask = {1, DType::boolean, contiguous_strides(scores)};
    measure(fmt::format("score_bias bool mask to {}", to_string(out)), step,
            {size_of(DType::u8, scores), size_of(out, scores)});
    step.terms.mask = {1, DType::boolean, {0, 0, 0, 1}};
    step.alibi = true;
    measure(fmt::format("score_bias key mask and slopes to {}", to_string(out)), step,
            {4096, size_of(out, scores)});
  }
}

TEST(StepsSpeed, MaskedRows) {
  const Dims scores{1, 16, 4096, 4096};
  steps::MaskedRows step;  // zeros: every key is hidden, so all of the mask is read
  step.scores.batch = 1;
  step.scores.heads = 16;
  step.scores.rows = step.scores.columns = 4096;
  step.terms.mask = {1, DType::boolean, contiguous_strides(scores)};
  step.flags = {2, DType::u8, contiguous_strides({1, 16, 4096})};
  measure("masked_rows bool mask, all hidden", step,
          {size_of(DType::u8, scores), size_of(DType::u8, {1, 16, 4096})});
}

TEST(StepsSpeed, ReduceBiasGradient) {
  const Dims full{4, 16, 2048, 2048};
  for (const Dims& shape : {Dims{1, 16, 2048, 2048}, Dims{1, 1, 2048, 2048}, Dims{1, 16, 1, 2048},
                            Dims{4, 16, 2048, 1}, Dims{1, 1, 1, 2048}, Dims{1, 16, 1, 1}}) {
    steps::ReduceBiasGradient step;
    step.full = full;
    step.shape = shape;
    step.gradient = {1, DType::f32, contiguous_strides(full)};
    step.bias_gradient = {2, DType::f32, contiguous_strides(shape)};
    measure(fmt::format("reduce_bias_gradient f32 to {}", to_string(shape)), step,
            {size_of(DType::f32, full), size_of(DType::f32, shape)});
  }
}

TEST(StepsSpeed, CacheAppendAndZeroGaps) {
  steps::CacheAppend append;
  append.batch = 64;
  append.heads = 8;
  append.fresh_rows = 512;
  append.depth = 128;
  append.capacity = 512;
  append.seqlen_kv = {1, DType::i32, {0}};
  append.cache = {2, DType::bf16, contiguous_strides({64, 8, 512, 128})};
  append.fresh = {3, DType::bf16, contiguous_strides({64, 8, 512, 128})};
  const std::size_t rows = size_of(DType::bf16, {64, 8, 512, 128});
  measure("cache_append bf16", append, {4, rows, rows}, 512);

  steps::ZeroGaps gaps;
  gaps.batch = 16;
  gaps.heads = 16;
  gaps.rows = 4096;
  gaps.lengths = {1, DType::i32, {0}};  // 0: all rows
  gaps.tensors = {{{2, DType::bf16, contiguous_strides({16, 16, 4096, 128})}, 128}};
  measure("zero_gaps bf16", gaps, {4, size_of(DType::bf16, {16, 16, 4096, 128})});
}

}  // namespace

int run_all() {
  const auto opened = Driver::open();
  if (!opened.ok() || (*opened)->device_count() == 0) {
    std::cout << "skipped: " << (opened.ok() ? "no GPU is present" : opened.error().message)
              << "\n";
    return 77;
  }
  driver = *opened;
  if (!steps_are_built()) {
    std::cout << "skipped: this build has no CUDA kernels (LAWSON_CUDA_KERNELS)\n";
    return 77;
  }
  if (const Status current = driver->make_current(0); !current.ok()) {
    std::cout << current.error().message << "\n";
    return 1;
  }
  const int status = RUN_ALL_TESTS();
  if (const char* folder = std::getenv("LAWSON_RESULTS"); folder != nullptr && !speeds.empty()) {
    std::ofstream{std::string{folder} + "/steps.json"} << speeds.dump(2) << "\n";
  }
  return status;
}

}  // namespace lawson::cudnn

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return lawson::cudnn::run_all();
}
