// Test double of TensorRT's runtime: the names, signatures and numbers that the shim uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "NvInferVersion.h"
#include "cuda_runtime_api.h"

namespace nvinfer1
{

using AsciiChar = char;

enum class DataType : std::int32_t
{
    kFLOAT = 0,
    kHALF = 1,
    kINT8 = 2,
    kINT32 = 3,
    kBF16 = 7,
};

enum class TensorIOMode : std::int32_t
{
    kNONE = 0,
    kINPUT = 1,
    kOUTPUT = 2,
};

enum class OptProfileSelector : std::int32_t
{
    kMIN = 0,
    kOPT = 1,
    kMAX = 2,
};

enum class ExecutionContextAllocationStrategy : std::int32_t
{
    kSTATIC = 0,
};

class Dims64
{
public:
    static constexpr std::int32_t MAX_DIMS{8};
    std::int32_t nbDims;
    std::int64_t d[MAX_DIMS];
};

using Dims = Dims64;

class ILogger
{
public:
    enum class Severity : std::int32_t
    {
        kINTERNAL_ERROR = 0,
        kERROR = 1,
        kWARNING = 2,
        kINFO = 3,
        kVERBOSE = 4,
    };

    virtual void log(Severity severity, AsciiChar const* msg) noexcept = 0;
    virtual ~ILogger() = default;
};

class IExecutionContext
{
public:
    virtual ~IExecutionContext() noexcept = default;
    virtual bool setInputShape(char const* tensorName, Dims const& dims) noexcept = 0;
    virtual bool setTensorAddress(char const* tensorName, void* data) noexcept = 0;
    virtual Dims getTensorShape(char const* tensorName) const noexcept = 0;
    virtual bool enqueueV3(cudaStream_t stream) noexcept = 0;
};

class ICudaEngine
{
public:
    virtual ~ICudaEngine() noexcept = default;
    virtual IExecutionContext* createExecutionContext(
        ExecutionContextAllocationStrategy strategy = ExecutionContextAllocationStrategy::kSTATIC) noexcept
        = 0;
    virtual std::int32_t getNbIOTensors() const noexcept = 0;
    virtual char const* getIOTensorName(std::int32_t index) const noexcept = 0;
    virtual TensorIOMode getTensorIOMode(char const* tensorName) const noexcept = 0;
    virtual DataType getTensorDataType(char const* tensorName) const noexcept = 0;
    virtual Dims getProfileShape(
        char const* tensorName, std::int32_t profileIndex, OptProfileSelector select) const noexcept
        = 0;
};

class IRuntime
{
public:
    virtual ~IRuntime() noexcept = default;
    virtual ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept = 0;
};

IRuntime* createInferRuntime(ILogger& logger) noexcept;

} // namespace nvinfer1

extern "C" std::int32_t getInferLibVersion() noexcept;
