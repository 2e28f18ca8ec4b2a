#define LAWSON_CPU_NAME v4
#include "engine/cpu/kernels_body.h"
