// What one core can do at most: independent multiply-adds in registers.
#pragma once

namespace lawson::bench {

// GFLOP/s of f32 with the vectors of a kernel set ("generic", "v2", "v3", "v4"); measured once.
double peak_gflops(const char* kernels);

}  // namespace lawson::bench
