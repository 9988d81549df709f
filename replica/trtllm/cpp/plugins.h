// The vendor's plugins and logger, once for the process.
#pragma once

#include <string>

#include <NvInferRuntime.h>

namespace meridian::trtllm
{

// Keeps the last error message: TensorRT's functions report only failure, and the reason is logged.
class Log : public nvinfer1::ILogger
{
public:
    void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override;

    // Returns `what`, with the last error message since the previous call.
    std::string complaint(std::string what) noexcept;

    static Log& instance() noexcept;
};

// Throws if the plugins cannot be registered.
void register_plugins();

} // namespace meridian::trtllm
