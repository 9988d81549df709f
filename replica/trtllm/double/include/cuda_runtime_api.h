// Test double of the CUDA runtime, as far as the shim uses it. Device memory is host memory.
#pragma once

#include <cstddef>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

enum cudaError
{
    cudaSuccess = 0,
    cudaErrorMemoryAllocation = 2,
    cudaErrorSetOnActiveProcess = 708,
};
using cudaError_t = cudaError;

enum cudaMemcpyKind
{
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
};

constexpr unsigned int cudaDeviceScheduleBlockingSync = 4;

extern "C"
{
    cudaError_t cudaMalloc(void** devPtr, std::size_t size);
    cudaError_t cudaFree(void* devPtr);
    cudaError_t cudaMemcpyAsync(
        void* dst, void const* src, std::size_t count, cudaMemcpyKind kind, cudaStream_t stream);
    cudaError_t cudaStreamCreate(cudaStream_t* pStream);
    cudaError_t cudaStreamSynchronize(cudaStream_t stream);
    cudaError_t cudaStreamDestroy(cudaStream_t stream);
    cudaError_t cudaSetDeviceFlags(unsigned int flags);
    char const* cudaGetErrorString(cudaError_t error);
}
