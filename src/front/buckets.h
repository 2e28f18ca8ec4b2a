// Rounded-up maxima of ragged batches, so that each new batch size or token count does not ask for
// a new plan. The tail of a bucket has length 0 and the last offset.
#pragma once

#include <cstdint>

namespace lawson::front {

// 1-32 -> 32; 33-512 -> the next power of two; above -> the next multiple of 512.
// Both: 0 and below map to the smallest bucket; where the next multiple is beyond int64, the result
// is the largest int64. Never less than n, and a bucket is its own bucket.
std::int64_t bucket_batch(std::int64_t n);

// Up to 1024 -> 1024; up to 32768 -> the next power of two; above -> the next multiple of 32768.
std::int64_t bucket_tokens(std::int64_t n);

}  // namespace lawson::front
