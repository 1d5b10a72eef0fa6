// Replays launches over a pool of threads: a step is one call of tandem_pool_run, with no allocation and no lock.
//
// The items of a launch are divided into one contiguous range per thread, so that each thread streams its own part of the
// weights. A thread that has finished its range takes items from the others' ranges. A barrier makes all threads wait.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

enum { MAX_THREADS = 256, SPINS_BEFORE_SLEEP = 20000, SPINS_BEFORE_YIELD = 200 };

typedef struct { _Alignas(64) atomic_int next; int32_t end; } item_range;  // a cache line each: threads do not collide

typedef struct {
    int32_t threads;
    pid_t process;  // a forked child has a copy of the pool, but no threads
    pthread_t handles[MAX_THREADS];
    _Alignas(64) atomic_int generation;  // counts runs; workers wait for it to change
    _Alignas(64) atomic_int arrived;     // at the current barrier
    _Alignas(64) atomic_int phase;       // counts barriers
    _Alignas(64) atomic_int sleepers;
    atomic_int quit;
    item_range *ranges;  // [launches][threads]
    int32_t ranges_capacity;
    const launch *launches;
    int32_t count;
    const int32_t *step;
    double *seconds;  // per launch, or NULL
} pool;

typedef struct { pool *pool; int32_t index; } worker;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void pause_briefly(int spins) {
    if (spins % SPINS_BEFORE_YIELD == SPINS_BEFORE_YIELD - 1) sched_yield();  // another thread may need this core to reach the barrier
    else __builtin_ia32_pause();
}

static void barrier(pool *p) {
    if (p->threads == 1) return;
    int phase = atomic_load_explicit(&p->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&p->phase, phase + 1, memory_order_release);
    } else {
        for (int spins = 0; atomic_load_explicit(&p->phase, memory_order_acquire) == phase; spins++) pause_briefly(spins);
    }
}

static void run_launches(pool *p, int32_t me) {
    double begun = 0.0;
    if (p->seconds) {  // measuring: no thread begins before the clock is read
        barrier(p);
        if (me == 0) begun = now();
        barrier(p);
    }
    for (int32_t i = 0; i < p->count; i++) {
        const launch *l = &p->launches[i];
        item_range *ranges = p->ranges + (size_t)i * p->threads;
        if (l->barrier) barrier(p);
        for (int32_t other = 0; other < p->threads; other++) {  // its own range first
            item_range *range = &ranges[(me + other) % p->threads];
            for (;;) {
                if (atomic_load_explicit(&range->next, memory_order_relaxed) >= range->end) break;
                int32_t item = atomic_fetch_add_explicit(&range->next, 1, memory_order_relaxed);
                if (item >= range->end) break;
                l->kernel(&l->args, item, p->step);
            }
        }
        if (p->seconds) {  // every launch alone
            barrier(p);
            if (me == 0) {
                double end = now();
                p->seconds[i] += end - begun;
                begun = end;
            }
        }
    }
    barrier(p);
}

static void *work(void *argument) {
    worker w = *(worker *)argument;
    free(argument);
    pool *p = w.pool;
    for (int seen = 0;;) {
        int spins = 0;
        while (atomic_load_explicit(&p->generation, memory_order_acquire) == seen) {
            if (++spins < SPINS_BEFORE_SLEEP) { __builtin_ia32_pause(); continue; }
            atomic_fetch_add(&p->sleepers, 1);
            syscall(SYS_futex, &p->generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&p->sleepers, 1);
        }
        seen = atomic_load(&p->generation);
        if (atomic_load(&p->quit)) return NULL;
        run_launches(p, w.index);
    }
}

static void release_workers(pool *p) {
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleepers)) syscall(SYS_futex, &p->generation, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

EXPORT void tandem_pool_destroy(pool *p) {
    if (p->process != getpid()) return;
    atomic_store(&p->quit, 1);
    release_workers(p);
    for (int32_t i = 1; i < p->threads; i++) pthread_join(p->handles[i], NULL);
    free(p->ranges);
    free(p);
}

// Returns NULL if memory or a thread cannot be allocated.
EXPORT pool *tandem_pool_create(int32_t threads, int32_t max_launches) {
    pool *p = aligned_alloc(64, (sizeof(pool) + 63) / 64 * 64);
    if (!p || threads < 1 || threads > MAX_THREADS) { free(p); return NULL; }
    memset(p, 0, sizeof *p);
    p->process = getpid();
    p->ranges_capacity = max_launches;
    p->ranges = aligned_alloc(64, sizeof(item_range) * (size_t)max_launches * threads);
    p->threads = 1;
    for (int32_t i = 1; i < threads && p->ranges; i++) {
        worker *w = malloc(sizeof *w);
        if (!w) break;
        *w = (worker){p, i};
        if (pthread_create(&p->handles[i], NULL, work, w)) { free(w); break; }
        p->threads++;
    }
    if (p->threads < threads || !p->ranges) { tandem_pool_destroy(p); return NULL; }
    return p;
}

// Runs the launches in order. `step` begins with the header of StepInputs. Adds each launch's time to `seconds` (or NULL).
EXPORT int tandem_pool_run(pool *p, const launch *launches, int32_t count, const int32_t *step, double *seconds) {
    if (count > p->ranges_capacity) return -1;
    for (int32_t i = 0; i < count; i++) {
        const launch *l = &launches[i];
        int64_t units = l->count < 0 ? 1 : (step[l->count] + l->count_step - 1) / l->count_step, items = units * l->items;
        for (int32_t t = 0; t < p->threads; t++) {
            item_range *range = &p->ranges[(size_t)i * p->threads + t];
            atomic_store_explicit(&range->next, (int32_t)(items * t / p->threads), memory_order_relaxed);
            range->end = (int32_t)(items * (t + 1) / p->threads);
        }
    }
    p->launches = launches, p->count = count, p->step = step, p->seconds = seconds;
    release_workers(p);
    run_launches(p, 0);
    return 0;
}
