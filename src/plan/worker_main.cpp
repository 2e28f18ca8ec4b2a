// lawson-worker: judges and compiles for GPUs that are not here. Started by the worker pool only.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "engine/cudnn/loader.h"
#include "engine/registry.h"
#include "plan/worker_serve.h"

namespace {

struct Arguments {
  std::string nodriver;
  std::string cudnn;
  int parent = 0;
};

// The pool writes this command line; a person who does gets told so.
bool parse(int argc, char** argv, Arguments& arguments) {
  std::string parent;
  const std::array<std::pair<std::string_view, std::string*>, 3> known{
      {{"--nodriver", &arguments.nodriver}, {"--cudnn", &arguments.cudnn}, {"--parent", &parent}}};
  for (int i = 1; i + 1 < argc; i += 2) {
    const auto* const found = std::find_if(
        known.begin(), known.end(), [&](const auto& option) { return option.first == argv[i]; });
    if (found == known.end()) return false;
    *found->second = argv[i + 1];
  }
  arguments.parent = std::atoi(parent.c_str());
  return argc % 2 == 1 && !arguments.nodriver.empty() && arguments.parent > 0;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lawson;
  Arguments arguments;
  if (!parse(argc, argv, arguments)) {
    std::fputs("lawson-worker is started by Lawson's library, not by hand\n", stderr);
    return 2;
  }
  plan::limit_resources();
  auto channel = plan::enter_worker(arguments.parent);
  if (!channel.ok()) {
    std::fprintf(stderr, "%s\n", channel.error().message.c_str());
    return 1;
  }
  if (!arguments.cudnn.empty()) choose_cudnn(arguments.cudnn);

  // The no-driver library has to be the first of CUDA's names in this process.
  Engine* engine = find_engine("cudnn");
  Status ready = cudnn::enter_deviceless(arguments.nodriver);
  if (ready.ok()) {
    if (auto loaded = cudnn::libraries(); !loaded.ok()) ready = std::move(loaded).error();
  }
  return plan::serve(*channel, ready.ok() ? engine : nullptr, ready.ok() ? Error{} : ready.error());
}
