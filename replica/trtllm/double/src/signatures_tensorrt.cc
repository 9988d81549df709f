// The same checks for TensorRT and CUDA, which are available without TensorRT-LLM.
#include <cstddef>
#include <cstdint>

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

namespace
{

using nvinfer1::Dims;
using nvinfer1::ICudaEngine;
using nvinfer1::IExecutionContext;
using nvinfer1::IRuntime;

template <typename Wanted>
constexpr bool is(Wanted)
{
    return true;
}

static_assert(is<ICudaEngine* (IRuntime::*) (void const*, std::size_t) noexcept>(&IRuntime::deserializeCudaEngine));
static_assert(is<std::int32_t (ICudaEngine::*)() const noexcept>(&ICudaEngine::getNbIOTensors));
static_assert(is<char const* (ICudaEngine::*) (std::int32_t) const noexcept>(&ICudaEngine::getIOTensorName));
static_assert(
    is<nvinfer1::TensorIOMode (ICudaEngine::*)(char const*) const noexcept>(&ICudaEngine::getTensorIOMode));
static_assert(
    is<nvinfer1::DataType (ICudaEngine::*)(char const*) const noexcept>(&ICudaEngine::getTensorDataType));
static_assert(is<Dims (ICudaEngine::*)(char const*, std::int32_t, nvinfer1::OptProfileSelector) const noexcept>(
    &ICudaEngine::getProfileShape));
static_assert(is<IExecutionContext* (ICudaEngine::*) (nvinfer1::ExecutionContextAllocationStrategy) noexcept>(
    &ICudaEngine::createExecutionContext));
static_assert(is<bool (IExecutionContext::*)(char const*, Dims const&) noexcept>(&IExecutionContext::setInputShape));
static_assert(is<bool (IExecutionContext::*)(char const*, void*) noexcept>(&IExecutionContext::setTensorAddress));
static_assert(is<Dims (IExecutionContext::*)(char const*) const noexcept>(&IExecutionContext::getTensorShape));
static_assert(is<bool (IExecutionContext::*)(cudaStream_t) noexcept>(&IExecutionContext::enqueueV3));
static_assert(static_cast<int>(nvinfer1::DataType::kFLOAT) == 0);
static_assert(static_cast<int>(nvinfer1::DataType::kHALF) == 1);
static_assert(static_cast<int>(nvinfer1::DataType::kBF16) == 7);
static_assert(static_cast<int>(nvinfer1::TensorIOMode::kOUTPUT) == 2);
static_assert(static_cast<int>(nvinfer1::OptProfileSelector::kMAX) == 2);
static_assert(static_cast<int>(nvinfer1::ILogger::Severity::kERROR) == 1);
static_assert(sizeof(Dims) == 72);
static_assert(static_cast<int>(cudaSuccess) == 0);
static_assert(static_cast<int>(cudaErrorMemoryAllocation) == 2);
static_assert(static_cast<int>(cudaErrorSetOnActiveProcess) == 708);
static_assert(static_cast<int>(cudaMemcpyHostToDevice) == 1);
static_assert(static_cast<int>(cudaMemcpyDeviceToHost) == 2);
static_assert(cudaDeviceScheduleBlockingSync == 4);

} // namespace
