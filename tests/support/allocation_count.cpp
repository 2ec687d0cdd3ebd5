// SPDX-License-Identifier: Apache-2.0
#include "allocation_count.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "suite.h"  // LOGITLESS_SANITIZED

namespace {

std::atomic<int64_t> allocated{0};

void* allocate(size_t bytes, size_t alignment) {
  ++allocated;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

#if defined(__GLIBC__) && !defined(LOGITLESS_SANITIZED) && !defined(__SANITIZE_ADDRESS__)
// Counts malloc too: C code may allocate while it reads a file or the environment.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t elements, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* malloc(size_t bytes) {
  ++allocated;
  return __libc_malloc(bytes);
}
void* calloc(size_t elements, size_t bytes) {
  ++allocated;
  return __libc_calloc(elements, bytes);
}
void* realloc(void* memory, size_t bytes) {
  ++allocated;
  return __libc_realloc(memory, bytes);
}
}
bool logitless::conformance::counts_malloc() { return true; }
#else
bool logitless::conformance::counts_malloc() { return false; }
#endif

int64_t logitless::conformance::allocations() { return allocated; }
