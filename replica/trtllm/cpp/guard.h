// Where exceptions end.
//
// Nothing that is thrown may pass into Rust. cxx turns what derives from std::exception into an error and ends the process
// for anything else; the vendor's code throws its own classes, other libraries throw theirs, and MPI throws numbers. So every
// function of the shim is noexcept and has all that can throw inside of `guarded`, which makes a value of it: bytes, because
// nobody promises that a message is UTF-8.
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

// Calls `work`; returns what it threw, in words, or nothing. An empty message is replaced, so that it still is a failure.
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
