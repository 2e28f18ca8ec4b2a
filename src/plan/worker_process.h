// One worker process and the talk with it. Not thread-safe: the pool hands it to one caller at a
// time. Whatever the worker does (dies, hangs, writes garbage), an exchange ends with a document or
// an error within its deadline, and the host gets no signal.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "plan/worker_protocol.h"

namespace lawson::plan {

using Clock = std::chrono::steady_clock;

class WorkerProcess {
 public:
  // Starts `path arguments... --parent PID` with its stdin and stdout connected to us. Does not
  // wait for the hello.
  static Result<std::unique_ptr<WorkerProcess>> start(const std::string& path,
                                                      const std::vector<std::string>& arguments);
  ~WorkerProcess();  // kills and reaps it
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // The worker's first document. `timeout` also bounds the start of the program.
  Result<Json> hello(std::chrono::milliseconds timeout);

  // Sends `request` (with an id of its own) and waits for the reply to it.
  Result<Json> exchange(Json request, std::chrono::milliseconds timeout);

  // False once an exchange left the stream in an unknown state, or the worker is gone.
  bool usable() const;
  pid_t pid() const { return pid_; }

 private:
  WorkerProcess(pid_t pid, int channel, int errors, std::string path)
      : pid_{pid}, channel_{channel}, errors_{errors}, path_{std::move(path)} {}

  Result<Json> converse(std::string_view unsent, std::string_view doing, Clock::time_point deadline,
                        std::chrono::milliseconds timeout);
  Result<std::size_t> receive();  // what is there, without waiting; an error at the stream's end
  void drain_errors();            // keeps the last lines of the worker's stderr
  std::string last_words() const;
  Error death(std::string_view doing);  // reaps it; says how it ended
  std::string reap();                   // "was killed by signal 11 (Segmentation fault)", ...

  pid_t pid_ = -1;
  int channel_ = -1;  // a stream socket: stdin and stdout of the worker
  int errors_ = -1;   // the read end of its stderr
  std::string path_;
  FrameReader frames_;
  std::string stderr_tail_;
  std::uint64_t last_id_ = 0;
  pid_t owner_ = -1;      // the process that started it; a forked copy must not touch it
  bool started_ = false;  // the hello was received
  bool broken_ = false;
  bool reaped_ = false;
};

}  // namespace lawson::plan
