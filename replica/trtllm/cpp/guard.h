// Conversion of exceptions to error messages.
//
// No exception may pass into Rust. cxx converts exceptions that derive from std::exception and terminates the process
// for others; the vendor's code throws its own classes, other libraries throw theirs, and MPI throws numbers. So every
// function of the shim is noexcept and runs all code that can throw inside `guarded`, which returns the message: as
// bytes, because messages need not be UTF-8.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "rust/cxx.h"

namespace meridian::trtllm
{

inline rust::Vec<std::uint8_t> bytes(std::string_view text)
{
    rust::Vec<std::uint8_t> copy;
    copy.reserve(text.size());
    for (char const letter : text)
    {
        copy.push_back(static_cast<std::uint8_t>(letter));
    }
    return copy;
}

inline rust::Slice<std::uint8_t const> lent(std::string_view text)
{
    return {reinterpret_cast<std::uint8_t const*>(text.data()), text.size()};
}

// Calls `work`; returns the message of its exception, or an empty string. An empty message is replaced, so that it
// remains an error.
template <typename Work>
std::string guarded(Work&& work) noexcept
{
    try
    {
        work();
        return {};
    }
    catch (std::exception const& error)
    {
        std::string_view const what = error.what() == nullptr ? "" : error.what();
        return std::string(what.empty() ? "an exception without a message" : what);
    }
    catch (...)
    {
        return "an exception that is not of the standard library's kind";
    }
}

} // namespace meridian::trtllm
