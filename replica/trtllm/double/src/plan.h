// Engine of the test double: a text of `key value` lines, which define its sizes and its failures.
//
// Numbers are integers below 256, so that fp32, fp16 and bf16 represent them exactly and a test can compare without a
// tolerance. `mixed` is the arithmetic of all outputs, with a second implementation in the tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <istream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace meridian::double_
{

// Below 251, a prime, so that neighbours differ.
inline float mixed(std::uint64_t a, std::uint64_t b)
{
    return static_cast<float>((a * 31 + b * 7) % 251);
}

// Encodes in this number format: 0 fp32, 1 fp16, 2 bf16. Integers below 2048 only.
inline void write(std::vector<std::uint8_t>& bytes, int format, float number)
{
    std::uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    std::size_t width = 4;
    if (format == 2)
    {
        bits >>= 16;
        width = 2;
    }
    else if (format == 1)
    {
        std::uint32_t const exponent = (bits >> 23) & 0xff;
        bits = exponent == 0 ? 0 : ((exponent - 127 + 15) << 10) | ((bits >> 13) & 0x3ff);
        width = 2;
    }
    for (std::size_t at = 0; at < width; ++at)
    {
        // Both the vendor's machines and ours are little-endian.
        bytes.push_back(static_cast<std::uint8_t>(bits >> (8 * at)));
    }
}

class Plan
{
public:
    explicit Plan(std::istream& text)
    {
        std::string line;
        while (std::getline(text, line))
        {
            std::istringstream words(line);
            std::string key;
            std::string value;
            if (words >> key >> value)
            {
                values_[key] = value;
            }
        }
        if (text_of("stand-in", "") != "1")
        {
            throw std::runtime_error("this is not an engine of the stand-in");
        }
    }

    static Plan read(std::filesystem::path const& path)
    {
        std::ifstream file(path);
        if (!file)
        {
            throw std::runtime_error("there is no engine at " + path.string());
        }
        return Plan(file);
    }

    std::int64_t number(std::string const& key, std::int64_t otherwise) const
    {
        auto const found = values_.find(key);
        return found == values_.end() ? otherwise : std::stoll(found->second);
    }

    std::string text_of(std::string const& key, std::string const& otherwise) const
    {
        auto const found = values_.find(key);
        return found == values_.end() ? otherwise : found->second;
    }

    int format() const
    {
        std::string const name = text_of("format", "fp32");
        return name == "bf16" ? 2 : name == "fp16" ? 1 : 0;
    }

private:
    std::map<std::string, std::string> values_;
};

// Throws as `how` specifies: a message, one that is not UTF-8, or an object that is not an exception.
[[noreturn]] inline void misbehave(std::string const& how)
{
    if (how == "number")
    {
        throw 42;
    }
    if (how == "bytes")
    {
        throw std::runtime_error("kernel \xff\xfe failed");
    }
    throw std::runtime_error("a kernel failed");
}

} // namespace meridian::double_
