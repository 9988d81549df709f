// Test double of the executor's types, with the vendor's numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tensorrt_llm::executor
{

using SizeType32 = std::int32_t;
using FloatType = float;
using TokenIdType = std::int32_t;
using VecTokens = std::vector<TokenIdType>;
using BeamTokens = std::vector<VecTokens>;
using IdType = std::uint64_t;
using IterationType = std::uint64_t;
using PriorityType = float;

enum class DataType
{
    kBOOL,
    kUINT8,
    kINT8,
    kINT32,
    kINT64,
    kBF16,
    kFP8,
    kFP16,
    kFP32,
    kUNKNOWN,
};

enum class ModelType
{
    kDECODER_ONLY = 0,
    kENCODER_ONLY = 1,
    kENCODER_DECODER = 2,
};

enum class BatchingType
{
    kSTATIC = 0,
    kINFLIGHT = 1,
};

enum class CapacitySchedulerPolicy
{
    kMAX_UTILIZATION = 0,
    kGUARANTEED_NO_EVICT = 1,
    kSTATIC_BATCH = 2,
};

enum class ContextChunkingPolicy
{
    kFIRST_COME_FIRST_SERVED = 0,
    kEQUAL_PROGRESS = 1,
};

enum class CommunicationType
{
    kMPI = 0,
};

enum class CommunicationMode
{
    kLEADER,
    kORCHESTRATOR,
};

enum class RequestType
{
    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0,
    REQUEST_TYPE_CONTEXT_ONLY = 1,
    REQUEST_TYPE_GENERATION_ONLY = 2,
};

enum class FinishReason
{
    kNOT_FINISHED = 0,
    kEND_ID = 1,
    kSTOP_WORDS = 2,
    kLENGTH = 3,
    kTIMED_OUT = 4,
    kCANCELLED = 5,
};

struct IterationStats
{
    IterationType iter;
    double iterLatencyMS;
    SizeType32 numActiveRequests;
    SizeType32 numQueuedRequests;
    SizeType32 numCompletedRequests;
    std::size_t gpuMemUsage;
};

} // namespace tensorrt_llm::executor
