// Why a spec does not fuse, and what nearby does. Everything said here was probed.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "base/json.h"
#include "capi/judge.h"
#include "engine/device.h"
#include "front/spec.h"

namespace lawson::capi {

inline constexpr std::size_t kDefaultExplainLimit = 64;

using ProbeSpec = std::function<Result<SpecVerdict>(const front::Spec&, const Device&)>;

// The document of lawson_explain. `targets`: other devices to ask, in order of interest. At most
// `limit` probes besides the spec's own, `threads` at a time.
//
// A change of one attribute that makes the spec supported makes that attribute a failing condition.
// Where no single change suffices, sets of two and three are tried, guided by whether the reasons
// changed: an engine names the first condition that fails, so a change that brings up another
// reason removed one.
//
// A graph is cut too, with at most half of the probes: the best cut whose parts are all supported
// is a neighbour of kind "split", with its `specs` and `verdicts`; behind exact changes of an
// attribute, before all others.
Result<Json> explain(const front::Spec& spec, const Device& device,
                     const std::vector<Device>& targets, std::size_t limit, unsigned threads,
                     const ProbeSpec& probe);

}  // namespace lawson::capi
