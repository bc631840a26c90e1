// Memory that a thread keeps from call to call: taking a megabyte anew each time costs more than a short call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace mla::cpu {

class KeptBuffer {
 public:
  ~KeptBuffer() { std::free(data_); }
  // At least `bytes`, aligned to 64, as the last user left them.
  void* get(size_t bytes) {
    if (bytes > bytes_) {
      std::free(data_);
      data_ = nullptr, bytes_ = 0;
      const size_t rounded = (bytes + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, rounded);
      if (!data_) throw std::bad_alloc();
      bytes_ = rounded;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace mla::cpu
