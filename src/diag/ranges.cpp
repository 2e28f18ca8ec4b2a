#include "diag/ranges.h"

#ifdef LAWSON_HAVE_NVTX
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <array>

#include "base/lazy.h"
#endif

namespace lawson::diag {

#ifdef LAWSON_HAVE_NVTX
namespace {

// Null without a profiler: NVTX then does nothing but look for one, once.
nvtxDomainHandle_t domain() noexcept {
  static Lazy<const nvtxDomainHandle_t> handle;
  return handle.get([] { return nvtxDomainCreateA("lawson"); });
}

}  // namespace

bool has_profiler() noexcept {
  return domain() != nullptr;
}

void begin_range(std::string_view name) noexcept {
  std::array<char, 64> text{};  // NUL-terminated
  std::copy_n(name.begin(), std::min(name.size(), text.size() - 1), text.begin());
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = text.data();
  nvtxDomainRangePushEx(domain(), &attributes);
}

void end_range() noexcept {
  nvtxDomainRangePop(domain());
}
#else
bool has_profiler() noexcept {
  return false;
}
void begin_range(std::string_view) noexcept {}
void end_range() noexcept {}
#endif

}  // namespace lawson::diag
