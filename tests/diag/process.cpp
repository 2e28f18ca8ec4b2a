// A process that does what its arguments say, one after the other, for test_process.py.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "diag/counters.h"
#include "diag/diag.h"
#include "diag/lines.h"
#include "diag/passing.h"
#include "diag/trace.h"

namespace {

using namespace lawson::diag;

void history(int device) {
  record(Event::miss, {"cudnn", kForward, "k1", device});
  record(Event::create_graph, {"cudnn", kForward, "k1", device});
  {
    const Span outer{"acquire", {"cudnn", kForward, "k1", device}};
    const Span inner{Stage::build_plans, {"cudnn", kForward, "k1", device}};
  }
  record(Event::hit, {"cudnn", kForward, "k1", device});
}

void perform(std::string_view what) {
  if (what == "history") {
    history(0);
  } else if (what == "two-devices") {
    std::thread([] {
      history(0);
      history(1);
    }).join();
  } else if (what == "choice") {
    print_choice({"g", {"cudnn", kForward, "k1", 0}, "h200", "eng1"}, {{"cpu", "it is a GPU"}});
  } else if (what == "worker") {
    collect_for_host();
    history(-1);
    std::printf("%s\n", take_collected().dump().c_str());
  } else if (what == "fork") {
    // While other threads count and trace.
    start_trace();
    std::atomic<bool> over{false};
    std::thread busy([&] {
      while (!over) {
        history(2);
        std::this_thread::sleep_for(std::chrono::microseconds{20});  // fork waits for its locks
      }
    });
    for (int i = 0; i < 50; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        if (tracing()) std::_Exit(3);
        history(1);
        const auto threads = counts(Since::start);
        if (threads.size() != 1 || threads[0].rows.size() != 1) std::_Exit(4);
        if (threads[0].rows[0].counts.of(Event::hit) != 1) std::_Exit(5);
        std::_Exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        std::printf("child: %d\n", status);
        std::exit(1);
      }
    }
    over = true;
    busy.join();
    stop_trace();
    std::printf("forked\n");
  } else if (what == "late") {
    // A thread's own objects may outlive its block.
    struct Late {
      ~Late() { record(Event::evict, {"cudnn", kForward, "k1", 0}); }
    };
    std::thread([] {
      thread_local const Late late;
      static_cast<void>(&late);
      history(0);
    }).join();
    std::printf("%s\n", counts_to_json(counts(Since::start)).dump().c_str());
  } else {
    std::exit(2);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) perform(argv[i]);
  return 0;
}
