// What a long compile has to show is kept: plans go into the bundle while others are built, and an
// interrupt ends the work, not what was done.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "api.h"
#include "terminal.h"

namespace lawson::cli {

// Thread-safe. Plans are written every few seconds, and by flush().
class Saver {
 public:
  // `fresh`: the first write replaces what is at `path`; else it adds to it.
  Saver(std::string path, bool fresh) : path_{std::move(path)}, fresh_{fresh} {}

  void add(Plan plan);
  void flush();

 private:
  void write(const std::vector<Plan>& plans);  // by one thread at a time

  std::string path_;
  bool fresh_;
  std::mutex mutex_;
  std::vector<Plan> waiting_;
  bool writing_ = false;
  std::condition_variable written_;
  Stopwatch clock_;
  double next_write_ = 5;  // seconds since the start
};

// While it lives, the first SIGINT or SIGTERM is only noted; a second one ends the process.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static int signal();  // 0: none came
  // Ends the process as the signal would have, if one came.
  static void obey();
};

}  // namespace lawson::cli
