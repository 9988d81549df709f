// Test double of TensorRT and the CUDA runtime: packed encoders that compute on the CPU.
//
// A token's state is a function of its id, type and position and of the sum of its sequence's tokens, so that a row
// shows whether any of the inputs was wrong and whether another sequence's tokens affected it.
#include <NvInferRuntime.h>
#include <tensorrt_llm/plugins/api/tllmPlugin.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "plan.h"

namespace
{

using meridian::double_::mixed;
using meridian::double_::Plan;
using meridian::double_::write;

std::atomic<nvinfer1::ILogger*> log_of_all{nullptr};

class Context : public nvinfer1::IExecutionContext
{
public:
    explicit Context(Plan const& plan)
        : plan_(plan)
    {
    }

    bool setInputShape(char const* name, nvinfer1::Dims const& dims) noexcept override
    {
        bool const fits = dims.nbDims == 1 && dims.d[0] >= 1 && dims.d[0] <= plan_.number(name, 1 << 20);
        if (!fits)
        {
            complain("the shape is outside of the profile");
        }
        lengths_[name] = dims.d[0];
        return fits;
    }

    bool setTensorAddress(char const* name, void* data) noexcept override
    {
        addresses_[name] = data;
        return data != nullptr;
    }

    nvinfer1::Dims getTensorShape(char const*) const noexcept override
    {
        nvinfer1::Dims dims{};
        dims.nbDims = 2;
        bool const labels = plan_.text_of("output", "hidden_states") == "logits";
        dims.d[0] = lengths_.at(labels ? "input_lengths" : "input_ids");
        dims.d[1] = labels ? plan_.number("labels", 2) : plan_.number("hidden", 8);
        return dims;
    }

    bool enqueueV3(cudaStream_t) noexcept override
    {
        while (plan_.text_of("wait_for", "") != "" && !std::filesystem::exists(plan_.text_of("wait_for", "")))
        {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        auto const* const ids = input("input_ids");
        auto const* const types = input("token_type_ids");
        auto const* const positions = input("position_ids");
        auto const* const lengths = input("input_lengths");
        std::string const output = plan_.text_of("output", "hidden_states");
        std::int64_t const poison = plan_.number("poison", -1);
        std::vector<std::uint8_t> bytes;
        std::int64_t begin = 0;
        for (std::int64_t sequence = 0; sequence < lengths_["input_lengths"]; ++sequence)
        {
            std::int64_t const end = begin + lengths[sequence];
            std::uint64_t sum = 0;
            for (std::int64_t at = begin; at < end; ++at)
            {
                if (ids[at] == poison)
                {
                    complain("an illegal memory access was encountered");
                    return false;
                }
                sum += state(ids[at], types ? types[at] : 0, positions ? positions[at] : 0);
            }
            for (std::int64_t at = begin; output == "hidden_states" && at < end; ++at)
            {
                fill(bytes, sum + state(ids[at], types ? types[at] : 0, positions ? positions[at] : 0),
                    plan_.number("hidden", 8));
            }
            if (output == "logits")
            {
                fill(bytes, sum, plan_.number("labels", 2));
            }
            begin = end;
        }
        std::memcpy(addresses_.at(output), bytes.data(), bytes.size());
        return true;
    }

private:
    static std::uint64_t state(std::int32_t id, std::int32_t type, std::int32_t position)
    {
        return static_cast<std::uint64_t>(id) * 13 + static_cast<std::uint64_t>(type) * 101
            + static_cast<std::uint64_t>(position) * 17;
    }

    void fill(std::vector<std::uint8_t>& bytes, std::uint64_t state, std::int64_t width) const
    {
        for (std::int64_t column = 0; column < width; ++column)
        {
            write(bytes, plan_.format(), mixed(state, static_cast<std::uint64_t>(column)));
        }
    }

    std::int32_t const* input(char const* name) const
    {
        auto const found = addresses_.find(name);
        return found == addresses_.end() ? nullptr : static_cast<std::int32_t const*>(found->second);
    }

    static void complain(char const* what) noexcept
    {
        if (nvinfer1::ILogger* const log = log_of_all)
        {
            log->log(nvinfer1::ILogger::Severity::kERROR, what);
        }
    }

    Plan plan_;
    std::map<std::string, std::int64_t> lengths_;
    std::map<std::string, void*> addresses_;
};

class Engine : public nvinfer1::ICudaEngine
{
public:
    explicit Engine(Plan plan)
        : plan_(std::move(plan))
        , names_{"input_ids", "position_ids", "input_lengths", "max_input_length", plan_.text_of("output", "hidden_states")}
    {
        // Like those of RoBERTa, some engines have no input for types.
        if (plan_.number("types", 1) != 0)
        {
            names_.insert(names_.begin() + 1, "token_type_ids");
        }
        if (plan_.text_of("extra_input", "") != "")
        {
            names_.insert(names_.begin(), plan_.text_of("extra_input", ""));
        }
    }

    nvinfer1::IExecutionContext* createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy) noexcept override
    {
        return new Context(plan_);
    }

    std::int32_t getNbIOTensors() const noexcept override
    {
        return static_cast<std::int32_t>(names_.size());
    }

    char const* getIOTensorName(std::int32_t index) const noexcept override
    {
        return names_[static_cast<std::size_t>(index)].c_str();
    }

    nvinfer1::TensorIOMode getTensorIOMode(char const* name) const noexcept override
    {
        return name == names_.back() ? nvinfer1::TensorIOMode::kOUTPUT : nvinfer1::TensorIOMode::kINPUT;
    }

    nvinfer1::DataType getTensorDataType(char const*) const noexcept override
    {
        int const format = plan_.format();
        return format == 2 ? nvinfer1::DataType::kBF16
            : format == 1  ? nvinfer1::DataType::kHALF
                           : nvinfer1::DataType::kFLOAT;
    }

    nvinfer1::Dims getProfileShape(
        char const* name, std::int32_t, nvinfer1::OptProfileSelector) const noexcept override
    {
        nvinfer1::Dims dims{};
        dims.nbDims = 1;
        dims.d[0] = plan_.number(name, 0);
        return dims;
    }

private:
    Plan plan_;
    std::vector<std::string> names_;
};

class Runtime : public nvinfer1::IRuntime
{
public:
    nvinfer1::ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override
    {
        try
        {
            std::istringstream text(std::string(static_cast<char const*>(blob), size));
            return new Engine(Plan(text));
        }
        catch (std::exception const& error)
        {
            log_of_all.load()->log(nvinfer1::ILogger::Severity::kERROR, error.what());
            return nullptr;
        }
    }
};

} // namespace

nvinfer1::IRuntime* nvinfer1::createInferRuntime(ILogger& logger) noexcept
{
    log_of_all = &logger;
    return new Runtime;
}

extern "C"
{

std::int32_t getInferLibVersion() noexcept
{
    return NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100 + NV_TENSORRT_PATCH;
}

bool initTrtLlmPlugins(void* logger, char const*)
{
    return logger != nullptr;
}

cudaError_t cudaMalloc(void** devPtr, std::size_t size)
{
    *devPtr = std::malloc(size);
    return *devPtr == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void* devPtr)
{
    std::free(devPtr);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, void const* src, std::size_t count, cudaMemcpyKind, cudaStream_t)
{
    std::memcpy(dst, src, count);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* pStream)
{
    *pStream = nullptr;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned int)
{
    return cudaSuccess;
}

char const* cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : "unknown error";
}

} // extern "C"
