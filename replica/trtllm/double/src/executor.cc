// Test double of the executor: one thread that batches requests, with the properties of the vendor's, good and bad.
//
// A prompt's state after its token i is a function of the tokens up to i. The copied properties of the vendor's
// executor are listed in `docs/gpu.md`: ids are assigned without a lock; a cancelled request is searched among the
// active ones only; an error during computation affects the whole batch; a full queue throws; after shutdown every
// function throws.
#include "tensorrt_llm/executor/executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "responses.h"
#include "plan.h"

namespace tensorrt_llm::executor
{

using meridian::double_::misbehave;
using meridian::double_::Plan;

namespace
{

struct Taken
{
    IdType id;
    Request request;
};

} // namespace

class Executor::Impl
{
public:
    Impl(std::filesystem::path const& folder, ExecutorConfig const& config)
        : folder_(folder)
        , plan_(Plan::read(folder / "rank0.engine"))
        , max_batch_(config.maxBatchSize.get("maxBatchSize"))
        , max_tokens_(config.maxNumTokens.get("maxNumTokens"))
        , max_queue_(config.maxQueue.get("maxQueueSize"))
    {
        every_field_is_set(config);
        if (plan_.text_of("open", "") != "")
        {
            misbehave(plan_.text_of("open", ""));
        }
        thread_ = std::thread([this] { run(); });
    }

    ~Impl()
    {
        end();
    }

    IdType enqueue(Request const& request)
    {
        not_after_the_end();
        if (plan_.text_of("enqueue", "") != "" && has(request, plan_.number("culprit", -1)))
        {
            misbehave(plan_.text_of("enqueue", ""));
        }
        IdType const id = next_id();
        bool const respond_first = plan_.number("respond_first", 0) != 0 && !has(request, plan_.number("hold", -1));
        {
            std::unique_lock<std::mutex> lock(mutex_);
            if (max_queue_ && queue_.size() >= static_cast<std::size_t>(plan_.number("queue", *max_queue_)))
            {
                throw std::runtime_error("Maximum queue size of " + std::to_string(*max_queue_) + " has been reached");
            }
            queue_.push_back(Taken{id, request});
            changed_.notify_all();
            if (respond_first)
            {
                // The response is sent before the caller knows the id; the limit is for a caller that never polls.
                changed_.wait_for(lock, std::chrono::seconds(2), [&] { return handed_out_.count(id) != 0; });
            }
        }
        return id;
    }

    std::vector<Response> await(std::optional<std::chrono::milliseconds> const& timeout)
    {
        not_after_the_end();
        std::unique_lock<std::mutex> lock(mutex_);
        auto const ready = [&] { return !responses_.empty() || ended_; };
        ++waiting_;
        if (timeout)
        {
            changed_.wait_for(lock, *timeout, ready);
        }
        else
        {
            changed_.wait(lock, ready);
        }
        // A polling thread can be kept inside for longer than its timeout.
        changed_.wait_for(lock, std::chrono::milliseconds(plan_.number("linger_ms", 0)), [&] { return ended_; });
        --waiting_;
        if (!responses_.empty() && plan_.text_of("await", "") != "")
        {
            misbehave(plan_.text_of("await", ""));
        }
        std::vector<Response> polled;
        polled.swap(responses_);
        for (auto const& response : polled)
        {
            handed_out_.insert(response.getRequestId());
        }
        changed_.notify_all();
        return polled;
    }

    void cancel(IdType id)
    {
        not_after_the_end();
        std::lock_guard<std::mutex> const lock(mutex_);
        cancelled_.insert(id);
        changed_.notify_all();
    }

    // The vendor's executor throws in threads that wait for responses during shutdown; here shutdown itself throws.
    void shutdown()
    {
        {
            std::lock_guard<std::mutex> const lock(mutex_);
            if (waiting_ != 0)
            {
                throw std::logic_error("a thread still waits for responses");
            }
        }
        end();
    }

    void end()
    {
        {
            std::lock_guard<std::mutex> const lock(mutex_);
            ended_ = true;
            changed_.notify_all();
        }
        if (thread_.joinable())
        {
            thread_.join();
        }
    }

    std::deque<IterationStats> statistics()
    {
        not_after_the_end();
        std::lock_guard<std::mutex> const lock(mutex_);
        std::deque<IterationStats> statistics;
        statistics.swap(statistics_);
        return statistics;
    }

    void not_after_the_end()
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        if (ended_)
        {
            throw std::runtime_error("Shutdown called");
        }
    }

private:
    static void every_field_is_set(ExecutorConfig const& config)
    {
        (void) config.maxBeamWidth.get("maxBeamWidth");
        (void) config.scheduler.get("schedulerConfig");
        KvCacheConfig const& cache = config.kvCache.get("kvCacheConfig");
        (void) cache.blockReuse.get("enableBlockReuse");
        (void) cache.partialReuse.get("enablePartialReuse");
        (void) cache.copyOnPartialReuse.get("copyOnPartialReuse");
        (void) cache.maxTokens.get("maxTokens");
        (void) cache.fraction.get("freeGpuMemoryFraction");
        (void) cache.hostCache.get("hostCacheSize");
        (void) cache.onboard.get("onboardBlocks");
        (void) cache.events.get("eventBufferMaxSize");
        (void) cache.uvm.get("useUvm");
        (void) config.chunkedContext.get("enableChunkedContext");
        (void) config.normalizeLogProbs.get("normalizeLogProbs");
        (void) config.iterStats.get("iterStatsMaxIterations");
        (void) config.requestStats.get("requestStatsMaxIterations");
        (void) config.batching.get("batchingType");
        (void) config.parallel.get("parallelConfig");
        (void) config.gpuDirectStorage.get("useGpuDirectStorage");
        (void) config.gpuWeights.get("gpuWeightsPercent");
        (void) config.knobs.get("extendedRuntimePerfKnobConfig");
        (void) config.recvPoll.get("recvPollPeriodMs");
        (void) config.maxIdle.get("maxSeqIdleMicroseconds");
        (void) config.additional.get("additionalModelOutputs");
        (void) config.gatherGenerationLogits.get("gatherGenerationLogits");
        (void) config.promptTableOffloading.get("promptTableOffloading");
        (void) config.trtOverlap.get("enableTrtOverlap");
        (void) config.failFast.get("failFastOnAttentionWindowTooLarge");
    }

    // The vendor's counter is a plain number that is read before any lock is taken. Here a thread that finds another
    // one reports it, after having given it time to arrive.
    IdType next_id()
    {
        if (counting_.exchange(true))
        {
            throw std::logic_error("two threads enqueue at once and would share an id");
        }
        for (int turn = 0; turn < 20; ++turn)
        {
            std::this_thread::yield();
        }
        IdType const id = ++last_id_;
        counting_.store(false);
        return id;
    }

    static bool has(Request const& request, std::int64_t token)
    {
        return std::find(request.tokens.begin(), request.tokens.end(), token) != request.tokens.end();
    }

    void respond(Response response)
    {
        responses_.push_back(std::move(response));
        changed_.notify_all();
    }

    void run()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!ended_)
        {
            changed_.wait(lock, [&] { return ended_ || !queue_.empty() || !active_.empty(); });
            if (ended_)
            {
                return;
            }
            auto const began = std::chrono::steady_clock::now();
            fetch();
            std::size_t const before = active_.size();
            give_up_cancelled();
            auto const delay = std::chrono::milliseconds(plan_.number("delay_ms", 0));
            if (delay.count() > 0)
            {
                changed_.wait_for(lock, delay, [&] { return ended_; });
            }
            forward();
            std::chrono::duration<double, std::milli> const took = std::chrono::steady_clock::now() - began;
            statistics_.push_back(IterationStats{++iteration_, took.count(), static_cast<SizeType32>(active_.size()),
                static_cast<SizeType32>(queue_.size()), static_cast<SizeType32>(before - active_.size()), 1 << 20});
            if (statistics_.size() > 1000)
            {
                statistics_.pop_front();
            }
            if (!active_.empty())
            {
                // A request is held; check again soon for cancellations and for the release.
                changed_.wait_for(lock, std::chrono::milliseconds(1));
            }
        }
    }

    // Fills the batch from the queue.
    void fetch()
    {
        std::size_t tokens = 0;
        for (auto const& taken : active_)
        {
            tokens += taken.request.tokens.size();
        }
        while (!queue_.empty() && active_.size() < static_cast<std::size_t>(max_batch_))
        {
            Taken next = queue_.front();
            std::int64_t const vocabulary = plan_.number("vocabulary", 32);
            auto const unknown = [&](TokenIdType token) { return token < 0 || token >= vocabulary; };
            if (next.request.tokens.size() > static_cast<std::size_t>(plan_.number("longest", 64))
                || std::any_of(next.request.tokens.begin(), next.request.tokens.end(), unknown))
            {
                queue_.pop_front();
                respond(Response(next.id, "Encountered an error when fetching new request: the prompt is not acceptable",
                    next.request.clientId.get("clientId")));
                continue;
            }
            if (tokens + next.request.tokens.size() > static_cast<std::size_t>(max_tokens_))
            {
                return;
            }
            tokens += next.request.tokens.size();
            queue_.pop_front();
            active_.push_back(std::move(next));
        }
    }

    void give_up_cancelled()
    {
        auto const gone = [&](Taken const& taken)
        {
            if (cancelled_.erase(taken.id) == 0)
            {
                return false;
            }
            Result result;
            result.finishReasons = {FinishReason::kCANCELLED};
            respond(Response(taken.id, std::move(result), taken.request.clientId.get("clientId")));
            return true;
        };
        active_.erase(std::remove_if(active_.begin(), active_.end(), gone), active_.end());
    }

    void forward()
    {
        std::int64_t const poison = plan_.number("poison", -1);
        std::int64_t const hold = plan_.number("hold", -1);
        bool const released = hold >= 0 && std::filesystem::exists(folder_ / "release");
        bool const poisoned = std::any_of(
            active_.begin(), active_.end(), [&](Taken const& taken) { return has(taken.request, poison); });
        auto const done = [&](Taken const& taken)
        {
            auto const client = taken.request.clientId.get("clientId");
            if (poisoned)
            {
                bool const bytes = plan_.text_of("message", "") == "bytes";
                respond(Response(taken.id, bytes ? "kernel \xff\xfe failed" : "a kernel failed", client));
                return true;
            }
            if (hold >= 0 && !released && has(taken.request, hold))
            {
                return false;
            }
            respond(Response(taken.id, result_of(taken.request, plan_), client));
            return true;
        };
        active_.erase(std::remove_if(active_.begin(), active_.end(), done), active_.end());
    }

    std::filesystem::path const folder_;
    Plan const plan_;
    SizeType32 const max_batch_;
    SizeType32 const max_tokens_;
    std::optional<SizeType32> const max_queue_;
    std::atomic<bool> counting_{false};
    IdType last_id_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Taken> queue_;
    std::vector<Taken> active_;
    std::set<IdType> cancelled_;
    std::set<IdType> handed_out_;
    std::vector<Response> responses_;
    std::deque<IterationStats> statistics_;
    IterationType iteration_{0};
    int waiting_{0};
    bool ended_{false};
    std::thread thread_;
};

Executor::Executor(std::filesystem::path const& modelPath, ModelType modelType, ExecutorConfig const& executorConfig)
    : impl_(std::make_unique<Impl>(modelPath, executorConfig))
{
    if (modelType != ModelType::kDECODER_ONLY)
    {
        throw std::runtime_error("the executor runs decoders");
    }
}

Executor::~Executor() = default;

IdType Executor::enqueueRequest(Request const& request)
{
    return impl_->enqueue(request);
}

std::vector<Response> Executor::awaitResponses(std::optional<std::chrono::milliseconds> const& timeout)
{
    return impl_->await(timeout);
}

void Executor::cancelRequest(IdType requestId)
{
    impl_->cancel(requestId);
}

void Executor::shutdown()
{
    impl_->shutdown();
}

std::deque<IterationStats> Executor::getLatestIterationStats()
{
    return impl_->statistics();
}

bool Executor::canEnqueueRequests() const
{
    return true;
}

} // namespace tensorrt_llm::executor
