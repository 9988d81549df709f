// What Rust sees of TensorRT-LLM and TensorRT: a few classes whose functions never throw.
//
// No header of the vendor is included here, so the generated side of the bridge compiles without one.
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

// Answers that the executor had ready. They own the tensors and lend them, so nothing is copied at the bridge.
class Answers
{
public:
    class Impl;
    explicit Answers(std::unique_ptr<Impl> impl);
    ~Answers();

    // Why asking failed; empty if it did not.
    rust::Slice<std::uint8_t const> failure() const noexcept;
    std::size_t size() const noexcept;
    // The client's id of the request, which is what Rust gave it.
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

// An executor with one model.
class Decoder
{
public:
    class Impl;
    explicit Decoder(std::unique_ptr<Impl> impl);
    ~Decoder();

    // Why it could not be opened; empty if it was.
    rust::Slice<std::uint8_t const> failure() const noexcept;
    // From any thread.
    Submitted submit(std::uint64_t tag, rust::Slice<std::int32_t const> tokens) const noexcept;
    // From any thread. The answer comes later, as that of the request, if the request was not answered before.
    Outcome cancel(std::uint64_t id) const noexcept;
    // From one thread at a time; waits no longer than this for at least one answer.
    std::unique_ptr<Answers> poll(std::uint32_t timeout_ms) const noexcept;
    // Of the iterations since the last call.
    Statistics statistics() const noexcept;
    // When nobody polls any more. Waits for what is active, so that is cancelled first.
    Outcome shutdown() const noexcept;

private:
    std::unique_ptr<Impl> impl_;
};

std::unique_ptr<Decoder> open_decoder(DecoderSettings const& settings) noexcept;

// The rows of one packed batch.
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

// An encoder with packed input.
class Encoder
{
public:
    class Impl;
    explicit Encoder(std::unique_ptr<Impl> impl);
    ~Encoder();

    rust::Slice<std::uint8_t const> failure() const noexcept;
    EncoderLimits limits() const noexcept;
    // From one thread at a time; returns when the rows are there.
    std::unique_ptr<EncoderRows> run(EncoderInput const& input) const noexcept;

private:
    std::unique_ptr<Impl> impl_;
};

std::unique_ptr<Encoder> open_encoder(rust::Str path) noexcept;

// The version whose headers this was compiled against.
rust::String executor_version() noexcept;
// The version of the library that was loaded: 1000 or 10000 times the major one, as the library counts.
std::int32_t tensorrt_version() noexcept;

} // namespace meridian::trtllm
