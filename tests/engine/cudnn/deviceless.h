// For tests that ask the real cuDNN without a device: this process puts the no-driver library in
// the driver's place, as a worker does.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/cudnn/engine.h"
#include "engine/cudnn/loader.h"
#include "ir/json.h"

namespace lawson::cudnn {

inline Engine& engine() {
  static const std::shared_ptr<Engine> shared = [] {
    const Status entered = enter_deviceless(NODRIVER);
    EXPECT_TRUE(entered.ok()) << (entered.ok() ? "" : entered.error().message);
    return make_cudnn_engine();
  }();
  return *shared;
}

inline Device target(const std::string& name) {
  for (Device& device : engine().known_targets()) {
    if (device.name == name) return device;
  }
  ADD_FAILURE() << "no target " << name;
  return {};
}

inline ir::Graph graph_of(const Json& spec) {
  auto graph = ir::graph_from_json(spec, "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return std::move(graph).value();
}

inline std::string text(const std::vector<Reason>& reasons) {
  std::string all;
  for (const Reason& reason : reasons) all += "[" + reason.code + "] " + reason.message + "\n";
  return all;
}

inline Verdict probe(const ir::Graph& graph, const std::string& name, const Options& options = {}) {
  auto verdict = engine().probe(graph, target(name), options);
  EXPECT_TRUE(verdict.ok()) << name << ": " << (verdict.ok() ? "" : verdict.error().message);
  if (!verdict.ok()) return {};
  EXPECT_EQ(verdict->engine, "cudnn");
  EXPECT_EQ(verdict->target, name);
  EXPECT_FALSE(verdict->key.empty());
  EXPECT_NE(verdict->evidence, Evidence::live);
  if (verdict->decision != Decision::supported) {
    EXPECT_FALSE(verdict->reasons.empty()) << name;
    for (const Reason& reason : verdict->reasons) {
      EXPECT_FALSE(reason.code.empty());
      EXPECT_FALSE(reason.message.empty());
    }
  } else {
    EXPECT_FALSE(verdict->plan_names.empty());
    EXPECT_TRUE(verdict->reasons.empty()) << text(verdict->reasons);
  }
  return std::move(verdict).value();
}

}  // namespace lawson::cudnn
