// Test double of the registration of plugins.
#pragma once

#include <NvInferRuntime.h>

namespace tensorrt_llm::plugins::api
{
auto constexpr kDefaultNamespace = "tensorrt_llm";
} // namespace tensorrt_llm::plugins::api

extern "C" bool initTrtLlmPlugins(
    void* logger, char const* libNamespace = tensorrt_llm::plugins::api::kDefaultNamespace);
