// Replays launches over a pool of threads: a step is one call of tandem_pool_run, with no allocation and no lock.
//
// The items of a launch are divided into one contiguous range per thread, so that each thread streams its own part of the
// weights. A thread that has finished its range takes items from the others' ranges. A barrier makes all threads wait.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

enum { MAX_THREADS = 256, SPINS_BETWEEN_RUNS = 20000, MIN_SPINS = 200, MAX_SPINS = 25600 };

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

// Waits until a counter is no longer `seen`: spins, then sleeps, so that the thread it waits for can have this core.
// It does not yield: since Linux 6.18, each sched_yield costs a time slice, and others would keep the pool waiting for 50 ms.
// Returns whether it slept.
static int wait_for_change(pool *p, atomic_int *counter, int seen, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(counter, memory_order_acquire) != seen) return 0;
        __builtin_ia32_pause();
    }
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(counter) == seen) syscall(SYS_futex, counter, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&p->sleepers, 1);
    return 1;
}

static void advance(pool *p, atomic_int *counter) {
    atomic_fetch_add(counter, 1);
    if (atomic_load(&p->sleepers)) syscall(SYS_futex, counter, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

static void barrier(pool *p) {
    static _Thread_local int spins = MAX_SPINS;  // fewer while the others are late, as on a busy machine
    if (p->threads == 1) return;
    int phase = atomic_load_explicit(&p->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        advance(p, &p->phase);
    } else if (wait_for_change(p, &p->phase, phase, spins)) {
        if (spins > MIN_SPINS) spins /= 2;
    } else if (spins < MAX_SPINS) spins *= 2;
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
        wait_for_change(p, &p->generation, seen, SPINS_BETWEEN_RUNS);
        seen = atomic_load(&p->generation);
        if (atomic_load(&p->quit)) return NULL;
        run_launches(p, w.index);
    }
}

EXPORT void tandem_pool_destroy(pool *p) {
    if (p->process != getpid()) return;
    atomic_store(&p->quit, 1);
    advance(p, &p->generation);
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
        if (l->most && items > l->most) items = l->most;
        for (int32_t t = 0; t < p->threads; t++) {
            item_range *range = &p->ranges[(size_t)i * p->threads + t];
            atomic_store_explicit(&range->next, (int32_t)(items * t / p->threads), memory_order_relaxed);
            range->end = (int32_t)(items * (t + 1) / p->threads);
        }
    }
    p->launches = launches, p->count = count, p->step = step, p->seconds = seconds;
    advance(p, &p->generation);
    run_launches(p, 0);
    return 0;
}
