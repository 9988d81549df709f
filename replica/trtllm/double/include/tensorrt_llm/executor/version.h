// Test double: the version that it reports, and a flag that marks it as a double.
#pragma once

namespace tensorrt_llm::executor
{
static auto constexpr kTensorRtLlmVersion = "1.2.1-double";
} // namespace tensorrt_llm::executor
