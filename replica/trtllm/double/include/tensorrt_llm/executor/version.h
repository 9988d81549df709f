// Stand-in. The version that it passes itself off as, and that it is none.
#pragma once

namespace tensorrt_llm::executor
{
static auto constexpr kTensorRtLlmVersion = "1.2.1-double";
} // namespace tensorrt_llm::executor
