#include "plugins.h"

#include <mutex>
#include <stdexcept>
#include <utility>

#include "tensorrt_llm/plugins/api/tllmPlugin.h"

namespace meridian::trtllm
{

namespace
{
std::mutex last_mutex;
std::string last_complaint;
} // namespace

void Log::log(Severity severity, nvinfer1::AsciiChar const* message) noexcept
{
    if (severity <= Severity::kERROR && message != nullptr)
    {
        std::lock_guard<std::mutex> const lock(last_mutex);
        last_complaint = message;
    }
}

std::string Log::complaint(std::string what) noexcept
{
    std::lock_guard<std::mutex> const lock(last_mutex);
    std::string const why = std::exchange(last_complaint, {});
    return why.empty() ? what : what + ": " + why;
}

Log& Log::instance() noexcept
{
    // Never destroyed: the runtime may still write to it while the process exits.
    static Log* const log = new Log;
    return *log;
}

void register_plugins()
{
    static std::once_flag once;
    std::call_once(once,
        []
        {
            auto& log = Log::instance();
            if (!initTrtLlmPlugins(&log, tensorrt_llm::plugins::api::kDefaultNamespace))
            {
                throw std::runtime_error(log.complaint("TensorRT-LLM's plugins could not be registered"));
            }
        });
}

} // namespace meridian::trtllm
