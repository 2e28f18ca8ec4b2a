#include "engine/cudnn/measure.h"

#include <mutex>

namespace lawson::cudnn {
namespace {

// A stream with one captured graph and the events around its launches.
class Recording {
 public:
  explicit Recording(const Driver& driver) : driver_{driver} {}
  ~Recording() {
    if (graph_ != nullptr) static_cast<void>(driver_.destroy_graph(graph_));
    for (void* event : events_) static_cast<void>(driver_.destroy_event(event));
    if (stream_ != nullptr) static_cast<void>(driver_.destroy_stream(stream_));
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  Status open(int rounds) {
    LAWSON_TRY(stream_, driver_.create_stream());
    for (int i = 0; i <= rounds; ++i) {
      LAWSON_TRY(void* event, driver_.create_event());
      events_.push_back(event);
    }
    return {};
  }

  void* stream() const { return stream_; }

  template <typename Work>
  Status capture(const Work& work) {
    LAWSON_CHECK(driver_.begin_capture(stream_));
    const Status worked = work();
    auto captured = driver_.end_capture(stream_);
    if (captured.ok()) graph_ = *captured;
    LAWSON_CHECK(worked);
    return captured.ok() ? Status{} : std::move(captured).error();
  }

  // Milliseconds of every launch. All are queued before the first ends, so that the device never
  // waits for the host between two of them.
  Result<std::vector<double>> launches() {
    LAWSON_CHECK(driver_.launch_graph(graph_, stream_));
    LAWSON_CHECK(driver_.record(events_.front(), stream_));
    for (std::size_t i = 1; i < events_.size(); ++i) {
      LAWSON_CHECK(driver_.launch_graph(graph_, stream_));
      LAWSON_CHECK(driver_.record(events_[i], stream_));
    }
    std::vector<double> times;
    for (std::size_t i = 1; i < events_.size(); ++i) {
      LAWSON_TRY(const float time, driver_.milliseconds(events_[i - 1], events_[i]));
      times.push_back(static_cast<double>(time));
    }
    return times;
  }

 private:
  const Driver& driver_;
  void* stream_ = nullptr;
  void* graph_ = nullptr;
  std::vector<void*> events_;
};

}  // namespace

Result<std::vector<double>> measure(const LoadedPlan& plan,
                                    std::span<const std::vector<Binding>> sets, void* workspace,
                                    int executions, int rounds, const Driver& driver,
                                    void* handle) {
  if (sets.empty() || executions < 1 || rounds < 1) {
    return invalid("{} sets of bindings, {} executions, {} rounds: one of each is the least",
                   sets.size(), executions, rounds);
  }
  const auto execute = [&](std::size_t set, void* stream) -> Status {
    Status status;
    if (const Failure failure =
            plan.run(sets[set % sets.size()], workspace, stream, driver, handle, status)) {
      Device device;
      device.name = plan.plan().target;
      return to_error(*failure, classify(*failure, false), device);
    }
    return status;
  };
  // One at a time, or they would time each other.
  static std::mutex turn;
  const std::lock_guard lock{turn};
  Recording recording{driver};
  LAWSON_CHECK(recording.open(rounds));
  // Outside of the capture first: kernels are loaded by their first launch. And what the caller
  // put into the operands on other streams has to be there.
  LAWSON_CHECK(driver.synchronize(nullptr));
  LAWSON_CHECK(execute(0, recording.stream()));
  LAWSON_CHECK(driver.synchronize(recording.stream()));
  const auto work = [&]() -> Status {
    for (int i = 0; i < executions; ++i) {
      LAWSON_CHECK(execute(static_cast<std::size_t>(i), recording.stream()));
    }
    return {};
  };
  LAWSON_CHECK(recording.capture(work));
  LAWSON_TRY(std::vector<double> times, recording.launches());
  for (double& time : times) time /= executions;
  return times;
}

}  // namespace lawson::cudnn
