#include "response_batch.h"

#include <optional>
#include <stdexcept>
#include <utility>

#include "guard.h"

namespace meridian::trtllm
{

namespace
{

std::uint8_t format_of(tle::DataType type) noexcept
{
    switch (type)
    {
    case tle::DataType::kFP32: return 0;
    case tle::DataType::kFP16: return 1;
    case tle::DataType::kBF16: return 2;
    default: return 255;
    }
}

// The number of rows is the product of all dimensions but the last: a dimension for one beam or step does not count.
void take(SequenceResponse& out, tle::Tensor const& tensor)
{
    auto const shape = tensor.getShape();
    if (shape.size() == 0)
    {
        throw std::runtime_error("the model's output has no dimensions");
    }
    std::size_t rows = 1;
    for (std::size_t at = 0; at + 1 < shape.size(); ++at)
    {
        rows *= static_cast<std::size_t>(shape[at]);
    }
    out.tensor = tensor;
    out.format = format_of(tensor.getDataType());
    out.rows = rows;
    out.width = static_cast<std::size_t>(shape[shape.size() - 1]);
    out.kind = kRows;
}

// Releases differ in whether the name of a context output has the prefix `context_`.
std::optional<tle::Tensor> additional(tle::Result const& result, std::string const& name)
{
    for (auto const& output : result.additionalOutputs)
    {
        if (output.name == name || output.name == "context_" + name)
        {
            return output.output;
        }
    }
    return std::nullopt;
}

std::optional<tle::Tensor> tensor_of(tle::Result const& result, Wanted const& wanted)
{
    switch (wanted.output)
    {
    case DecoderOutput::ContextLogits: return result.contextLogits;
    case DecoderOutput::GenerationLogits: return result.generationLogits;
    default: return additional(result, wanted.tensor);
    }
}

void read_into(SequenceResponse& out, tle::Response const& response, Wanted const& wanted)
{
    // Every submitted request has a client id; 0 is never used.
    out.tag = response.getClientId().value_or(0);
    if (response.hasError())
    {
        throw std::runtime_error(response.getErrorMsg());
    }
    tle::Result const& result = response.getResult();
    for (auto const reason : result.finishReasons)
    {
        if (reason == tle::FinishReason::kCANCELLED || reason == tle::FinishReason::kTIMED_OUT)
        {
            out.kind = reason == tle::FinishReason::kCANCELLED ? kCancelled : kTimedOut;
            return;
        }
    }
    auto const tensor = tensor_of(result, wanted);
    if (!tensor)
    {
        throw std::runtime_error("the response lacks the requested output; build the engine with it");
    }
    take(out, *tensor);
}

} // namespace

SequenceResponse read(tle::Response const& response, Wanted const& wanted) noexcept
{
    SequenceResponse out;
    out.message = guarded([&] { read_into(out, response, wanted); });
    if (!out.message.empty())
    {
        out.kind = kFailed;
    }
    return out;
}

ResponseBatch::ResponseBatch(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl))
{
}

ResponseBatch::~ResponseBatch() = default;

rust::Slice<std::uint8_t const> ResponseBatch::failure() const noexcept
{
    return lent(impl_->failure);
}

std::size_t ResponseBatch::size() const noexcept
{
    return impl_->responses.size();
}

std::uint64_t ResponseBatch::tag(std::size_t index) const noexcept
{
    return impl_->responses[index].tag;
}

std::uint8_t ResponseBatch::kind(std::size_t index) const noexcept
{
    return impl_->responses[index].kind;
}

rust::Slice<std::uint8_t const> ResponseBatch::message(std::size_t index) const noexcept
{
    return lent(impl_->responses[index].message);
}

std::uint8_t ResponseBatch::format(std::size_t index) const noexcept
{
    return impl_->responses[index].format;
}

std::size_t ResponseBatch::rows(std::size_t index) const noexcept
{
    return impl_->responses[index].rows;
}

std::size_t ResponseBatch::width(std::size_t index) const noexcept
{
    return impl_->responses[index].width;
}

rust::Slice<std::uint8_t const> ResponseBatch::data(std::size_t index) const noexcept
{
    auto const& tensor = impl_->responses[index].tensor;
    if (!tensor || tensor.getSizeInBytes() == 0)
    {
        return {};
    }
    return {static_cast<std::uint8_t const*>(tensor.getData()), tensor.getSizeInBytes()};
}

} // namespace meridian::trtllm
