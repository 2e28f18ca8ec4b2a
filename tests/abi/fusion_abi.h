/* The fusion part of abi_test: building graphs, fusing, memory. */
#ifndef LAWSON_TESTS_FUSION_ABI_H_
#define LAWSON_TESTS_FUSION_ABI_H_

#include "attention_abi.h"

extern AbiFunction const kFusionFunctions[];
extern const size_t kFusionFunctionCount;

void fusion_layout(void);
/* Every function with NULL, then once through the life of a builder, a fusion and its memory.
 * Returns how many expectations failed. */
int fusion_calls(void);

#endif
