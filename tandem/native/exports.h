// The functions of the C core that Python calls. setup.py gives launch.h and this file to cffi, which writes _core.py:
// parsing them at every start would take longer than loading a small model.

// isa.c
int tandem_isa_supported(const char *name);
kernel_fn *tandem_kernel(const char *symbol);

// peak.c
int64_t tandem_peak(const char *isa, int64_t rounds);

// thread_pool.c
typedef struct pool pool;
pool *tandem_pool_create(int32_t threads, int32_t max_launches);
void tandem_pool_destroy(pool *p);
int tandem_pool_run(pool *p, const launch *launches, int32_t count, const int32_t *step, double *seconds);

// repack.c
int tandem_repack(const char *name, const uint8_t *file, int64_t rows, int64_t columns, uint8_t *out,
                  int64_t first_panel, int64_t run, int64_t period);
typedef struct {
    const char *layout; const uint8_t *file; int64_t rows, columns; uint8_t *out; int64_t first_panel, run, period;
} repack_job;
int tandem_repack_all(const repack_job *jobs, int64_t count);

// gguf/scan.c
int64_t tandem_scan_strings(const char *data, int64_t size, int64_t n, int64_t *start, int64_t *length);

// model/merge.c
typedef struct {
    int32_t byte_level, whole_words, unknown, longest;
    uint8_t *bytes; int64_t *starts; uint8_t *types; float *scores; void *slots, *merges, *trie;
    int64_t slot_mask, merge_mask; int32_t byte_ids[256]; uint8_t adjacent[65536];
} tokenizer;
void tandem_tokenizer_add_tokens(tokenizer *, const uint8_t *blob, const int64_t *, const int64_t *, int64_t);
void tandem_tokenizer_add_merges(tokenizer *, const uint8_t *blob, const int64_t *, const int64_t *, int64_t,
                                 uint8_t *scratch);
int32_t tandem_tokenizer_add_special(tokenizer *, int32_t id, int32_t room);
int32_t tandem_tokenizer_find(const tokenizer *, const uint8_t *, int64_t);
int32_t tandem_tokenizer_next_special(const tokenizer *, const uint8_t *, int64_t, int64_t from, int32_t controls,
                                      int64_t *span);
int64_t tandem_tokenizer_encode(const tokenizer *, const uint8_t *, int64_t, const int32_t *words, int64_t,
                                int32_t *ids, int64_t limit, double share);

// server/http/json_count.c
int64_t tandem_json_count(const uint8_t *, int64_t);
