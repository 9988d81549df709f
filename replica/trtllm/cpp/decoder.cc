// Decoders: one prompt in, one generated token, and the requested tensor of the forward pass.
//
// Properties of the executor on which this file relies:
// * Two threads that enqueue at once can get the same id, so enqueueing has a mutex.
// * After shutdown every function throws, and a thread that waits for responses then may get an exception from a map.
//   So the polling thread must have ended before; the Rust side ensures that.
// * Parameters were inserted into the middle of constructors between releases, so objects are constructed with stable
//   parameters only and then set, field by field. All fields are set, so that a changed default has no effect.
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tensorrt_llm/executor/executor.h"
#include "tensorrt_llm/executor/version.h"

#include "response_batch.h"
#include "guard.h"
#include "plugins.h"
#include "shim.h"
#include "trtllm/src/bridge.rs.h"

namespace meridian::trtllm
{

// The Rust side or this file relies on these numbers of the vendor.
static_assert(static_cast<int>(tle::FinishReason::kTIMED_OUT) == 4);
static_assert(static_cast<int>(tle::FinishReason::kCANCELLED) == 5);
static_assert(static_cast<int>(tle::ModelType::kDECODER_ONLY) == 0);

namespace
{

std::string text(rust::String const& given)
{
    return std::string(given.data(), given.size());
}

// A decoder must generate at least one token; it is not used.
constexpr tle::SizeType32 kOneToken = 1;

} // namespace

class Decoder::Impl
{
public:
    void open(DecoderSettings const& settings)
    {
        register_plugins();
        wanted_ = Wanted{settings.output, text(settings.tensor)};
        executor_.emplace(std::filesystem::path(text(settings.directory)), tle::ModelType::kDECODER_ONLY, config(settings));
        if (!executor_->canEnqueueRequests())
        {
            throw std::runtime_error("this process is not the leader of its MPI world and cannot accept requests");
        }
    }

    std::uint64_t submit(std::uint64_t tag, rust::Slice<std::int32_t const> tokens)
    {
        tle::Request request(tle::VecTokens(tokens.begin(), tokens.end()), kOneToken);
        request.setStreaming(false);
        request.setOutputConfig(output_config());
        request.setClientId(tag);
        request.setPriority(tle::Request::kDefaultPriority);
        request.setReturnAllGeneratedTokens(false);
        request.setRequestType(tle::RequestType::REQUEST_TYPE_CONTEXT_AND_GENERATION);
        std::lock_guard<std::mutex> const one_at_a_time(enqueue_);
        return executor().enqueueRequest(request);
    }

    std::vector<SequenceResponse> poll(std::uint32_t timeout_ms)
    {
        auto const responses = executor().awaitResponses(std::chrono::milliseconds(timeout_ms));
        std::vector<SequenceResponse> batch;
        batch.reserve(responses.size());
        for (auto const& response : responses)
        {
            batch.push_back(read(response, wanted_));
        }
        return batch;
    }

    void shutdown()
    {
        // A concurrent enqueue finishes first; later ones fail because the executor is closed.
        std::lock_guard<std::mutex> const one_at_a_time(enqueue_);
        executor().shutdown();
    }

    tle::Executor& executor()
    {
        return executor_.value();
    }

    std::string failure;

private:
    bool tapped() const
    {
        return wanted_.output == DecoderOutput::Pooled || wanted_.output == DecoderOutput::States;
    }

    std::vector<tle::AdditionalModelOutput> taps() const
    {
        if (!tapped())
        {
            return {};
        }
        return {tle::AdditionalModelOutput(wanted_.tensor, wanted_.output == DecoderOutput::States)};
    }

    tle::OutputConfig output_config() const
    {
        tle::OutputConfig config;
        config.returnLogProbs = false;
        config.returnContextLogits = wanted_.output == DecoderOutput::ContextLogits;
        config.returnGenerationLogits = wanted_.output == DecoderOutput::GenerationLogits;
        config.excludeInputFromOutput = true;
        config.returnEncoderOutput = false;
        config.returnPerfMetrics = false;
        if (tapped())
        {
            config.additionalModelOutputs = taps();
        }
        return config;
    }

    // The optional object fields (adapters, decoding, debugging, speculation, guidance, cache transfer) are left empty,
    // as is right for embedding models.
    tle::ExecutorConfig config(DecoderSettings const& settings) const
    {
        tle::KvCacheConfig cache;
        // Reused cache blocks are not computed again, and their states would be missing from the output.
        cache.setEnableBlockReuse(false);
        cache.setEnablePartialReuse(false);
        cache.setCopyOnPartialReuse(false);
        cache.setMaxTokens(static_cast<tle::SizeType32>(settings.cache_tokens));
        cache.setFreeGpuMemoryFraction(settings.cache_fraction);
        cache.setHostCacheSize(0);
        cache.setOnboardBlocks(false);
        cache.setEventBufferMaxSize(0);
        cache.setUseUvm(false);

        tle::ExecutorConfig config;
        config.setMaxBeamWidth(1);
        config.setMaxBatchSize(static_cast<tle::SizeType32>(settings.max_batch_size));
        config.setMaxNumTokens(static_cast<tle::SizeType32>(settings.max_batch_tokens));
        config.setSchedulerConfig(tle::SchedulerConfig(tle::CapacitySchedulerPolicy::kGUARANTEED_NO_EVICT));
        config.setKvCacheConfig(cache);
        // With a chunked context, only the last chunk contains the last state.
        config.setEnableChunkedContext(false);
        config.setNormalizeLogProbs(false);
        config.setIterStatsMaxIterations(1000);
        config.setRequestStatsMaxIterations(0);
        config.setBatchingType(tle::BatchingType::kINFLIGHT);
        config.setParallelConfig(tle::ParallelConfig(tle::CommunicationType::kMPI, tle::CommunicationMode::kLEADER));
        config.setUseGpuDirectStorage(false);
        config.setGpuWeightsPercent(1.0F);
        config.setMaxQueueSize(static_cast<tle::SizeType32>(settings.max_queue));
        config.setExtendedRuntimePerfKnobConfig(tle::ExtendedRuntimePerfKnobConfig(true, false, false, 0));
        // 0 would be a busy loop.
        config.setRecvPollPeriodMs(1);
        config.setMaxSeqIdleMicroseconds(180'000'000);
        config.setAdditionalModelOutputs(taps());
        config.setGatherGenerationLogits(wanted_.output == DecoderOutput::GenerationLogits);
        config.setPromptTableOffloading(false);
        config.setEnableTrtOverlap(false);
        config.setFailFastOnAttentionWindowTooLarge(true);
        return config;
    }

    Wanted wanted_;
    std::optional<tle::Executor> executor_;
    std::mutex enqueue_;
};

Decoder::Decoder(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl))
{
}

Decoder::~Decoder() = default;

rust::Slice<std::uint8_t const> Decoder::failure() const noexcept
{
    return lent(impl_->failure);
}

Submitted Decoder::submit(std::uint64_t tag, rust::Slice<std::int32_t const> tokens) const noexcept
{
    std::uint64_t id = 0;
    std::string const failure = guarded([&] { id = impl_->submit(tag, tokens); });
    return Submitted{id, bytes(failure)};
}

Outcome Decoder::cancel(std::uint64_t id) const noexcept
{
    return Outcome{bytes(guarded([&] { impl_->executor().cancelRequest(id); }))};
}

std::unique_ptr<ResponseBatch> Decoder::poll(std::uint32_t timeout_ms) const noexcept
{
    auto batch = std::make_unique<ResponseBatch::Impl>();
    batch->failure = guarded([&] { batch->responses = impl_->poll(timeout_ms); });
    return std::make_unique<ResponseBatch>(std::move(batch));
}

Statistics Decoder::statistics() const noexcept
{
    Statistics statistics{};
    std::string const failure = guarded(
        [&]
        {
            for (auto const& iteration : impl_->executor().getLatestIterationStats())
            {
                statistics.iterations += 1;
                statistics.busy_ms += iteration.iterLatencyMS;
                statistics.completed += static_cast<std::uint64_t>(iteration.numCompletedRequests);
                statistics.active = static_cast<std::uint64_t>(iteration.numActiveRequests);
                statistics.queued = static_cast<std::uint64_t>(iteration.numQueuedRequests);
                statistics.gpu_bytes = static_cast<std::uint64_t>(iteration.gpuMemUsage);
            }
        });
    statistics.failure = bytes(failure);
    return statistics;
}

Outcome Decoder::shutdown() const noexcept
{
    return Outcome{bytes(guarded([&] { impl_->shutdown(); }))};
}

std::unique_ptr<Decoder> open_decoder(DecoderSettings const& settings) noexcept
{
    auto decoder = std::make_unique<Decoder::Impl>();
    decoder->failure = guarded([&] { decoder->open(settings); });
    return std::make_unique<Decoder>(std::move(decoder));
}

rust::String executor_version() noexcept
{
    return rust::String::lossy(tle::kTensorRtLlmVersion);
}

} // namespace meridian::trtllm
