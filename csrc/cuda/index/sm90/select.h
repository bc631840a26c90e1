// select_tokens on Hopper, for e4m3 queries and keys.
#pragma once

#include "mla/index.h"

namespace mla::cuda::index::sm90 {

// Whether its kernels can read these tensors.
bool suits(const SelectTokensProblem& p);
// Bytes that it works in, for up to so many tokens, heads and topk.
int64_t workspace_bytes(const SelectTokensProblem& p, int processors);
void select_tokens(const SelectTokensProblem& p, int processors, void* stream);

}  // namespace mla::cuda::index::sm90
