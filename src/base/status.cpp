#include "base/status.h"

namespace lawson {

const char* to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::unsupported:
      return "unsupported";
    case ErrorKind::invalid_argument:
      return "invalid argument";
    case ErrorKind::unavailable:
      return "unavailable";
    case ErrorKind::out_of_memory:
      return "out of memory";
    case ErrorKind::cuda:
      return "CUDA error";
    case ErrorKind::cudnn:
      return "cuDNN error";
    case ErrorKind::io:
      return "I/O error";
    case ErrorKind::cancelled:
      return "cancelled";
    case ErrorKind::internal:
      return "internal error";
  }
  return "internal error";
}

Error unsupported(std::string code, std::string message, std::string field) {
  Error result{ErrorKind::unsupported, message, {}};
  result.reasons.push_back({std::move(code), std::move(message), std::move(field)});
  return result;
}

}  // namespace lawson
