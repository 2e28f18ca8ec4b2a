#include "traced_child.h"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace lawson::plan {
namespace {

constexpr int kCallStop = SIGTRAP | 0x80;  // PTRACE_O_TRACESYSGOOD
constexpr int kNotTraced = 125;

#if defined(__x86_64__)
constexpr bool kCanFailCalls = true;

bool concerns_files(unsigned long long number) {
  constexpr std::array kCalls{
      SYS_open,       SYS_openat,   SYS_read,       SYS_pread64,   SYS_write,    SYS_fsync,
      SYS_rename,     SYS_renameat, SYS_renameat2,  SYS_unlink,    SYS_unlinkat, SYS_fstat,
      SYS_newfstatat, SYS_mkdir,    SYS_getdents64, SYS_utimensat, SYS_close};
  return std::find(kCalls.begin(), kCalls.end(), static_cast<long>(number)) != kCalls.end();
}

// Before a call: is it one of files? `skip` has the kernel do nothing instead.
bool at_file_call(pid_t child, bool skip) {
  user_regs_struct registers{};
  if (::ptrace(PTRACE_GETREGS, child, nullptr, &registers) != 0) return false;
  if (!concerns_files(registers.orig_rax)) return false;
  if (skip) {
    registers.orig_rax = ~0ULL;
    ::ptrace(PTRACE_SETREGS, child, nullptr, &registers);
  }
  return true;
}

void set_result(pid_t child, int error) {
  user_regs_struct registers{};
  ::ptrace(PTRACE_GETREGS, child, nullptr, &registers);
  registers.rax = static_cast<unsigned long long>(-static_cast<long long>(error));
  ::ptrace(PTRACE_SETREGS, child, nullptr, &registers);
}
#else
constexpr bool kCanFailCalls = false;

bool at_file_call(pid_t, bool) {
  return false;
}
void set_result(pid_t, int) {}
#endif

}  // namespace

bool can_fail_calls() {
  return kCanFailCalls;
}

std::optional<TracedEnd> run_traced(const std::function<int()>& work,
                                    const Intervention& intervention) {
  const pid_t child = ::fork();
  if (child < 0) return std::nullopt;
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(kNotTraced);
    ::raise(SIGSTOP);
    ::_exit(work());
  }
  TracedEnd end;
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFSTOPPED(status)) return std::nullopt;
  const unsigned long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL;
  ::ptrace(PTRACE_SETOPTIONS, child, nullptr, options);
  bool before = true;  // is the next stop before a call?
  bool fails = false;
  unsigned long signal = 0;
  while (true) {
    ::ptrace(PTRACE_SYSCALL, child, nullptr, signal);
    ::waitpid(child, &status, 0);
    if (!WIFSTOPPED(status)) break;
    signal = WSTOPSIG(status) == kCallStop ? 0 : static_cast<unsigned long>(WSTOPSIG(status));
    if (signal != 0) continue;
    if (end.stops++ == intervention.stop) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      end.killed = true;
      return end;
    }
    if (before) {
      fails = at_file_call(child, end.file_calls == intervention.call);
      if (fails) fails = end.file_calls++ == intervention.call;
    } else if (fails) {
      set_result(child, intervention.error);
      fails = false;
    }
    before = !before;
  }
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  return end;
}

}  // namespace lawson::plan
