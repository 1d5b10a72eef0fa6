// Preloaded into a process, counts its calls for memory, in every thread.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static atomic_long calls;
long allocation_calls(void) { return atomic_load(&calls); }

void *malloc(size_t n) { calls++; return __libc_malloc(n); }
void *calloc(size_t n, size_t size) { calls++; return __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { calls++; return __libc_realloc(p, n); }
void *memalign(size_t alignment, size_t n) { calls++; return __libc_memalign(alignment, n); }
void *aligned_alloc(size_t alignment, size_t n) { calls++; return __libc_memalign(alignment, n); }
void *mmap(void *at, size_t n, int protection, int flags, int file, long offset) {
    calls++;
    return (void *)syscall(SYS_mmap, at, n, protection, flags, file, offset);
}
