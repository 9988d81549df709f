// Conversion of the executor's responses: the requested tensor, or an error message.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensorrt_llm/executor/executor.h"

#include "shim.h"
#include "trtllm/src/bridge.rs.h"

namespace meridian::trtllm
{

namespace tle = tensorrt_llm::executor;

constexpr std::uint8_t kRows = 0;
constexpr std::uint8_t kFailed = 1;
constexpr std::uint8_t kCancelled = 2;
constexpr std::uint8_t kTimedOut = 3;

struct SequenceResponse
{
    std::uint64_t tag{0};
    std::uint8_t kind{kFailed};
    std::string message;
    tle::Tensor tensor;
    std::uint8_t format{255};
    std::size_t rows{0};
    std::size_t width{0};
};

// Selects the tensor of a result.
struct Wanted
{
    DecoderOutput output{};
    // Name of an additional output.
    std::string tensor;
};

// Never throws: a response that cannot be converted is an error of its request only.
SequenceResponse read(tle::Response const& response, Wanted const& wanted) noexcept;

class ResponseBatch::Impl
{
public:
    std::string failure;
    std::vector<SequenceResponse> responses;
};

} // namespace meridian::trtllm
