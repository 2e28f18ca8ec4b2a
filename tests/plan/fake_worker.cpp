// A worker that does what it is told, in particular everything that a worker should not.
//   fake_worker [--nodriver] MODE --parent PID
// MODE engine: a well-behaved worker with the fake engine. MODE obey: requests are orders. The
// other modes go wrong before the hello.
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "diag/diag.h"
#include "diag/passing.h"
#include "fake_engine.h"
#include "plan/worker_protocol.h"
#include "plan/worker_serve.h"

namespace {

using namespace lawson;
using namespace lawson::plan;

void write_bytes(int channel, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(channel, bytes.data(), bytes.size());
    if (written <= 0) ::_exit(0);
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

void send(int channel, const Json& document) {
  write_bytes(channel, *encode_frame(document));
}

// Sanitizers catch some signals; here the default action is wanted.
[[noreturn]] void die_of(int signal) {
  ::signal(signal, SIG_DFL);
  ::raise(signal);
  std::abort();
}

[[noreturn]] void hang() {
  for (;;) ::pause();
}

std::string frame_of(std::string_view payload) {
  std::string frame(8, '\0');
  for (std::size_t i = 0; i < 8; ++i)
    frame[i] = static_cast<char>((payload.size() >> (8 * i)) & 0xFF);
  return frame += payload;
}

void obey(int channel, const Json& request) {
  const auto order = request.value("request", "");
  Json reply{{"id", request.at("id")}, {"pid", ::getpid()}};
  if (order == "echo") reply["value"] = request.at("value");
  if (order == "sleep") {
    std::this_thread::sleep_for(std::chrono::milliseconds{request.value("ms", 0)});
  }
  if (order == "error") {
    reply["error"] = error_to_json(unsupported("odd", "7 is odd", "head_dim"));
  }
  if (order == "segfault") {
    std::fputs("about to touch what is not mine\n", stderr);
    die_of(SIGSEGV);
  }
  if (order == "abort") die_of(SIGABRT);
  if (order == "exit") ::_exit(3);
  if (order == "hang") hang();
  if (order == "close") {
    ::shutdown(channel, SHUT_WR);
    hang();
  }
  if (order == "garbage") return write_bytes(channel, std::string(4096, '\xEE'));
  if (order == "not cbor") return write_bytes(channel, frame_of("\xFF\xFF\xFF"));
  if (order == "deep") return write_bytes(channel, frame_of(std::string(1 << 20, '\x81')));
  if (order == "not an object") return send(channel, Json::array({1, 2}));
  if (order == "wrong id") reply["id"] = 12345;
  if (order == "two replies") {  // in one write: nobody sees the first without the second
    const std::string frame = *encode_frame(reply);
    return write_bytes(channel, frame + frame);
  }
  if (order == "half") {
    write_bytes(channel, encode_frame(reply)->substr(0, 12));
    ::_exit(0);
  }
  if (order == "chatter") {
    const std::string line(1000, 'x');
    for (int i = 0; i < 1000; ++i) std::fprintf(stderr, "%s\n", line.c_str());
    std::fputs("the last line\n", stderr);
  }
  if (order == "print") {  // what a library might do
    std::fputs("printed on stdout\n", stdout);
    std::fflush(stdout);
  }
  if (order == "happen") {
    {
      const diag::Span span{diag::Stage::validate, {"away", diag::kForward, "key", -1}};
      diag::record(diag::Event::create_graph, {"away", diag::kForward, "key", -1});
    }
    reply["happened"] = diag::take_collected();
  }
  if (order == "happen oddly") reply["happened"] = Json::array({7, {{"name", "hit"}}});
  if (order == "fat") reply["rss"] = std::uint64_t{1} << 40;
  send(channel, reply);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::string mode = argv[argc - 3];
  const auto channel = enter_worker(std::atoi(argv[argc - 1]));
  if (!channel.ok()) return 1;
  if (mode == "engine") {
    FakeEngine engine("worker");
    return serve(*channel, &engine, {});
  }
  if (mode == "no cudnn") {
    return serve(*channel, nullptr, error(ErrorKind::unavailable, "libcudnn.so.9 is not here"));
  }
  if (mode == "exit") {
    std::fputs("fake_worker: error while loading shared libraries: libfoo.so\n", stderr);
    return 127;
  }
  if (mode == "crash") die_of(SIGABRT);
  if (mode == "silent") hang();
  if (mode == "garbage") {
    write_bytes(*channel, std::string(64, '\xEE'));
    hang();
  }
  if (mode == "stranger") {
    send(*channel, {{"hello", "world"}});
    hang();
  }
  if (mode == "other protocol") {
    send(*channel, {{"protocol", kProtocolVersion + 1}});
    hang();
  }

  send(*channel, {{"protocol", kProtocolVersion}, {"info", {{"pid", ::getpid()}}}});
  FrameReader frames;
  for (;;) {
    const auto document = frames.next();
    if (document.ok() && document->has_value()) {
      obey(*channel, **document);
      continue;
    }
    char chunk[4096];
    const ssize_t got = ::read(*channel, chunk, sizeof chunk);
    if (got <= 0) return 0;
    if (!frames.feed({chunk, static_cast<std::size_t>(got)}).ok()) return 1;
  }
}
