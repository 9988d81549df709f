// Test double of the executor's tensors: always in host memory, shared by all copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tensorrt_llm/executor/types.h"

namespace tensorrt_llm::executor
{

// Points into the tensor.
class Shape
{
public:
    using DimType64 = std::int64_t;

    Shape() = default;

    Shape(DimType64 const* data, std::size_t size)
        : data_(data)
        , size_(size)
    {
    }

    std::size_t size() const
    {
        return size_;
    }

    DimType64 const& operator[](std::size_t index) const
    {
        return data_[index];
    }

private:
    DimType64 const* data_{nullptr};
    std::size_t size_{0};
};

class Tensor
{
public:
    Tensor() noexcept = default;

    // Specific to the test double: creates a tensor with this content.
    Tensor(DataType type, std::vector<std::int64_t> shape, std::vector<std::uint8_t> bytes)
        : content_(std::make_shared<Content>(Content{type, std::move(shape), std::move(bytes)}))
    {
    }

    void* getData()
    {
        return content_->bytes.data();
    }

    void const* getData() const
    {
        return content_->bytes.data();
    }

    DataType getDataType() const
    {
        return content_->type;
    }

    Shape getShape() const
    {
        return {content_->shape.data(), content_->shape.size()};
    }

    std::size_t getSizeInBytes() const
    {
        return content_->bytes.size();
    }

    explicit operator bool() const
    {
        return content_ != nullptr;
    }

private:
    struct Content
    {
        DataType type;
        std::vector<std::int64_t> shape;
        std::vector<std::uint8_t> bytes;
    };

    std::shared_ptr<Content> content_;
};

} // namespace tensorrt_llm::executor
