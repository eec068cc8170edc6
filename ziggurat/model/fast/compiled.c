/* Inner loops of translation on CPUs that PyTorch has no operators for, called by ziggurat/model/fast/compiled.py.

   - linear: x W^T + b in fp32, bf16 or bytes. A decoding step has few rows, for which oneDNN's products do not saturate
   memory bandwidth, and with bytes PyTorch takes six passes over memory besides the product (largest value of a row,
   scale, round, convert, scale back, bias). Here the product's own loop finishes its results in registers.
   - feed_forward: two such maps with ReLU between them, keeping the inner activations in a cache.
   - attend: attention of the few queries of a decoding step. PyTorch takes eight operators of 5 us, and its products
     include entries of other hypotheses, which a mask then hides; here they are skipped.

   Plain C with OpenMP and without Python's or PyTorch's headers, so one library serves every version of either. It is
   not linked to its own OpenMP: the loader finds PyTorch's, so both share one pool of threads. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* ---- linear maps ----------------------------------------------------------------------------------------------- */

/* Type of the products. Inputs and weights are read in groups of 32 bits: one fp32, two bf16 or four bytes. */
enum { SINGLES, HALVES, BYTES };

typedef struct {
    int64_t type;
    int64_t in, out;
    const void *weight;   /* [panels, groups, PANEL, numbers per group]; both widths are padded with zeros */
    const float *bias;    /* [panels * PANEL] */
    const float *scale;   /* bytes: [panels * PANEL] scales of W's rows */
    const int32_t *shift; /* bytes: [panels * PANEL] excess of the sums, 128 times the sum of a row of W */
    int64_t positive;     /* bytes: inputs are never negative, so 0 to 255 is 0 to the largest; else 128 means 0 */
    int64_t relu;
    int64_t narrow; /* results are bf16, not fp32 */
} Map;

#define SMALLEST 1e-30f /* largest number in a row of zeros: a smaller one's scale may have an infinite reciprocal */
#define PANEL 64 /* outputs per panel of weights: four vectors of 16 sums */
#define ROWS 6   /* rows per tile: 24 vectors of sums, 4 of weights and 1 of inputs fit the 32 registers */
#define MOST_ROWS 192 /* rows per thread at a time: their inner activations, 8 KiB each at base size, stay in a cache */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define BASE "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"
#define WITH(features) __attribute__((target(features)))

int supported(int type) {
    int base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (type == HALVES) return base && __builtin_cpu_supports("avx512bf16");
    if (type == BYTES) return base && __builtin_cpu_supports("avx512vnni");
    return base;
}

static int64_t panels_of(const Map *map) { return (map->out + PANEL - 1) / PANEL; }
static int64_t groups_of(const Map *map) {
    int64_t numbers = map->type == BYTES ? 4 : map->type == HALVES ? 2 : 1;
    return (map->in + numbers - 1) / numbers;
}
static void *aligned(size_t bytes) { return aligned_alloc(64, bytes / 64 * 64 + 64); }
INLINE __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

/* Sixteen numbers as bf16: rounded to nearest, halves to even, NaN kept. */
WITH(BASE) INLINE __m256i halves(__m512 z) {
    __m512i bits = _mm512_castps_si512(z), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    near = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(z, z, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(near);
}

/* Sixteen results of a map, vector `v` of a panel: biased, positive with `relu`, stored in row `r` from `place` on. */
WITH(BASE) INLINE void finish(const Map *map, void *y, int64_t place, int64_t panel, int r, int v, __m512 z) {
    int64_t number = panel * PANEL + 16 * v, at = place + r * map->out + number;
    __mmask16 here = first(map->out - number);
    z = _mm512_add_ps(z, _mm512_loadu_ps(map->bias + number));
    /* This order lets NaN pass: `max` then returns its second operand. */
    if (map->relu) z = _mm512_max_ps(_mm512_setzero_ps(), z);
    if (map->narrow)
        _mm256_mask_storeu_epi16((uint16_t *)y + at, here, halves(z));
    else
        _mm512_mask_storeu_ps((float *)y + at, here, z);
}

/* One row x [in] as bytes; returns its scale, |largest| / 127 or largest / 255, or NaN if a number is not finite, so
   that the whole row of results becomes NaN instead of plausible numbers. */
WITH(BASE) static float quantise(const Map *map, const float *x, uint8_t *bytes) {
    const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)), zero = _mm512_setzero_ps();
    __m512 most = zero;
    __mmask16 broken = 0;
    for (int64_t j = 0; j < map->in; j += 16) {
        __m512 v = _mm512_maskz_loadu_ps(first(map->in - j), x + j), size = _mm512_and_ps(v, magnitude);
        broken |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
        most = _mm512_max_ps(map->positive ? v : size, most);
    }
    if (broken) return NAN;
    float values[16], largest = SMALLEST;
    _mm512_storeu_ps(values, most);
    for (int j = 0; j < 16; j++) largest = values[j] > largest ? values[j] : largest;
    float scale = largest / (map->positive ? 255.0f : 127.0f);
    /* No number here is negative, so adding a half makes the truncating conversion round. */
    __m512 factor = _mm512_set1_ps(1.0f / scale), half = _mm512_set1_ps(map->positive ? 0.5f : 128.5f);
    int64_t padded = 4 * groups_of(map);
    for (int64_t j = 0; j < padded; j += 16) {
        __m512 v = _mm512_maskz_loadu_ps(first(map->in - j), x + j);
        if (map->positive) v = _mm512_max_ps(v, zero);
        v = _mm512_fmadd_ps(v, factor, half);
        _mm512_mask_cvtusepi32_storeu_epi8(bytes + j, first(padded - j), _mm512_cvttps_epu32(v));
    }
    return scale;
}

/* One row x [in] as bf16. */
WITH(BASE) static void shorten(const Map *map, const float *x, uint16_t *to) {
    int64_t padded = 2 * groups_of(map);
    for (int64_t j = 0; j < padded; j += 16) {
        __m512 v = _mm512_maskz_loadu_ps(first(map->in - j), x + j);
        _mm256_mask_storeu_epi16(to + j, first(padded - j), halves(v));
    }
}

/* Rows in the map's type. */
typedef struct {
    const int32_t *groups; /* [rows, stride] */
    int64_t stride;
    float *scale; /* bytes: one per row */
} Rows;

/* Without this, gcc 12 copies every sum in each iteration, which halves the speed of bytes. */
#define KEPT(a, b, c, d) __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d))

/* Define NAME_tile, up to ROWS rows times one panel, whose results go to y from number `place` on, and NAME, as many
   tiles as the rows need. `count` is a constant for the compiler, so that all sums stay in registers. */
#define TILES(NAME, FEATURES, SUM, ZERO, ADD, RESULT)                                                                  \
    WITH(FEATURES) INLINE void NAME##_tile(const Map *map, int64_t panel, const Rows *rows, int64_t row, void *y,      \
                                           int64_t place, const int count) {                                           \
        SUM sum[ROWS][4];                                                                                              \
        int64_t groups = groups_of(map);                                                                               \
        const int32_t *weight = (const int32_t *)map->weight + panel * groups * PANEL;                                 \
        /* As fp32, which the compiler broadcasts to a register in one instruction; the bits do not change. */         \
        const float *x = (const float *)rows->groups + row * rows->stride;                                             \
        int64_t stride = rows->stride;                                                                                 \
        _Pragma("GCC unroll 6") for (int r = 0; r < count; r++)                                                        \
            sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = ZERO();                                                    \
        for (int64_t j = 0; j < groups; j++, weight += PANEL) {                                                        \
            __m512i w0 = _mm512_load_si512(weight), w1 = _mm512_load_si512(weight + 16);                               \
            __m512i w2 = _mm512_load_si512(weight + 32), w3 = _mm512_load_si512(weight + 48);                          \
            _Pragma("GCC unroll 6") for (int r = 0; r < count; r++) {                                                  \
                __m512 group = _mm512_set1_ps(x[r * stride + j]);                                                      \
                sum[r][0] = ADD(sum[r][0], group, w0);                                                                 \
                sum[r][1] = ADD(sum[r][1], group, w1);                                                                 \
                sum[r][2] = ADD(sum[r][2], group, w2);                                                                 \
                sum[r][3] = ADD(sum[r][3], group, w3);                                                                 \
                KEPT(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);                                                      \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("GCC unroll 6") for (int r = 0; r < count; r++) {                                                      \
            finish(map, y, place, panel, r, 0, RESULT(map, panel, 0, sum[r][0], rows, row + r));                       \
            finish(map, y, place, panel, r, 1, RESULT(map, panel, 1, sum[r][1], rows, row + r));                       \
            finish(map, y, place, panel, r, 2, RESULT(map, panel, 2, sum[r][2], rows, row + r));                       \
            finish(map, y, place, panel, r, 3, RESULT(map, panel, 3, sum[r][3], rows, row + r));                       \
        }                                                                                                              \
    }                                                                                                                  \
    WITH(FEATURES) static void NAME(const Map *map, int64_t panel, const Rows *rows, int64_t count, void *y) {         \
        for (int64_t row = 0; row < count; row += ROWS) switch (count - row) {                                         \
            case 1: NAME##_tile(map, panel, rows, row, y, row * map->out, 1); break;                                   \
            case 2: NAME##_tile(map, panel, rows, row, y, row * map->out, 2); break;                                   \
            case 3: NAME##_tile(map, panel, rows, row, y, row * map->out, 3); break;                                   \
            case 4: NAME##_tile(map, panel, rows, row, y, row * map->out, 4); break;                                   \
            case 5: NAME##_tile(map, panel, rows, row, y, row * map->out, 5); break;                                   \
            default: NAME##_tile(map, panel, rows, row, y, row * map->out, ROWS);                                      \
            }                                                                                                          \
    }

#define ADD_SINGLES(sum, x, w) _mm512_fmadd_ps(x, _mm512_castsi512_ps(w), sum)
#define ADD_HALVES(sum, x, w) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(w))
#define ADD_BYTES(sum, x, w) _mm512_dpbusd_epi32(sum, _mm512_castps_si512(x), w)
#define SUM_ITSELF(map, panel, v, sum, rows, row) (sum)
#define SUM_SCALED(map, panel, v, sum, rows, row) scaled(map, (panel) * PANEL + 16 * (v), sum, (rows)->scale[row])

/* Sums of products of bytes, for outputs from `number` on, scaled back to real values. */
WITH(BASE) INLINE __m512 scaled(const Map *map, int64_t number, __m512i sum, float scale) {
    __m512 z = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_loadu_si512(map->shift + number)));
    return _mm512_mul_ps(_mm512_mul_ps(z, _mm512_loadu_ps(map->scale + number)), _mm512_set1_ps(scale));
}

TILES(singles, BASE, __m512, _mm512_setzero_ps, ADD_SINGLES, SUM_ITSELF)
TILES(pairs, BASE ",avx512bf16", __m512, _mm512_setzero_ps, ADD_HALVES, SUM_ITSELF)
TILES(bytes, BASE ",avx512vnni", __m512i, _mm512_setzero_si512, ADD_BYTES, SUM_SCALED)

static void multiply(const Map *map, int64_t panel, const Rows *rows, int64_t count, void *y) {
    if (map->type == SINGLES)
        singles(map, panel, rows, count, y);
    else if (map->type == HALVES)
        pairs(map, panel, rows, count, y);
    else
        bytes(map, panel, rows, count, y);
}

/* Row `r` of x [., stride] in the map's type, into `room`. */
static void convert(const Map *map, const float *x, int64_t stride, int64_t r, const Rows *room) {
    int32_t *to = (int32_t *)room->groups + r * room->stride;
    if (map->type == BYTES)
        room->scale[r] = quantise(map, x + r * stride, (uint8_t *)to);
    else
        shorten(map, x + r * stride, (uint16_t *)to);
}

/* Rows x themselves for fp32, otherwise the place where they will be converted to. */
static Rows rows_for(const Map *map, const float *x, int64_t stride, int32_t *room, float *scale) {
    if (map->type == SINGLES) return (Rows){(const int32_t *)x, stride, 0};
    return (Rows){room, groups_of(map), scale};
}

/* Called by every thread of a team: converts its share of the rows, then computes its share of the panels. */
static void map_by_team(const Map *map, const float *x, int64_t stride, int64_t count, int32_t *room, float *scale,
                        void *y) {
    Rows rows = rows_for(map, x, stride, room, scale);
    if (map->type != SINGLES) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < count; r++) convert(map, x, stride, r, &rows);
    }
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < panels_of(map); panel++) multiply(map, panel, &rows, count, y);
}

/* The same in one thread, for its own rows. */
static void map_alone(const Map *map, const float *x, int64_t stride, int64_t count, int32_t *room, float *scale,
                      void *y) {
    Rows rows = rows_for(map, x, stride, room, scale);
    if (map->type != SINGLES)
        for (int64_t r = 0; r < count; r++) convert(map, x, stride, r, &rows);
    for (int64_t panel = 0; panel < panels_of(map); panel++) multiply(map, panel, &rows, count, y);
}

/* Rows that one thread takes at a time; 0 if the threads share the panels instead. With many rows, each thread reads
   all weights, so that its results stay in its own cache; with few, reading the weights is most of the work. */
static int64_t rows_alone(int64_t rows, int threads) {
    int64_t turns = (rows + threads * MOST_ROWS - 1) / (threads * MOST_ROWS); /* the same number for each thread */
    int64_t share = (rows + threads * turns - 1) / (threads * turns);
    return share < 4 * ROWS ? 0 : (share + ROWS - 1) / ROWS * ROWS;
}

/* y = second(first(x)), or first(x) without a second map, for x [rows, stride]. Returns 0 if out of memory. */
static int maps(const Map *first, const Map *second, const float *x, int64_t stride, int64_t rows, char *y,
                int threads) {
    if (!rows) return 1;
    const Map *last = second ? second : first;
    int64_t widest = groups_of(first) > groups_of(last) ? groups_of(first) : groups_of(last);
    int64_t chunk = rows_alone(rows, threads), width = last->out * (last->narrow ? 2 : 4);
    int64_t live = chunk ? chunk * threads : rows; /* rows in memory at a time */
    int32_t *room = first->type == SINGLES ? 0 : aligned(live * widest * sizeof(int32_t));
    float *scale = aligned(live * sizeof(float));
    float *inner = second ? aligned(live * first->out * sizeof(float)) : 0;
    int ok = (room || first->type == SINGLES) && scale && (inner || !second);
    if (ok && !chunk) {
#pragma omp parallel num_threads(threads)
        {
            map_by_team(first, x, stride, rows, room, scale, second ? (char *)inner : y);
            if (second) map_by_team(second, inner, first->out, rows, room, scale, y);
        }
    } else if (ok) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t r = 0; r < rows; r += chunk) {
            int64_t count = rows - r < chunk ? rows - r : chunk, at = chunk * omp_get_thread_num();
            int32_t *its = room ? room + at * widest : 0;
            float *between = second ? inner + at * first->out : 0;
            map_alone(first, x + r * stride, stride, count, its, scale + at, second ? (char *)between : y + r * width);
            if (second) map_alone(second, between, first->out, count, its, scale + at, y + r * width);
        }
    }
    free(room);
    free(scale);
    free(inner);
    return ok;
}
#else
int supported(int type) {
    (void)type;
    return 0;
}
static int maps(const Map *first, const Map *second, const float *x, int64_t stride, int64_t rows, char *y,
                int threads) {
    (void)first, (void)second, (void)x, (void)stride, (void)rows, (void)y, (void)threads;
    return 0;
}
#endif

/* Digest of the source that this was compiled from. */
const char *source(void) { return SOURCE; }

int linear(const Map *map, const float *x, int64_t stride, int64_t rows, void *y, int threads) {
    return maps(map, 0, x, stride, rows, y, threads);
}

int feed_forward(const Map *first, const Map *second, const float *x, int64_t stride, int64_t rows, void *y,
                 int threads) {
    return maps(first, second, x, stride, rows, y, threads);
}

/* ---- attention of a decoding step ------------------------------------------------------------------------------ */

typedef struct {
    const void *key, *value; /* [sentences, heads, entries, d_head], fp32 or bf16; rows of d_head are dense */
    int64_t entries;
} Block;

typedef struct {
    int64_t sentences, beams, heads, d_head;
    int64_t narrow_query, narrow_key; /* bf16, not fp32 */
    int64_t blocks;
    int64_t key_sentence, key_head, key_entry; /* strides of all keys and values, in numbers */
    int64_t query_sentence, query_beam, query_head;
    int64_t bias_sentence, bias_beam;
    float scale;
} Shape;

/* Sixteen numbers: one register of AVX-512, two of AVX2, four of SSE or NEON, as the compiler decides. */
typedef float Sixteen __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));
typedef int32_t Order __attribute__((vector_size(64)));

/* Numbers 16 c to 16 c + 15 of a row, fp32 or bf16. */
INLINE Sixteen numbers(const void *row, int64_t c, int narrow) {
    if (!narrow) return ((const Sixteen *)row)[c];
    return (Sixteen)(__builtin_convertvector(((const Halves *)row)[c], Bits) << 16);
}

#define HALF_TURN (Order){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}
#define QUARTER_TURN (Order){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}
#define PAIRS (Order){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}

INLINE float total_of(Sixteen v) {
    v += __builtin_shuffle(v, HALF_TURN);
    v += __builtin_shuffle(v, QUARTER_TURN);
    v += __builtin_shuffle(v, PAIRS);
    return v[0] + v[1];
}

INLINE Sixteen chosen(Order which, Sixteen a, Sixteen b) { return (Sixteen)(((Order)a & which) | ((Order)b & ~which)); }

/* e^x for x <= 0 as 2^n times a polynomial (Cephes, expf.c), to 2 units in the last place; 0 below e^-87, 1.6e-38, and
   NaN for NaN. */
INLINE Sixteen exponential(Sixteen x) {
    Order tiny = x < -87.0f;
    Order n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Order); /* truncation, here to nearest */
    Sixteen whole = __builtin_convertvector(n, Sixteen);
    x = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    Sixteen y = ((((1.9875691500e-4f * x + 1.3981999507e-3f) * x + 8.3334519073e-3f) * x + 4.1665795894e-2f) * x
                 + 1.6666665459e-1f) * x + 5.0000001201e-1f;
    y = (y * x * x + x + 1.0f) * (Sixteen)((n + 127) << 23);
    return chosen(tiny, (Sixteen){0}, y);
}

INLINE Sixteen larger(Sixteen a, Sixteen b) { return chosen(a > b, a, b); }

/* What one query sees: the first head's keys and values of `count` entries, and the numbers added to their logits. */
typedef struct {
    int64_t count;
    const char **key, **value;
    float *added, *weight; /* `weight` is room for one head's softmax */
} Seen;

/* List the entries that a beam of a sentence sees. Most belong to other hypotheses and have bias -inf. */
static void look(const Shape *shape, const Block *blocks, const float *bias, int64_t sentence, Seen *seen) {
    int64_t width = shape->narrow_key ? 2 : 4, entry = shape->key_entry * width;
    int64_t start = sentence * shape->key_sentence * width;
    seen->count = 0;
    for (int64_t b = 0; b < shape->blocks; b++)
        for (int64_t e = 0; e < blocks[b].entries; e++) {
            float added = bias ? *bias++ : 0.0f;
            /* Written in any case: faster than a branch that is mispredicted half of the time. */
            seen->key[seen->count] = (const char *)blocks[b].key + start + e * entry;
            seen->value[seen->count] = (const char *)blocks[b].value + start + e * entry;
            seen->added[seen->count] = added;
            seen->count += added != -INFINITY;
        }
}

/* y [16 chunks] for one query of one head, whose keys and values are `head` bytes after the first head's. A number of
   chunks known to the compiler keeps query and sums in registers. */
INLINE void attend_query(const Seen *seen, int64_t head, const void *query, int narrow_query, int narrow, float scale,
                         float *y, const int64_t chunks) {
    float *weight = seen->weight;
    int64_t rounded = (seen->count + 15) / 16;
    Sixteen q[chunks], sum[chunks], most = {0}, total = {0};
    for (int64_t c = 0; c < chunks; c++) q[c] = numbers(query, c, narrow_query);
    for (int64_t e = 0; e < seen->count; e++) {
        Sixteen product = q[0] * numbers(seen->key[e] + head, 0, narrow);
#pragma GCC unroll 8
        for (int64_t c = 1; c < chunks; c++) product += q[c] * numbers(seen->key[e] + head, c, narrow);
        weight[e] = total_of(product) * scale + seen->added[e];
    }
    for (int64_t e = seen->count; e < 16 * rounded; e++) weight[e] = -INFINITY;
    most -= INFINITY;
    for (int64_t e = 0; e < rounded; e++) most = larger(((Sixteen *)weight)[e], most);
    most = larger(__builtin_shuffle(most, HALF_TURN), most);
    most = larger(__builtin_shuffle(most, QUARTER_TURN), most);
    most = larger(__builtin_shuffle(most, PAIRS), most);
    float largest = most[0] > most[1] ? most[0] : most[1];
    for (int64_t e = 0; e < rounded; e++) {
        ((Sixteen *)weight)[e] = exponential(((Sixteen *)weight)[e] - largest);
        total += ((Sixteen *)weight)[e];
    }
    for (int64_t c = 0; c < chunks; c++) sum[c] = (Sixteen){0};
    for (int64_t e = 0; e < seen->count; e++)
#pragma GCC unroll 8
        for (int64_t c = 0; c < chunks; c++) sum[c] += weight[e] * numbers(seen->value[e] + head, c, narrow);
    float factor = 1.0f / total_of(total);
    for (int64_t c = 0; c < chunks; c++) ((Sixteen *)y)[c] = sum[c] * factor;
}

/* The inputs that all threads of a call read, and `out`. */
typedef struct {
    const Shape *shape;
    const void *query;
    const Block *blocks;
    const float *bias;
    float *out;
} Call;

/* Heads `begin` to `end` of one sentence. */
INLINE void heads(const Call *call, int64_t sentence, int64_t begin, int64_t end, Seen *seen) {
    const Shape *shape = call->shape;
    int64_t d = shape->d_head, stride = shape->key_head * (shape->narrow_key ? 2 : 4);
    int narrow = (int)shape->narrow_key, narrow_query = (int)shape->narrow_query;
    for (int64_t beam = 0; beam < shape->beams; beam++) {
        const float *bias = call->bias;
        if (bias) bias += sentence * shape->bias_sentence + beam * shape->bias_beam;
        if (beam == 0 || (bias && shape->bias_beam)) look(shape, call->blocks, bias, sentence, seen);
        for (int64_t head = begin; head < end; head++) {
            int64_t place = sentence * shape->query_sentence + beam * shape->query_beam + head * shape->query_head;
            const char *q = (const char *)call->query + place * (narrow_query ? 2 : 4);
            float *y = call->out + ((sentence * shape->beams + beam) * shape->heads + head) * d;
            if (d == 64 && narrow)
                attend_query(seen, head * stride, q, narrow_query, 1, shape->scale, y, 4);
            else if (d == 64)
                attend_query(seen, head * stride, q, narrow_query, 0, shape->scale, y, 4);
            else
                attend_query(seen, head * stride, q, narrow_query, narrow, shape->scale, y, d / 16);
        }
    }
}

/* The same function for the widest instructions that the CPU has, chosen by hand, since gcc's target_clones knows these
   levels only from gcc 12 on and needs a loader that musl does not have. */
typedef void Heads(const Call *, int64_t, int64_t, int64_t, Seen *);
static void heads_plain(const Call *call, int64_t sentence, int64_t begin, int64_t end, Seen *seen) {
    heads(call, sentence, begin, end, seen);
}
#if defined(__x86_64__) && defined(__GNUC__)
WITH("avx2,fma") static void heads_256(const Call *call, int64_t sentence, int64_t begin, int64_t end, Seen *seen) {
    heads(call, sentence, begin, end, seen);
}
WITH(BASE) static void heads_512(const Call *call, int64_t sentence, int64_t begin, int64_t end, Seen *seen) {
    heads(call, sentence, begin, end, seen);
}
static Heads *widest_heads(void) {
    if (supported(SINGLES)) return heads_512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? heads_256 : heads_plain;
}
#else
static Heads *widest_heads(void) { return heads_plain; }
#endif

/* out [sentences, beams, heads, d_head] for query [sentences, beams, heads, d_head] of any strides, with dense rows;
   d_head is a multiple of 16. Returns 0 if out of memory. */
int attend(const Shape *shape, const void *query, const Block *blocks, const float *bias, float *out, int threads) {
    const Call call = {shape, query, blocks, bias, out};
    Heads *widest = widest_heads();
    int64_t entries = 0;
    int ok = 1;
    for (int64_t b = 0; b < shape->blocks; b++) entries += blocks[b].entries;
    /* Waking the other threads takes a few microseconds, in which one thread can do this much. */
    int64_t work = shape->sentences * shape->beams * shape->heads * shape->d_head * entries;
    /* Few sentences: the threads share their heads. Many: a thread looks once for all heads of a sentence. */
    int64_t parts = shape->sentences >= 4 * threads ? 1 : shape->heads;
#pragma omp parallel num_threads(threads) if (work > 100000)
    {
        char *room = malloc((size_t)(entries + 16) * 2 * (sizeof(char *) + sizeof(float)));
        const char **key = (const char **)room;
        float *added = (float *)(key + 2 * entries);
        Seen seen = {0, key, key + entries, added, added + entries};
        if (!room) {
#pragma omp atomic write
            ok = 0;
        }
#pragma omp for collapse(2) schedule(static)
        for (int64_t sentence = 0; sentence < shape->sentences; sentence++)
            for (int64_t part = 0; part < parts; part++)
                if (room)
                    widest(&call, sentence, part * shape->heads / parts, (part + 1) * shape->heads / parts, &seen);
        free(room);
    }
    return ok;
}
