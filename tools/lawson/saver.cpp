#include "saver.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <utility>

namespace lawson::cli {
namespace {

constexpr double kLeastSeconds = 5;
// Of the time, at most a twentieth goes to writing.
constexpr double kShare = 20;

std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void note_signal(int signal) {
  received = signal;
  static const char text[] = "\nlawson: finishing what is being built; once more to stop at once\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, sizeof(text) - 1);
}

}  // namespace

void Saver::add(Plan plan) {
  std::unique_lock lock{mutex_};
  waiting_.push_back(std::move(plan));
  if (writing_ || clock_.seconds() < next_write_) return;
  std::vector<Plan> plans = std::exchange(waiting_, {});
  writing_ = true;
  lock.unlock();
  write(plans);
}

void Saver::flush() {
  std::unique_lock lock{mutex_};
  written_.wait(lock, [this] { return !writing_; });
  std::vector<Plan> plans = std::exchange(waiting_, {});
  if (plans.empty()) return;
  writing_ = true;
  lock.unlock();
  write(plans);
}

void Saver::write(const std::vector<Plan>& plans) {
  struct Done {
    Saver& saver;
    double begin = saver.clock_.seconds();
    ~Done() {
      const std::lock_guard lock{saver.mutex_};
      const double now = saver.clock_.seconds();
      saver.next_write_ = now + std::max(kLeastSeconds, kShare * (now - begin));
      saver.writing_ = false;
      saver.written_.notify_all();
    }
  } const done{*this};
  std::vector<const lawson_plan*> handles;
  handles.reserve(plans.size());
  for (const Plan& plan : plans) handles.push_back(plan.get());
  const auto function = fresh_ ? lawson_bundle_write : lawson_bundle_append;
  check(function(path_.c_str(), handles.data(), handles.size()));
  fresh_ = false;
}

Interrupt::Interrupt() {
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM}) ::sigaction(signal, &action, nullptr);
}

Interrupt::~Interrupt() {
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);
}

int Interrupt::signal() {
  return received;
}

void Interrupt::obey() {
  if (received == 0) return;
  static_cast<void>(lawson_trace_stop());  // an error where none runs
  std::signal(received, SIG_DFL);
  std::raise(received);
}

}  // namespace lawson::cli
