// The worker's side of the pipe: answers requests with an engine until the host goes away.
#pragma once

#include <string>

#include "engine/engine.h"

namespace lawson::plan {

// Moves the pipe away from stdin and stdout, so that nothing that a library prints gets into it
// (prints go to stderr, which the host keeps for error messages), and sees to it that this process
// ends when the host does. Call first, before any other thread or library. Returns the pipe.
Result<int> enter_worker(int parent);

// No core dumps, and a runaway compile ends with an error instead of with the machine's memory.
void limit_resources();

// Says hello, then serves until end of file. `engine` nullptr: `failure` is why there is none.
// Returns the exit status.
int serve(int channel, Engine* engine, const Error& failure);

}  // namespace lawson::plan
