// Test double of the executor: the vendor's names and signatures with our own implementation.
//
// Where the vendor's class has a default that the shim must not rely on, the double has none: `Settable` throws when it
// is read before it was set. So a field that the shim forgets fails every test, instead of the first release that
// changes a default.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tensorrt_llm/executor/tensor.h"
#include "tensorrt_llm/executor/types.h"

namespace tensorrt_llm::executor
{

template <typename T>
class Settable
{
public:
    Settable& operator=(T value)
    {
        value_ = std::move(value);
        return *this;
    }

    T const& get(char const* name) const
    {
        if (!value_)
        {
            throw std::logic_error(std::string("the shim leaves `") + name + "` to a default");
        }
        return *value_;
    }

private:
    std::optional<T> value_;
};

class AdditionalModelOutput
{
public:
    explicit AdditionalModelOutput(std::string name, bool gatherContext = false)
        : name(std::move(name))
        , gatherContext(gatherContext)
    {
    }

    std::string name;
    bool gatherContext{false};
};

class OutputConfig
{
public:
    bool returnLogProbs{true};
    bool returnContextLogits{true};
    bool returnGenerationLogits{true};
    bool excludeInputFromOutput{false};
    bool returnEncoderOutput{true};
    bool returnPerfMetrics{true};
    std::optional<std::vector<AdditionalModelOutput>> additionalModelOutputs;
};

class Request
{
public:
    static constexpr PriorityType kDefaultPriority = 0.5F;

    Request(VecTokens inputTokenIds, SizeType32 maxTokens)
        : tokens(std::move(inputTokenIds))
        , maxTokens(maxTokens)
    {
    }

    void setStreaming(bool value)
    {
        streaming = value;
    }

    void setOutputConfig(OutputConfig const& value)
    {
        output = value;
    }

    void setClientId(IdType value)
    {
        clientId = value;
    }

    void setPriority(PriorityType value)
    {
        priority = value;
    }

    void setReturnAllGeneratedTokens(bool value)
    {
        returnAll = value;
    }

    void setRequestType(RequestType const& value)
    {
        type = value;
    }

    VecTokens tokens;
    SizeType32 maxTokens;
    Settable<bool> streaming;
    Settable<OutputConfig> output;
    Settable<IdType> clientId;
    Settable<PriorityType> priority;
    Settable<bool> returnAll;
    Settable<RequestType> type;
};

struct AdditionalOutput
{
    std::string name;
    Tensor output;
};

struct Result
{
    bool isFinal{true};
    BeamTokens outputTokenIds;
    std::optional<Tensor> contextLogits;
    std::optional<Tensor> generationLogits;
    std::vector<FinishReason> finishReasons;
    std::vector<AdditionalOutput> additionalOutputs;
};

class Response
{
public:
    Response(IdType requestId, std::string errorMsg, std::optional<IdType> clientId = std::nullopt);
    Response(IdType requestId, Result result, std::optional<IdType> clientId = std::nullopt);

    IdType getRequestId() const;
    std::optional<IdType> getClientId() const;
    bool hasError() const;
    std::string const& getErrorMsg() const;
    Result const& getResult() const;

private:
    IdType request_;
    std::optional<IdType> client_;
    std::optional<std::string> error_;
    Result result_;
};

class SchedulerConfig
{
public:
    explicit SchedulerConfig(CapacitySchedulerPolicy policy = CapacitySchedulerPolicy::kSTATIC_BATCH)
        : policy(policy)
    {
    }

    CapacitySchedulerPolicy policy;
};

class KvCacheConfig
{
public:
    void setEnableBlockReuse(bool value)
    {
        blockReuse = value;
    }

    void setEnablePartialReuse(bool value)
    {
        partialReuse = value;
    }

    void setCopyOnPartialReuse(bool value)
    {
        copyOnPartialReuse = value;
    }

    void setMaxTokens(std::optional<SizeType32> value)
    {
        maxTokens = value;
    }

    void setFreeGpuMemoryFraction(FloatType value)
    {
        fraction = value;
    }

    void setHostCacheSize(std::size_t value)
    {
        hostCache = value;
    }

    void setOnboardBlocks(bool value)
    {
        onboard = value;
    }

    void setEventBufferMaxSize(std::size_t value)
    {
        events = value;
    }

    void setUseUvm(bool value)
    {
        uvm = value;
    }

    Settable<bool> blockReuse;
    Settable<bool> partialReuse;
    Settable<bool> copyOnPartialReuse;
    Settable<std::optional<SizeType32>> maxTokens;
    Settable<FloatType> fraction;
    Settable<std::size_t> hostCache;
    Settable<bool> onboard;
    Settable<std::size_t> events;
    Settable<bool> uvm;
};

class ParallelConfig
{
public:
    explicit ParallelConfig(CommunicationType type, CommunicationMode mode)
        : type(type)
        , mode(mode)
    {
    }

    CommunicationType type;
    CommunicationMode mode;
};

class ExtendedRuntimePerfKnobConfig
{
public:
    explicit ExtendedRuntimePerfKnobConfig(
        bool multiBlockMode, bool enableContextFMHAFP32Acc, bool cudaGraphMode, SizeType32 cudaGraphCacheSize)
        : multiBlockMode(multiBlockMode)
        , enableContextFMHAFP32Acc(enableContextFMHAFP32Acc)
        , cudaGraphMode(cudaGraphMode)
        , cudaGraphCacheSize(cudaGraphCacheSize)
    {
    }

    bool multiBlockMode;
    bool enableContextFMHAFP32Acc;
    bool cudaGraphMode;
    SizeType32 cudaGraphCacheSize;
};

class ExecutorConfig
{
public:
    void setMaxBeamWidth(SizeType32 value)
    {
        maxBeamWidth = value;
    }

    void setMaxBatchSize(SizeType32 value)
    {
        maxBatchSize = value;
    }

    void setMaxNumTokens(SizeType32 value)
    {
        maxNumTokens = value;
    }

    void setSchedulerConfig(SchedulerConfig const& value)
    {
        scheduler = value;
    }

    void setKvCacheConfig(KvCacheConfig const& value)
    {
        kvCache = value;
    }

    void setEnableChunkedContext(bool value)
    {
        chunkedContext = value;
    }

    void setNormalizeLogProbs(bool value)
    {
        normalizeLogProbs = value;
    }

    void setIterStatsMaxIterations(SizeType32 value)
    {
        iterStats = value;
    }

    void setRequestStatsMaxIterations(SizeType32 value)
    {
        requestStats = value;
    }

    void setBatchingType(BatchingType value)
    {
        batching = value;
    }

    void setParallelConfig(ParallelConfig const& value)
    {
        parallel = value;
    }

    void setUseGpuDirectStorage(bool const& value)
    {
        gpuDirectStorage = value;
    }

    void setGpuWeightsPercent(float const& value)
    {
        gpuWeights = value;
    }

    void setMaxQueueSize(std::optional<SizeType32> const& value)
    {
        maxQueue = value;
    }

    void setExtendedRuntimePerfKnobConfig(ExtendedRuntimePerfKnobConfig const& value)
    {
        knobs = value;
    }

    void setRecvPollPeriodMs(SizeType32 const& value)
    {
        recvPoll = value;
    }

    void setMaxSeqIdleMicroseconds(std::uint64_t value)
    {
        maxIdle = value;
    }

    void setAdditionalModelOutputs(std::vector<AdditionalModelOutput> const& value)
    {
        additional = value;
    }

    void setGatherGenerationLogits(bool value)
    {
        gatherGenerationLogits = value;
    }

    void setPromptTableOffloading(bool value)
    {
        promptTableOffloading = value;
    }

    void setEnableTrtOverlap(bool value)
    {
        trtOverlap = value;
    }

    void setFailFastOnAttentionWindowTooLarge(bool value)
    {
        failFast = value;
    }

    Settable<SizeType32> maxBeamWidth;
    Settable<SizeType32> maxBatchSize;
    Settable<SizeType32> maxNumTokens;
    Settable<SchedulerConfig> scheduler;
    Settable<KvCacheConfig> kvCache;
    Settable<bool> chunkedContext;
    Settable<bool> normalizeLogProbs;
    Settable<SizeType32> iterStats;
    Settable<SizeType32> requestStats;
    Settable<BatchingType> batching;
    Settable<ParallelConfig> parallel;
    Settable<bool> gpuDirectStorage;
    Settable<float> gpuWeights;
    Settable<std::optional<SizeType32>> maxQueue;
    Settable<ExtendedRuntimePerfKnobConfig> knobs;
    Settable<SizeType32> recvPoll;
    Settable<std::uint64_t> maxIdle;
    Settable<std::vector<AdditionalModelOutput>> additional;
    Settable<bool> gatherGenerationLogits;
    Settable<bool> promptTableOffloading;
    Settable<bool> trtOverlap;
    Settable<bool> failFast;
};

class Executor
{
public:
    Executor(std::filesystem::path const& modelPath, ModelType modelType, ExecutorConfig const& executorConfig);
    ~Executor();
    Executor(Executor const&) = delete;
    Executor& operator=(Executor const&) = delete;

    IdType enqueueRequest(Request const& request);
    std::vector<Response> awaitResponses(std::optional<std::chrono::milliseconds> const& timeout = std::nullopt);
    void cancelRequest(IdType requestId);
    void shutdown();
    std::deque<IterationStats> getLatestIterationStats();
    bool canEnqueueRequests() const;

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace tensorrt_llm::executor
