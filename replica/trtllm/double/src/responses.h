// Responses of the test double of the executor.
#pragma once

#include "tensorrt_llm/executor/executor.h"

#include "plan.h"

namespace tensorrt_llm::executor
{

// Returns all outputs that the request selects. A prompt's state after its token i is a function of the tokens up to i.
Result result_of(Request const& request, meridian::double_::Plan const& plan);

} // namespace tensorrt_llm::executor
