// This process, and those that it was forked from.
#pragma once

namespace lawson {

// 0 in a process that was started; one more in each forked child than in its parent. Cheap.
int fork_count() noexcept;

}  // namespace lawson
