// A step and its pointers as the arguments of its rules (steps_rules.h).
#pragma once

#include <span>
#include <variant>

#include "engine/cudnn/steps.h"
#include "engine/cudnn/steps_rules.h"

namespace lawson::cudnn {

using StepArguments =
    std::variant<steps::RaggedArguments, steps::ScoreBiasArguments, steps::MaskedRowsArguments,
                 steps::ClearRowsArguments, steps::StatsOfRowsArguments, steps::ReduceArguments,
                 steps::ZeroGapsArguments, steps::CacheAppendArguments,
                 steps::ConvertMaskArguments>;

// `step` has been checked. invalid_argument when the pointers are not those of step_uids().
// By-value operands are read here.
Result<StepArguments> step_arguments(const Step& step, std::span<void* const> pointers);

}  // namespace lawson::cudnn
