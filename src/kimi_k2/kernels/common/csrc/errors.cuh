// What a launcher of ours returns beside 0 and a cudaError_t; kimi_k2.kernels.common.launch has the texts.
#pragma once

namespace host {

enum Error { kNoInstance = 1000, kNoEncoder = 1001, kNotEncoded = 1002, kBadStages = 1003, kBadSplits = 1004 };

}  // namespace host
