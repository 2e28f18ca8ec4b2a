#include "plan/verdict_cache.h"

#include <string>
#include <vector>

namespace lawson::plan {
namespace {

std::uint64_t host_bytes(const std::vector<Reason>& reasons) {
  std::uint64_t bytes = reasons.capacity() * sizeof(Reason);
  for (const Reason& reason : reasons) {
    bytes += reason.code.capacity() + reason.message.capacity() + reason.field.capacity();
  }
  return bytes;
}

std::uint64_t host_bytes(const std::vector<std::string>& texts) {
  std::uint64_t bytes = texts.capacity() * sizeof(std::string);
  for (const std::string& text : texts) bytes += text.capacity();
  return bytes;
}

}  // namespace

std::uint64_t host_bytes(const Verdict& verdict) {
  std::uint64_t bytes = sizeof(verdict) + host_bytes(verdict.reasons) +
                        host_bytes(verdict.plan_names) + host_bytes(verdict.rewrites);
  for (const std::string* text :
       {&verdict.engine, &verdict.key, &verdict.plan_id, &verdict.target, &verdict.engine_version,
        &verdict.plan_name, &verdict.defect, &verdict.choice}) {
    bytes += text->capacity();
  }
  return bytes;
}

VerdictCache::VerdictCache(CacheBudget budget)
    : SharedCache{budget,
                  {.bytes = [](const Verdict& verdict) { return host_bytes(verdict); },
                   .inserted = {},
                   .evicted = {}}} {}

RefusalCache::RefusalCache(CacheBudget budget)
    : SharedCache{budget,
                  {.bytes =
                       [](const Error& why) {
                         return sizeof(why) + why.message.capacity() + host_bytes(why.reasons);
                       },
                   .inserted = {},
                   .evicted = {}}} {}

}  // namespace lawson::plan
