// The vendor's plugins and its log, once for the process.
#pragma once

#include <string>

#include <NvInferRuntime.h>

namespace meridian::trtllm
{

// Keeps the last complaint: TensorRT's functions say only that they failed, and the reason goes to the log.
class Log : public nvinfer1::ILogger
{
public:
    void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override;

    // `what`, and the last complaint since this was asked.
    std::string complaint(std::string what) noexcept;

    static Log& instance() noexcept;
};

// Throws if the plugins cannot be registered.
void register_plugins();

} // namespace meridian::trtllm
