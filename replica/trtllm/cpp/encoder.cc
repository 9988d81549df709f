// Encoders: BERT, RoBERTa and XLM-RoBERTa on plain TensorRT, with packed input.
//
// TensorRT-LLM builds these engines and has no executor for them: its `kENCODER_ONLY` is unused. They are ordinary
// TensorRT engines with one plugin for attention, whose inputs are the concatenated tokens of all sequences and their
// lengths. Positions and token types are inputs like the tokens, provided by the caller.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include "guard.h"
#include "plugins.h"
#include "shim.h"
#include "trtllm/src/bridge.rs.h"

namespace meridian::trtllm
{

namespace
{

void check(cudaError_t code, char const* what)
{
    if (code != cudaSuccess)
    {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
    }
}

void check(bool done, std::string what)
{
    if (!done)
    {
        throw std::runtime_error(Log::instance().complaint(std::move(what)));
    }
}

// Device memory. It only grows, so a batch allocates nothing once the largest has been computed.
class DeviceBuffer
{
public:
    DeviceBuffer() = default;
    DeviceBuffer(DeviceBuffer const&) = delete;
    DeviceBuffer& operator=(DeviceBuffer const&) = delete;

    ~DeviceBuffer()
    {
        cudaFree(data_);
    }

    void* sized(std::size_t bytes)
    {
        if (bytes > bytes_)
        {
            void* larger = nullptr;
            check(cudaMalloc(&larger, bytes), "cannot allocate GPU memory");
            cudaFree(std::exchange(data_, larger));
            bytes_ = bytes;
        }
        return data_;
    }

private:
    void* data_{nullptr};
    std::size_t bytes_{0};
};

class Stream
{
public:
    void open()
    {
        // A thread that waits for the GPU sleeps; by default it would spin.
        cudaError_t const code = cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync);
        // A process that has used the GPU before keeps its flags.
        if (code != cudaErrorSetOnActiveProcess)
        {
            check(code, "the GPU");
        }
        check(cudaStreamCreate(&stream_), "cannot create a CUDA stream");
    }

    ~Stream()
    {
        if (stream_ != nullptr)
        {
            cudaStreamDestroy(stream_);
        }
    }

    cudaStream_t get() const
    {
        return stream_;
    }

private:
    cudaStream_t stream_{nullptr};
};

std::vector<char> read_file(std::string const& path)
{
    std::ifstream file(path, std::ios::binary);
    if (!file)
    {
        throw std::runtime_error("the engine " + path + " cannot be read");
    }
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::uint8_t format_of(nvinfer1::DataType type) noexcept
{
    switch (type)
    {
    case nvinfer1::DataType::kFLOAT: return 0;
    case nvinfer1::DataType::kHALF: return 1;
    case nvinfer1::DataType::kBF16: return 2;
    default: return 255;
    }
}

std::size_t width_of(std::uint8_t format)
{
    if (format == 255)
    {
        throw std::runtime_error("the engine's output is neither fp32 nor fp16 nor bf16");
    }
    return format == 0 ? 4 : 2;
}

nvinfer1::Dims line(std::size_t length)
{
    nvinfer1::Dims dims{};
    dims.nbDims = 1;
    dims.d[0] = static_cast<decltype(dims.d[0] + 0)>(length);
    return dims;
}

constexpr char const* kTokens = "input_ids";
constexpr char const* kTypes = "token_type_ids";
constexpr char const* kPositions = "position_ids";
constexpr char const* kLengths = "input_lengths";
// Only its shape is used: the length of the longest sequence.
constexpr char const* kLongest = "max_input_length";

} // namespace

class EncoderRows::Impl
{
public:
    std::string failure;
    std::vector<std::uint8_t> data;
    std::uint8_t format{255};
    std::size_t rows{0};
    std::size_t width{0};
};

EncoderRows::EncoderRows(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl))
{
}

EncoderRows::~EncoderRows() = default;

rust::Slice<std::uint8_t const> EncoderRows::failure() const noexcept
{
    return lent(impl_->failure);
}

std::uint8_t EncoderRows::format() const noexcept
{
    return impl_->format;
}

std::size_t EncoderRows::rows() const noexcept
{
    return impl_->rows;
}

std::size_t EncoderRows::width() const noexcept
{
    return impl_->width;
}

rust::Slice<std::uint8_t const> EncoderRows::data() const noexcept
{
    return {impl_->data.data(), impl_->data.size()};
}

class Encoder::Impl
{
public:
    void open(std::string const& path)
    {
        register_plugins();
        std::vector<char> const blob = read_file(path);
        stream_.open();
        runtime_.reset(nvinfer1::createInferRuntime(Log::instance()));
        check(runtime_ != nullptr, "cannot create a TensorRT runtime");
        engine_.reset(runtime_->deserializeCudaEngine(blob.data(), blob.size()));
        check(engine_ != nullptr, "TensorRT cannot deserialize the engine " + path);
        context_.reset(engine_->createExecutionContext());
        check(context_ != nullptr, "not enough GPU memory to run the engine " + path);
        for (int at = 0; at < engine_->getNbIOTensors(); ++at)
        {
            std::string const name = engine_->getIOTensorName(at);
            if (engine_->getTensorIOMode(name.c_str()) == nvinfer1::TensorIOMode::kOUTPUT)
            {
                outputs_.push_back(name);
            }
            else
            {
                inputs_.push_back(Input{name, std::make_unique<DeviceBuffer>()});
            }
        }
        if (outputs_.size() != 1)
        {
            throw std::runtime_error(
                "the engine has " + std::to_string(outputs_.size()) + " outputs; build it with `hidden_states` or `logits` alone");
        }
        format_ = format_of(engine_->getTensorDataType(outputs_[0].c_str()));
        (void) width_of(format_);
    }

    std::size_t largest(char const* name) const
    {
        auto const dims = engine_->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kMAX);
        return dims.nbDims == 1 && dims.d[0] > 0 ? static_cast<std::size_t>(dims.d[0]) : 0;
    }

    EncoderLimits limits() const
    {
        return EncoderLimits{largest(kTokens), largest(kLengths), largest(kLongest)};
    }

    void run(EncoderInput const& input, EncoderRows::Impl& rows)
    {
        for (auto& bound : inputs_)
        {
            bind(bound, input);
        }
        auto const shape = context_->getTensorShape(outputs_[0].c_str());
        if (shape.nbDims != 2 || shape.d[0] < 0 || shape.d[1] < 1)
        {
            check(false, "the engine does not report the size of its output");
        }
        rows.format = format_;
        rows.rows = static_cast<std::size_t>(shape.d[0]);
        rows.width = static_cast<std::size_t>(shape.d[1]);
        rows.data.resize(rows.rows * rows.width * width_of(format_));
        void* const device = output_.sized(rows.data.size());
        check(context_->setTensorAddress(outputs_[0].c_str(), device), "cannot set the address of the output");
        check(context_->enqueueV3(stream_.get()), "cannot enqueue the engine");
        check(cudaMemcpyAsync(rows.data.data(), device, rows.data.size(), cudaMemcpyDeviceToHost, stream_.get()),
            "cannot copy rows from the GPU");
        check(cudaStreamSynchronize(stream_.get()), "the engine failed");
    }

    std::string failure;

private:
    struct Input
    {
        std::string name;
        std::unique_ptr<DeviceBuffer> device;
    };

    void bind(Input& bound, EncoderInput const& input)
    {
        rust::Slice<std::int32_t const> values = input.tokens;
        if (bound.name == kTypes)
        {
            values = input.types;
        }
        else if (bound.name == kPositions)
        {
            values = input.positions;
        }
        else if (bound.name == kLengths)
        {
            values = input.lengths;
        }
        else if (bound.name == kLongest)
        {
            longest_.assign(input.longest, 0);
            values = {longest_.data(), longest_.size()};
        }
        else if (bound.name != kTokens)
        {
            throw std::runtime_error("the engine has an input `" + bound.name + "`, which is not supported");
        }
        char const* const name = bound.name.c_str();
        std::size_t const bytes = values.size() * sizeof(std::int32_t);
        void* const device = bound.device->sized(bytes);
        check(context_->setInputShape(name, line(values.size())), "the batch does not match the shape of the engine's input `" + bound.name + "`");
        check(context_->setTensorAddress(name, device), "`" + bound.name + "`: cannot set its address");
        check(cudaMemcpyAsync(device, values.data(), bytes, cudaMemcpyHostToDevice, stream_.get()), "cannot copy tokens to the GPU");
    }

    // In the order of dependencies; destroyed in reverse.
    Stream stream_;
    std::unique_ptr<nvinfer1::IRuntime> runtime_;
    std::unique_ptr<nvinfer1::ICudaEngine> engine_;
    std::unique_ptr<nvinfer1::IExecutionContext> context_;
    std::vector<Input> inputs_;
    std::vector<std::string> outputs_;
    DeviceBuffer output_;
    std::vector<std::int32_t> longest_;
    std::uint8_t format_{255};
};

Encoder::Encoder(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl))
{
}

Encoder::~Encoder() = default;

rust::Slice<std::uint8_t const> Encoder::failure() const noexcept
{
    return lent(impl_->failure);
}

EncoderLimits Encoder::limits() const noexcept
{
    return impl_->limits();
}

std::unique_ptr<EncoderRows> Encoder::run(EncoderInput const& input) const noexcept
{
    auto rows = std::make_unique<EncoderRows::Impl>();
    rows->failure = guarded([&] { impl_->run(input, *rows); });
    return std::make_unique<EncoderRows>(std::move(rows));
}

std::unique_ptr<Encoder> open_encoder(rust::Str path) noexcept
{
    auto encoder = std::make_unique<Encoder::Impl>();
    encoder->failure = guarded([&] { encoder->open(std::string(path.data(), path.size())); });
    return std::make_unique<Encoder>(std::move(encoder));
}

std::int32_t tensorrt_version() noexcept
{
    return getInferLibVersion();
}

} // namespace meridian::trtllm
