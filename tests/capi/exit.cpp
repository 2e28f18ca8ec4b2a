// A process may end while its threads compute, and destructors of static objects may use the
// library. Runs itself N times that way: a crash or a hang is a status other than 0.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "small_attention.h"

namespace {

// Constructed before anything of the library's was used, hence destroyed after all of that.
struct Late {
  ~Late() {
    if (!armed) return;
    try {
      small::Attention attention(33);
      attention.run();
      const auto cpu = lawson::Device::find("cpu");
      if (!lawson::select(attention.config(), cpu).supported()) std::_Exit(3);
      lawson::Device::find("no such device");
      std::_Exit(4);
    } catch (const lawson::Error& error) {
      if (error.status() != LAWSON_INVALID_ARGUMENT && error.status() != LAWSON_UNAVAILABLE) {
        std::fprintf(stderr, "%s\n", error.what());
        std::_Exit(5);
      }
    }
  }
  bool armed = false;
};
Late late;

[[noreturn]] void end_while_computing() {
  late.armed = true;
  small::Attention(33).run();
  for (int t = 0; t < 4; ++t) {
    std::thread([t] {
      for (int i = 0;; ++i) {
        small::Attention attention(64 + (i + t) % 7);
        attention.run();
      }
    }).detach();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  std::exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  const int times = argc > 1 ? std::atoi(argv[1]) : 10;
  for (int i = 0; i < times; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      end_while_computing();
    }
    int status = 0;
    if (::waitpid(child, &status, 0) != child || status != 0) {
      std::fprintf(stderr, "run %d ended with status 0x%x\n", i, static_cast<unsigned>(status));
      return 1;
    }
  }
  return 0;
}
