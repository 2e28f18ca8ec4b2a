// Files of the store: bytes as a reader meets them, and, because no mutation gets past a checksum,
// the same bytes under checksums that are right.
#include <algorithm>
#include <cstdint>
#include <span>

#include "base/hash.h"
#include "base/json.h"
#include "fuzz.h"
#include "plan/store_content.h"
#include "plan/store_entry.h"
#include "plan/tuned_plans.h"

namespace lawson::plan {
namespace {

using fuzz::require;

void append(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>((value >> (8 * i)) & 0xFF);
}

// The layout as docs/store.md says it, written a second time.
std::string sealed(std::string_view header, std::string_view content) {
  std::string text = "LAWSONS1";
  append(text, 1, 4);
  append(text, header.size(), 4);
  append(text, content.size(), 8);
  text += hash_hex(content);
  text += header;
  text += hash_hex(text);
  text += content;
  return text;
}

std::string sealed_plan(std::string_view cbor) {
  std::string text = "LAWSONP1";
  append(text, cbor.size(), 8);
  text += cbor;
  return text + hash_hex(text);
}

// What is read is what was written, and nothing else is.
void look_at(const std::string& file) {
  const auto head = decode_head(std::string_view{file}.substr(0, kMaxHeadBytes), file.size());
  const auto entry = decode_entry(file);
  require(!entry.ok() || head.ok(), "a file that can be read has a head that can be read");
  if (!entry.ok()) return;
  require(head->header == entry->header, "head and file say the same");
  const auto again = encode_entry(entry->header, entry->content);
  if (again.ok()) {  // not so where the CBOR read was shorter than the one that is written
    const auto second = decode_entry(*again);
    require(second.ok() && second->header == entry->header && second->content == entry->content,
            "what was read can be written and read again");
  }
  if (!check_content(entry->header, entry->content).ok()) return;
  if (entry->header.kind == EntryKind::plan) {
    const auto plan = plan_of_content(entry->header, entry->content);
    require(plan.ok() && plan->key == entry->header.key, "a plan of the key that the head says");
    require(plan_from_bytes(plan_to_bytes(*plan)).ok(), "a plan can be written and read again");
  } else if (entry->header.kind == EntryKind::verdict) {
    const auto verdict = verdict_of_content(entry->header, entry->content);
    require(verdict.ok() && verdict_from_json(verdict_to_json(*verdict)).ok(),
            "a verdict can be written and read again");
  } else {
    const auto tuned = tuned_from_bytes(entry->content);
    require(tuned.ok() && !tuned->built.empty(), "a choice among plans");
    require(tuned_from_bytes(tuned_to_bytes(*tuned)).ok(),
            "a choice can be written and read again");
  }
}

// Inputs of the second kind: 2 bytes for where the header ends, 1 whose lowest bit says whether the
// content is a plan's CBOR that gets its frame; header; content.
std::string input_of(const std::string& header, const std::string& content, bool frames) {
  std::string text;
  append(text, header.size(), 2);
  append(text, frames ? 1 : 0, 1);
  return text + header + content;
}

void look_at_sealed(std::string_view input) {
  if (input.size() < 3) return;
  const auto byte = [&](std::size_t at) {
    return std::size_t{static_cast<unsigned char>(input[at])};
  };
  const std::string_view rest = input.substr(3);
  const std::size_t header_size = std::min(byte(0) | byte(1) << 8, rest.size());
  const std::string_view content = rest.substr(header_size);
  look_at(sealed(rest.substr(0, header_size),
                 byte(2) % 2 == 1 ? sealed_plan(content) : std::string{content}));
}

std::vector<std::string> seeds() {
  Plan plan;
  plan.key = "0123456789abcdef0123456789abcdef";
  plan.plan_id = "fedcba9876543210fedcba9876543210";
  plan.engine = "cudnn";
  plan.engine_version = "9.19.0";
  plan.target = "h200";
  plan.plan_name = "eng9_k1=2";
  plan.graph_json = R"({"lawson": 1})";
  plan.bytes.resize(64);
  Verdict verdict;
  verdict.decision = Decision::supported;
  verdict.engine = plan.engine;
  verdict.engine_version = plan.engine_version;
  verdict.key = plan.key;
  verdict.plan_names = {"a", "b"};
  verdict.reasons = {{"code", "message", "field"}};
  verdict.workspace_bytes = 16;
  Tuned tuned;
  tuned.plan = plan;
  tuned.built = {plan};
  tuned.report.candidates = {{.name = "a", .rounds = 1, .median_ms = 2}};

  std::vector<std::string> all;
  const auto add = [&](EntryKind kind, const std::string& content, const std::string& inner) {
    const EntryHeader header{kind,       plan.key, "0.1.0", plan.engine, plan.engine_version,
                             plan.target};
    const std::string file = encode_entry(header, content).value();
    all.push_back(file);
    const std::size_t header_size = file.size() - content.size() - 32 - 56;
    all.push_back(input_of(file.substr(56, header_size), inner, kind == EntryKind::plan));
  };
  const std::vector<std::byte> bytes = plan_to_bytes(plan);
  const std::string framed{reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  add(EntryKind::plan, framed, framed.substr(16, framed.size() - 16 - 32));
  std::string cbor;
  Json::to_cbor(verdict_to_json(verdict), cbor);
  add(EntryKind::verdict, cbor, cbor);
  add(EntryKind::tuned, tuned_to_bytes(tuned), tuned_to_bytes(tuned));
  return all;
}

}  // namespace
}  // namespace lawson::plan

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  lawson::fuzz::write_seeds_if_asked(*argc, *argv, lawson::plan::seeds());
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string input{reinterpret_cast<const char*>(data), size};
  lawson::plan::look_at(input);
  lawson::plan::look_at_sealed(input);
  return 0;
}
