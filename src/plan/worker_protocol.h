// What host and worker say to each other: frames of an 8-byte little-endian length and one CBOR
// document. The worker begins with a hello; then each request gets one reply.
//   hello    {"protocol": 1, "info": {...}, "engine_version"?}
//            or   {"protocol": 1, "error": {...}}
//   request  {"id": n, "request": "probe"|"candidates"|"compile", "graph", "graph_hash", "device",
//             "options", "candidate"?}
//   reply    {"id": n, "verdict" | "candidates" | "plan": ...}   or   {"id": n, "error": {...}};
//            and "rss": the worker's resident bytes, "happened": diag/passing.h
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace lawson::plan {

inline constexpr int kProtocolVersion = 1;
inline constexpr std::size_t kFramePrefixBytes = 8;
inline constexpr std::size_t kMaxFrameBytes = std::size_t{256} << 20;

// An error when the document is larger than a frame may be.
Result<std::string> encode_frame(const Json& document);

// Cuts a stream of bytes into documents. After an error of feed() the stream is out of step and has
// to be given up; after an error of next() only that document is lost.
class FrameReader {
 public:
  Status feed(std::string_view bytes);
  // The next whole document; nullopt when more bytes are needed.
  Result<std::optional<Json>> next();
  bool empty() const { return buffer_.size() == taken_; }

 private:
  std::optional<std::uint64_t> length()
      const;  // of the frame at the front, when its prefix is here

  std::string buffer_;
  std::size_t taken_ = 0;
};

enum class Verb { probe, candidates, compile };
std::string_view to_string(Verb verb);

struct WorkerRequest {
  Verb verb = Verb::probe;
  ir::Graph graph;
  Device device;
  Options options;
  std::optional<Candidate> candidate;
};

Json request_to_json(Verb verb, const ir::Graph& graph, const Device& device,
                     const Options& options, const std::optional<Candidate>& candidate);
// Checks that the graph that arrived is the one that was sent: its canonical text, hence the key.
Result<WorkerRequest> request_from_json(const Json& document);

Json options_to_json(const Options& options);
Result<Options> options_from_json(const Json& document);

Json candidates_to_json(const std::vector<Candidate>& candidates);
Result<std::vector<Candidate>> candidates_from_json(const Json& document);

Json plan_to_json(const Plan& plan);  // one CBOR byte string: plan_to_bytes
Result<Plan> plan_from_json(const Json& document);

Json error_to_json(const Error& error);
// Whatever arrives, some error results: one that cannot be read is an internal error that shows it.
Error error_from_json(const Json& document);

}  // namespace lawson::plan
