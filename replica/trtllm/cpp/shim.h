// Interface of TensorRT-LLM and TensorRT for Rust: a few classes whose functions never throw.
//
// No header of the vendor is included here, so that the generated side of the bridge compiles without them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "rust/cxx.h"

namespace meridian::trtllm
{

struct DecoderSettings;
struct EncoderInput;
struct EncoderLimits;
struct Outcome;
struct Statistics;
struct Submitted;

// Responses that the executor had ready. They own the tensors and return views, so no data is copied at the bridge.
class ResponseBatch
{
public:
    class Impl;
    explicit ResponseBatch(std::unique_ptr<Impl> impl);
    ~ResponseBatch();

    // Error message of the poll; empty on success.
    rust::Slice<std::uint8_t const> failure() const noexcept;
    std::size_t size() const noexcept;
    // Client id of the request, as set by Rust.
    std::uint64_t tag(std::size_t index) const noexcept;
    // 0 rows, 1 failed, 2 cancelled, 3 timed out.
    std::uint8_t kind(std::size_t index) const noexcept;
    rust::Slice<std::uint8_t const> message(std::size_t index) const noexcept;
    // The number format: 0 fp32, 1 fp16, 2 bf16, 255 anything else.
    std::uint8_t format(std::size_t index) const noexcept;
    std::size_t rows(std::size_t index) const noexcept;
    std::size_t width(std::size_t index) const noexcept;
    rust::Slice<std::uint8_t const> data(std::size_t index) const noexcept;

private:
    std::unique_ptr<Impl> impl_;
};

// Executor with one model.
class Decoder
{
public:
    class Impl;
    explicit Decoder(std::unique_ptr<Impl> impl);
    ~Decoder();

    // Error message of opening; empty on success.
    rust::Slice<std::uint8_t const> failure() const noexcept;
    // May be called from any thread.
    Submitted submit(std::uint64_t tag, rust::Slice<std::int32_t const> tokens) const noexcept;
    // May be called from any thread. The response follows as that of the request, if the request has not ended before.
    Outcome cancel(std::uint64_t id) const noexcept;
    // Must be called from one thread at a time; waits for at least one response, at most for the timeout.
    std::unique_ptr<ResponseBatch> poll(std::uint32_t timeout_ms) const noexcept;
    // Statistics of the iterations since the last call.
    Statistics statistics() const noexcept;
    // Must be called after polling has ended. Waits for active requests, so they are cancelled first.
    Outcome shutdown() const noexcept;

private:
    std::unique_ptr<Impl> impl_;
};

std::unique_ptr<Decoder> open_decoder(DecoderSettings const& settings) noexcept;

// Rows of one packed batch.
class EncoderRows
{
public:
    class Impl;
    explicit EncoderRows(std::unique_ptr<Impl> impl);
    ~EncoderRows();

    rust::Slice<std::uint8_t const> failure() const noexcept;
    std::uint8_t format() const noexcept;
    std::size_t rows() const noexcept;
    std::size_t width() const noexcept;
    rust::Slice<std::uint8_t const> data() const noexcept;

private:
    std::unique_ptr<Impl> impl_;
};

// Encoder with packed input.
class Encoder
{
public:
    class Impl;
    explicit Encoder(std::unique_ptr<Impl> impl);
    ~Encoder();

    rust::Slice<std::uint8_t const> failure() const noexcept;
    EncoderLimits limits() const noexcept;
    // Must be called from one thread at a time; returns when the rows are available.
    std::unique_ptr<EncoderRows> run(EncoderInput const& input) const noexcept;

private:
    std::unique_ptr<Impl> impl_;
};

std::unique_ptr<Encoder> open_encoder(rust::Str path) noexcept;

// Returns the version of the headers at compile time.
rust::String executor_version() noexcept;
// Returns the version of the loaded library: 1000 or 10000 times the major version, as encoded by the library.
std::int32_t tensorrt_version() noexcept;

} // namespace meridian::trtllm
