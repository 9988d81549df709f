#include "responses.h"

namespace tensorrt_llm::executor
{

using meridian::double_::mixed;
using meridian::double_::Plan;
using meridian::double_::write;

namespace
{

DataType type_of(int format)
{
    return format == 2 ? DataType::kBF16 : format == 1 ? DataType::kFP16 : DataType::kFP32;
}

// States after each token from `first` on, `width` numbers each; `salt` distinguishes the outputs.
Tensor rows(VecTokens const& tokens, std::size_t first, std::int64_t width, std::uint64_t salt, int format, bool beams)
{
    std::vector<std::uint8_t> bytes;
    std::uint64_t state = salt;
    for (std::size_t at = 0; at < tokens.size(); ++at)
    {
        state = (state * 33 + static_cast<std::uint64_t>(tokens[at]) + 1) % 1000003;
        for (std::int64_t column = 0; at >= first && column < width; ++column)
        {
            write(bytes, format, mixed(state, static_cast<std::uint64_t>(column)));
        }
    }
    auto const count = static_cast<std::int64_t>(tokens.size() - first);
    // Generated outputs have a leading dimension for beams.
    std::vector<std::int64_t> shape
        = beams ? std::vector<std::int64_t>{1, count, width} : std::vector<std::int64_t>{count, width};
    return {type_of(format), std::move(shape), std::move(bytes)};
}

} // namespace

Result result_of(Request const& request, Plan const& plan)
{
    OutputConfig const& wanted = request.output.get("outputConfig");
    (void) request.streaming.get("streaming");
    (void) request.priority.get("priority");
    (void) request.returnAll.get("returnAllGeneratedTokens");
    (void) request.type.get("requestType");
    int const format = plan.format();
    std::int64_t const hidden = plan.number("hidden", 8);
    std::int64_t const vocabulary = plan.number("vocabulary", 32);
    std::size_t const last = request.tokens.size() - 1;
    Result result;
    result.outputTokenIds = {{1}};
    result.finishReasons = {FinishReason::kLENGTH};
    if (wanted.returnContextLogits)
    {
        result.contextLogits = rows(request.tokens, 0, vocabulary, 5, format, false);
    }
    if (wanted.returnGenerationLogits)
    {
        result.generationLogits = rows(request.tokens, last, vocabulary, 5, format, true);
    }
    for (auto const& output : wanted.additionalModelOutputs.value_or(std::vector<AdditionalModelOutput>{}))
    {
        if (output.name != plan.text_of("tap", "pooled"))
        {
            continue;
        }
        bool const all = output.gatherContext;
        std::string const prefix = all && plan.number("prefix", 0) != 0 ? "context_" : "";
        result.additionalOutputs.push_back(
            AdditionalOutput{prefix + output.name, rows(request.tokens, all ? 0 : last, hidden, 3, format, !all)});
    }
    return result;
}

Response::Response(IdType requestId, std::string errorMsg, std::optional<IdType> clientId)
    : request_(requestId)
    , client_(clientId)
    , error_(std::move(errorMsg))
{
}

Response::Response(IdType requestId, Result result, std::optional<IdType> clientId)
    : request_(requestId)
    , client_(clientId)
    , result_(std::move(result))
{
}

IdType Response::getRequestId() const
{
    return request_;
}

std::optional<IdType> Response::getClientId() const
{
    return client_;
}

bool Response::hasError() const
{
    return error_.has_value();
}

std::string const& Response::getErrorMsg() const
{
    return error_.value();
}

Result const& Response::getResult() const
{
    if (error_)
    {
        throw std::runtime_error("the response is an error");
    }
    return result_;
}

} // namespace tensorrt_llm::executor
