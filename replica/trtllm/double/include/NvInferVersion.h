// Test double: the version that it reports.
#pragma once

#define NV_TENSORRT_MAJOR 10
#define NV_TENSORRT_MINOR 14
#define NV_TENSORRT_PATCH 1
