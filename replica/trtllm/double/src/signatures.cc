// Compile-time checks of the vendor's signatures on which the shim relies.
//
// This file is compiled with the test double in every test run, and with the vendor's headers by `scripts/drift`. If
// both compile, the double matches the vendor's API as far as the shim uses it. Source that merely compiles is not
// enough: a duration of milliseconds converts to one of microseconds, and a new parameter with a default goes
// unnoticed.
#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include "tensorrt_llm/executor/executor.h"
#include "tensorrt_llm/executor/version.h"
#include "tensorrt_llm/plugins/api/tllmPlugin.h"

namespace
{

namespace tle = tensorrt_llm::executor;
using Milliseconds = std::optional<std::chrono::milliseconds>;

// Checks that `MEMBER` of `CLASS` has this type, which selects it among overloads.
template <typename Wanted>
constexpr bool is(Wanted)
{
    return true;
}

// The executor.
static_assert(is<tle::IdType (tle::Executor::*)(tle::Request const&)>(&tle::Executor::enqueueRequest));
static_assert(is<std::vector<tle::Response> (tle::Executor::*)(Milliseconds const&)>(&tle::Executor::awaitResponses));
static_assert(is<void (tle::Executor::*)(tle::IdType)>(&tle::Executor::cancelRequest));
static_assert(is<void (tle::Executor::*)()>(&tle::Executor::shutdown));
static_assert(is<std::deque<tle::IterationStats> (tle::Executor::*)()>(&tle::Executor::getLatestIterationStats));
static_assert(is<bool (tle::Executor::*)() const>(&tle::Executor::canEnqueueRequests));
static_assert(
    std::is_constructible_v<tle::Executor, std::filesystem::path const&, tle::ModelType, tle::ExecutorConfig const&>);

// Requests.
static_assert(std::is_constructible_v<tle::Request, tle::VecTokens, tle::SizeType32>);
static_assert(std::is_same_v<tle::VecTokens, std::vector<std::int32_t>>);
static_assert(std::is_same_v<tle::IdType, std::uint64_t>);
static_assert(is<void (tle::Request::*)(bool)>(&tle::Request::setStreaming));
static_assert(is<void (tle::Request::*)(tle::OutputConfig const&)>(&tle::Request::setOutputConfig));
static_assert(is<void (tle::Request::*)(tle::IdType)>(&tle::Request::setClientId));
static_assert(is<void (tle::Request::*)(tle::PriorityType)>(&tle::Request::setPriority));
static_assert(is<void (tle::Request::*)(bool)>(&tle::Request::setReturnAllGeneratedTokens));
static_assert(is<void (tle::Request::*)(tle::RequestType const&)>(&tle::Request::setRequestType));
static_assert(tle::Request::kDefaultPriority == 0.5F);
static_assert(std::is_constructible_v<tle::AdditionalModelOutput, std::string, bool>);
static_assert(std::is_same_v<decltype(tle::OutputConfig::additionalModelOutputs),
    std::optional<std::vector<tle::AdditionalModelOutput>>>);

// Responses.
static_assert(is<std::optional<tle::IdType> (tle::Response::*)() const>(&tle::Response::getClientId));
static_assert(is<bool (tle::Response::*)() const>(&tle::Response::hasError));
static_assert(is<std::string const& (tle::Response::*)() const>(&tle::Response::getErrorMsg));
static_assert(is<tle::Result const& (tle::Response::*)() const>(&tle::Response::getResult));
static_assert(std::is_same_v<decltype(tle::Result::contextLogits), std::optional<tle::Tensor>>);
static_assert(std::is_same_v<decltype(tle::Result::generationLogits), std::optional<tle::Tensor>>);
static_assert(std::is_same_v<decltype(tle::Result::finishReasons), std::vector<tle::FinishReason>>);
static_assert(std::is_same_v<decltype(tle::Result::additionalOutputs), std::vector<tle::AdditionalOutput>>);
static_assert(std::is_same_v<decltype(tle::AdditionalOutput::output), tle::Tensor>);
static_assert(is<void const* (tle::Tensor::*)() const>(&tle::Tensor::getData));
static_assert(is<tle::DataType (tle::Tensor::*)() const>(&tle::Tensor::getDataType));
static_assert(is<std::size_t (tle::Tensor::*)() const>(&tle::Tensor::getSizeInBytes));
static_assert(is<tle::Shape (tle::Tensor::*)() const>(&tle::Tensor::getShape));
static_assert(std::is_same_v<tle::Shape::DimType64, std::int64_t>);

// Numbers.
static_assert(static_cast<int>(tle::DataType::kBF16) == 5);
static_assert(static_cast<int>(tle::DataType::kFP16) == 7);
static_assert(static_cast<int>(tle::DataType::kFP32) == 8);
static_assert(static_cast<int>(tle::BatchingType::kINFLIGHT) == 1);
static_assert(static_cast<int>(tle::CapacitySchedulerPolicy::kGUARANTEED_NO_EVICT) == 1);
static_assert(static_cast<int>(tle::FinishReason::kLENGTH) == 3);
static_assert(static_cast<int>(tle::FinishReason::kTIMED_OUT) == 4);
static_assert(static_cast<int>(tle::FinishReason::kCANCELLED) == 5);

// The configuration.
template <typename Value>
using Set = void (tle::ExecutorConfig::*)(Value);
static_assert(is<Set<tle::SizeType32>>(&tle::ExecutorConfig::setMaxBeamWidth));
static_assert(is<Set<tle::SizeType32>>(&tle::ExecutorConfig::setMaxBatchSize));
static_assert(is<Set<tle::SizeType32>>(&tle::ExecutorConfig::setMaxNumTokens));
static_assert(is<Set<tle::SchedulerConfig const&>>(&tle::ExecutorConfig::setSchedulerConfig));
static_assert(is<Set<tle::KvCacheConfig const&>>(&tle::ExecutorConfig::setKvCacheConfig));
static_assert(is<Set<bool>>(&tle::ExecutorConfig::setEnableChunkedContext));
static_assert(is<Set<bool>>(&tle::ExecutorConfig::setNormalizeLogProbs));
static_assert(is<Set<tle::SizeType32>>(&tle::ExecutorConfig::setIterStatsMaxIterations));
static_assert(is<Set<tle::SizeType32>>(&tle::ExecutorConfig::setRequestStatsMaxIterations));
static_assert(is<Set<tle::BatchingType>>(&tle::ExecutorConfig::setBatchingType));
static_assert(is<Set<tle::ParallelConfig const&>>(&tle::ExecutorConfig::setParallelConfig));
static_assert(is<Set<bool const&>>(&tle::ExecutorConfig::setUseGpuDirectStorage));
static_assert(is<Set<float const&>>(&tle::ExecutorConfig::setGpuWeightsPercent));
static_assert(is<Set<std::optional<tle::SizeType32> const&>>(&tle::ExecutorConfig::setMaxQueueSize));
static_assert(
    is<Set<tle::ExtendedRuntimePerfKnobConfig const&>>(&tle::ExecutorConfig::setExtendedRuntimePerfKnobConfig));
static_assert(is<Set<tle::SizeType32 const&>>(&tle::ExecutorConfig::setRecvPollPeriodMs));
static_assert(is<Set<std::uint64_t>>(&tle::ExecutorConfig::setMaxSeqIdleMicroseconds));
static_assert(
    is<Set<std::vector<tle::AdditionalModelOutput> const&>>(&tle::ExecutorConfig::setAdditionalModelOutputs));
static_assert(is<Set<bool>>(&tle::ExecutorConfig::setGatherGenerationLogits));
static_assert(is<Set<bool>>(&tle::ExecutorConfig::setPromptTableOffloading));
static_assert(is<Set<bool>>(&tle::ExecutorConfig::setEnableTrtOverlap));
static_assert(is<Set<bool>>(&tle::ExecutorConfig::setFailFastOnAttentionWindowTooLarge));
static_assert(is<void (tle::KvCacheConfig::*)(std::optional<tle::SizeType32>)>(&tle::KvCacheConfig::setMaxTokens));
static_assert(is<void (tle::KvCacheConfig::*)(tle::FloatType)>(&tle::KvCacheConfig::setFreeGpuMemoryFraction));
static_assert(is<void (tle::KvCacheConfig::*)(std::size_t)>(&tle::KvCacheConfig::setHostCacheSize));

} // namespace
