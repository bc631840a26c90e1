// The partial results of split tokens until they are combined: their addresses and their size.
#pragma once

#include <cstdint>

#include "mla/format.h"
#include "mla/platform.h"

namespace mla {

// Partial results of a launch: `count` slots for them (two per CTA, see plan.h), each with a row for each head.
struct Partials {
  int64_t count;
  int64_t heads;
  float* out;         // [count, heads, 512], or as many CompactRows
  float* lse;         // [count, heads]
  float* max_logits;  // [count, heads]

  static constexpr int64_t kPerCta = 2;
  static constexpr int64_t kFloatsPerRow = kValueDim + 2;
  // On a GPU there is also a counter for each quarter of a row: how many splits of the token have arrived. Those of the
  // token's first split are used.
  static constexpr int64_t kArrivalsPerRow = 4;

  MLA_HOST_DEVICE Partials(float* memory, int32_t ctas, int32_t heads)
      : count(kPerCta * static_cast<int64_t>(ctas)),
        heads(heads),
        out(memory),
        lse(out + count * heads * kValueDim),
        max_logits(lse + count * heads) {}

  // A caller's plan may be stale: a partial slot out of range is clamped.
  MLA_HOST_DEVICE int64_t row(int64_t partial, int64_t head) const {
    const int64_t slot = partial < 0 ? 0 : (partial < count ? partial : count - 1);
    return slot * heads + head;
  }

  static constexpr int64_t floats(int64_t ctas, int64_t heads) { return kPerCta * ctas * heads * kFloatsPerRow; }
};

// The memory that a caller gives to attention on a GPU: partial results at its beginning, counters at its end. All
// counters are zero before a launch, and zero again after it. They are aligned to the end of the memory, so launches of
// other sizes that share it find theirs zero too.
struct Workspace {
  static constexpr int64_t kCountersPerCtaHead = Partials::kPerCta * Partials::kArrivalsPerRow;
  static constexpr int64_t kFloatsPerCtaHead =
      Partials::kPerCta * Partials::kFloatsPerRow + kCountersPerCtaHead;  // a counter is as large as a float

  static constexpr int64_t floats(int64_t ctas, int64_t heads) { return ctas * heads * kFloatsPerCtaHead; }
  // The counters of a workspace of `size` floats, which may be more than needed.
  static int32_t* arrivals(float* memory, int64_t size, int64_t ctas, int64_t heads) {
    return reinterpret_cast<int32_t*>(memory + size - ctas * heads * kCountersPerCtaHead);
  }
};

}  // namespace mla
