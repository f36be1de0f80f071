/* Rows of quantized matrices times a few tokens; native.py calls this with ctypes.
 *
 * Grouped codes (2, 3, 4 bits). Activations are quantized to int8 for each group, x ~ a * xi, so that with w = (q - z) * s
 *     sum over a group of w * x  =  s * a * (sum of q * xi - z * sum of xi)
 * and the inner sum is one integer dot product. Codes are packed (packing.py) so that the codes at one shift of a register full of
 * bytes belong to runs of consecutive inputs; `arrange` puts the activations in that order once, and a group's integer sums
 * share one register: one conversion and one multiplication serve all codes of the register.
 *
 * int8 codes are multiplied with float activations: reading them is what takes the time.
 *
 * Letters: T tokens, N rows, K columns, G groups a row, p bits of a plane, b bytes of a group in a plane.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64 /* bytes of codes handled at once; activations are arranged for it on every machine */
#define TOKENS 16

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")))
#define AVX2 __attribute__((target("avx2,f16c,fma")))
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* One plane of one row: adds to acc[t] the sum over groups of scale[g] * xscale[t][g] * (integer dot product of the group).
 * codes: `bytes` packed bytes. x: int8 [T][blocks][8 / p][BLOCK], zero where there is no code. scale: [G]. */
typedef void (*plane_row)(const uint8_t *codes, ptrdiff_t bytes, int p, ptrdiff_t b, const int8_t *x, ptrdiff_t xstride,
                          const float *scale, const float *xscale, ptrdiff_t G, int T, float *acc);
/* Scales of one row as floats, and acc[t] = - sum over groups of scale * zero * xsum[t][g]. */
typedef void (*row_scales)(const uint16_t *scale, const uint16_t *zero, ptrdiff_t G, const float *xsum, int T, float *out,
                           float *acc);
/* acc[t] = sum over k of w[k] * x[t][k], for w of int8, bfloat16 or float16. */
typedef void (*plain_row)(const void *w, const float *x, ptrdiff_t K, int T, float *acc);

enum { INT8, BFLOAT16, FLOAT16, PLAIN_FORMATS };

/* ---- generic ---- */

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    float f;
    if (magnitude >= 0x7c00) bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
    else if (magnitude >= 0x400) bits = sign | ((magnitude << 13) + 0x38000000);
    else { /* zero and subnormal */
        f = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    memcpy(&f, &bits, 4);
    return f;
}

static void row_scales_generic(const uint16_t *scale, const uint16_t *zero, ptrdiff_t G, const float *xsum, int T, float *out,
                               float *acc) {
    for (int t = 0; t < T; t++) acc[t] = 0;
    for (ptrdiff_t g = 0; g < G; g++) {
        out[g] = half_to_float(scale[g]);
        const float offset = out[g] * half_to_float(zero[g]);
        for (int t = 0; t < T; t++) acc[t] -= offset * xsum[t * G + g];
    }
}

static void plane_row_generic(const uint8_t *codes, ptrdiff_t bytes, int p, ptrdiff_t b, const int8_t *x, ptrdiff_t xstride,
                              const float *scale, const float *xscale, ptrdiff_t G, int T, float *acc) {
    const int shifts = 8 / p, mask = (1 << p) - 1;
    for (int t = 0; t < T; t++) {
        const int8_t *xt = x + t * xstride;
        for (ptrdiff_t g = 0; g < G; g++) {
            int32_t sum = 0;
            for (ptrdiff_t i = g * b; i < (g + 1) * b; i++) {
                const int8_t *xi = xt + (i / BLOCK) * BLOCK * shifts + i % BLOCK;
                for (int s = 0; s < shifts; s++) sum += ((codes[i] >> s * p) & mask) * xi[s * BLOCK];
            }
            acc[t] += scale[g] * xscale[t * G + g] * (float)sum;
        }
    }
    (void)bytes;
}

static inline float from_int8(const void *w, ptrdiff_t k) { return ((const int8_t *)w)[k]; }
static inline float from_half(const void *w, ptrdiff_t k) { return half_to_float(((const uint16_t *)w)[k]); }
static inline float from_bfloat(const void *w, ptrdiff_t k) {
    const uint32_t bits = (uint32_t)((const uint16_t *)w)[k] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

#define GENERIC_ROW(NAME, FROM)                                                        \
    static void NAME(const void *w, const float *x, ptrdiff_t K, int T, float *acc) {  \
        for (int t = 0; t < T; t++, x += K) {                                          \
            float lanes[16] = {0};                                                     \
            ptrdiff_t k = 0;                                                           \
            for (; k + 16 <= K; k += 16)                                               \
                for (int i = 0; i < 16; i++) lanes[i] += FROM(w, k + i) * x[k + i];    \
            acc[t] = 0;                                                                \
            for (; k < K; k++) acc[t] += FROM(w, k) * x[k];                            \
            for (int i = 0; i < 16; i++) acc[t] += lanes[i];                           \
        }                                                                              \
    }
GENERIC_ROW(int8_row_generic, from_int8)
GENERIC_ROW(bfloat_row_generic, from_bfloat)
GENERIC_ROW(half_row_generic, from_half)

/* The nearest bfloat16 or float16, as a float: what torch stores between its operations. */
static float rounded(float f, int format) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (format == BFLOAT16 && f == f) {
        bits += 0x7fff + (bits >> 16 & 1);
        bits &= 0xffff0000;
        memcpy(&f, &bits, 4);
    } else if (format == FLOAT16 && f == f) {
        const float magnitude = fabsf(f);
        if (magnitude >= 65520) return copysignf(INFINITY, f);
        /* adding and subtracting 2^13 ulps of the value drops the bits below half precision, subnormals included */
        int exponent;
        frexpf(magnitude, &exponent);
        const float step = ldexpf(1, (exponent < -13 ? -13 : exponent) + 12);
        volatile float sum = magnitude + step;
        f = copysignf(sum - step, f);
    }
    return f;
}

/* ---- x86 ---- */
#if defined(__x86_64__)

/* Lane i of a register holds the sums of bytes 4i .. 4i + 3 of a block, so it belongs to group (first byte) / b. */
AVX512 static void plane_row_avx512(const uint8_t *codes, ptrdiff_t bytes, int p, ptrdiff_t b, const int8_t *x,
                                    ptrdiff_t xstride, const float *scale, const float *xscale, ptrdiff_t G, int T,
                                    float *acc) {
    const int shifts = 8 / p;
    const __m512i mask = _mm512_set1_epi8((char)((1 << p) - 1));
    const __m512i first = _mm512_set_epi32(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512i spread = _mm512_srl_epi32(first, _mm_cvtsi32_si128(__builtin_ctzll((unsigned long long)b))); /* / b */
    const ptrdiff_t per_block = b < BLOCK ? BLOCK / b : 1; /* groups a block; b > BLOCK does not occur (group <= 256) */
    __m512 sums[TOKENS];
    for (int t = 0; t < T; t++) sums[t] = _mm512_setzero_ps();
    ptrdiff_t g = 0;
    for (ptrdiff_t i = 0; i < bytes; i += BLOCK, g += per_block) {
        const ptrdiff_t left = bytes - i;
        const __mmask64 have = left >= BLOCK ? ~0ull : (1ull << left) - 1;
        const __mmask16 groups = G - g >= 16 ? 0xffff : (__mmask16)((1u << (G - g)) - 1);
        const __m512i packed = _mm512_maskz_loadu_epi8(have, codes + i);
        const __m512 w = _mm512_maskz_loadu_ps(groups, scale + g);
        const int8_t *xi = x + (i / BLOCK) * BLOCK * shifts;
        for (int t = 0; t < T; t++, xi += xstride) {
            __m512i sum = _mm512_setzero_si512();
            if (p == 2) {
                sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(packed, mask), _mm512_loadu_si512(xi));
                sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(packed, 2), mask), _mm512_loadu_si512(xi + 64));
                sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask), _mm512_loadu_si512(xi + 128));
                sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(packed, 6), mask), _mm512_loadu_si512(xi + 192));
            } else {
                for (int s = 0; s < shifts; s++)
                    sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(packed, s * p), mask),
                                              _mm512_loadu_si512(xi + s * BLOCK));
            }
            const __m512 both = _mm512_mul_ps(w, _mm512_maskz_loadu_ps(groups, xscale + t * G + g));
            sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_permutexvar_ps(spread, both), sums[t]);
        }
    }
    for (int t = 0; t < T; t++) acc[t] += _mm512_reduce_add_ps(sums[t]);
}

AVX2 static float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

AVX2 static void plane_row_avx2(const uint8_t *codes, ptrdiff_t bytes, int p, ptrdiff_t b, const int8_t *x, ptrdiff_t xstride,
                                const float *scale, const float *xscale, ptrdiff_t G, int T, float *acc) {
    const int shifts = 8 / p;
    const __m256i mask = _mm256_set1_epi8((char)((1 << p) - 1)), ones = _mm256_set1_epi16(1);
    __m256 sums[TOKENS];
    for (int t = 0; t < T; t++) sums[t] = _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < bytes; i += 32) {
        uint8_t tail[32] = {0};
        const uint8_t *from = codes + i;
        if (bytes - i < 32) from = memcpy(tail, from, (size_t)(bytes - i));
        const __m256i packed = _mm256_loadu_si256((const __m256i *)from);
        const __m256i byte = _mm256_add_epi32(_mm256_set1_epi32((int)i), _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        __m256i where = _mm256_srl_epi32(byte, _mm_cvtsi32_si128(__builtin_ctzll((unsigned long long)b))); /* / b */
        where = _mm256_min_epi32(where, _mm256_set1_epi32((int)G - 1)); /* lanes beyond the row have zero codes */
        const __m256 w = _mm256_i32gather_ps(scale, where, 4);
        const int8_t *xi = x + (i / BLOCK) * BLOCK * shifts + i % BLOCK;
        for (int t = 0; t < T; t++, xi += xstride) {
            __m256i sum = _mm256_setzero_si256();
            for (int s = 0; s < shifts; s++) { /* codes <= 15 and |x| <= 127: the 16-bit pair sums do not saturate */
                const __m256i q = _mm256_and_si256(_mm256_srli_epi16(packed, s * p), mask);
                const __m256i pairs = _mm256_maddubs_epi16(q, _mm256_loadu_si256((const __m256i *)(xi + s * BLOCK)));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
            }
            const __m256 both = _mm256_mul_ps(w, _mm256_i32gather_ps(xscale + t * G, where, 4));
            sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, sums[t]);
        }
    }
    for (int t = 0; t < T; t++) acc[t] += sum8(sums[t]);
}

AVX512 static void row_scales_avx512(const uint16_t *scale, const uint16_t *zero, ptrdiff_t G, const float *xsum, int T,
                                     float *out, float *acc) {
    __m512 sums[TOKENS];
    for (int t = 0; t < T; t++) sums[t] = _mm512_setzero_ps();
    for (ptrdiff_t g = 0; g < G; g += 16) {
        const __mmask16 have = G - g >= 16 ? 0xffff : (__mmask16)((1u << (G - g)) - 1);
        const __m512 s = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(have, scale + g));
        const __m512 z = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(have, zero + g));
        const __m512 offset = _mm512_mul_ps(s, z);
        _mm512_mask_storeu_ps(out + g, have, s);
        for (int t = 0; t < T; t++)
            sums[t] = _mm512_fnmadd_ps(offset, _mm512_maskz_loadu_ps(have, xsum + t * G + g), sums[t]);
    }
    for (int t = 0; t < T; t++) acc[t] = _mm512_reduce_add_ps(sums[t]);
}

AVX2 static void row_scales_avx2(const uint16_t *scale, const uint16_t *zero, ptrdiff_t G, const float *xsum, int T, float *out,
                                 float *acc) {
    __m256 sums[TOKENS];
    for (int t = 0; t < T; t++) sums[t] = _mm256_setzero_ps();
    ptrdiff_t g = 0;
    for (; g + 8 <= G; g += 8) {
        const __m256 s = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scale + g)));
        const __m256 offset = _mm256_mul_ps(s, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(zero + g))));
        _mm256_storeu_ps(out + g, s);
        for (int t = 0; t < T; t++) sums[t] = _mm256_fnmadd_ps(offset, _mm256_loadu_ps(xsum + t * G + g), sums[t]);
    }
    for (int t = 0; t < T; t++) acc[t] = sum8(sums[t]);
    for (; g < G; g++) {
        out[g] = half_to_float(scale[g]);
        for (int t = 0; t < T; t++) acc[t] -= out[g] * half_to_float(zero[g]) * xsum[t * G + g];
    }
}

/* Four tokens at a time share the conversion of the weights. */
#define PLAIN_ROW(NAME, TARGET, TYPE, VECTOR, LANES, ZERO, WEIGHTS, LOAD, FMA, SUM, FROM)                           \
    TARGET static void NAME(const void *weights, const float *x, ptrdiff_t K, int T, float *acc) {                 \
        const TYPE *w = weights;                                                                                   \
        const ptrdiff_t whole = K / LANES * LANES;                                                                 \
        int t = 0;                                                                                                 \
        for (; t + 4 <= T; t += 4) {                                                                               \
            const float *x0 = x + t * K, *x1 = x0 + K, *x2 = x1 + K, *x3 = x2 + K;                                 \
            VECTOR a = ZERO(), b = a, c = a, d = a;                                                                \
            for (ptrdiff_t k = 0; k < whole; k += LANES) {                                                         \
                const VECTOR q = WEIGHTS(w + k);                                                                   \
                a = FMA(q, LOAD(x0 + k), a), b = FMA(q, LOAD(x1 + k), b);                                          \
                c = FMA(q, LOAD(x2 + k), c), d = FMA(q, LOAD(x3 + k), d);                                          \
            }                                                                                                      \
            acc[t] = SUM(a), acc[t + 1] = SUM(b), acc[t + 2] = SUM(c), acc[t + 3] = SUM(d);                        \
        }                                                                                                          \
        for (; t < T; t++) {                                                                                       \
            const float *x0 = x + t * K;                                                                           \
            VECTOR a = ZERO(), b = a, c = a, d = a;                                                                \
            ptrdiff_t k = 0;                                                                                       \
            for (; k + 4 * LANES <= K; k += 4 * LANES) {                                                           \
                a = FMA(WEIGHTS(w + k), LOAD(x0 + k), a);                                                          \
                b = FMA(WEIGHTS(w + k + LANES), LOAD(x0 + k + LANES), b);                                          \
                c = FMA(WEIGHTS(w + k + 2 * LANES), LOAD(x0 + k + 2 * LANES), c);                                  \
                d = FMA(WEIGHTS(w + k + 3 * LANES), LOAD(x0 + k + 3 * LANES), d);                                  \
            }                                                                                                      \
            for (; k < whole; k += LANES) a = FMA(WEIGHTS(w + k), LOAD(x0 + k), a);                                \
            acc[t] = SUM(a) + SUM(b) + SUM(c) + SUM(d);                                                            \
        }                                                                                                          \
        for (ptrdiff_t k = whole; k < K; k++)                                                                      \
            for (t = 0; t < T; t++) acc[t] += FROM(w, k) * x[t * K + k];                                           \
    }
#define INT8_16(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define BFLOAT_16(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define HALF_16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define INT8_8(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define BFLOAT_8(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define HALF_8(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define ROW_512(NAME, TYPE, WEIGHTS, FROM) \
    PLAIN_ROW(NAME, AVX512, TYPE, __m512, 16, _mm512_setzero_ps, WEIGHTS, _mm512_loadu_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps, FROM)
#define ROW_256(NAME, TYPE, WEIGHTS, FROM) \
    PLAIN_ROW(NAME, AVX2, TYPE, __m256, 8, _mm256_setzero_ps, WEIGHTS, _mm256_loadu_ps, _mm256_fmadd_ps, sum8, FROM)
ROW_512(int8_row_avx512, int8_t, INT8_16, from_int8)
ROW_512(bfloat_row_avx512, uint16_t, BFLOAT_16, from_bfloat)
ROW_512(half_row_avx512, uint16_t, HALF_16, from_half)
ROW_256(int8_row_avx2, int8_t, INT8_8, from_int8)
ROW_256(bfloat_row_avx2, uint16_t, BFLOAT_8, from_bfloat)
ROW_256(half_row_avx2, uint16_t, HALF_8, from_half)

#elif defined(__aarch64__)

static void plane_row_neon(const uint8_t *codes, ptrdiff_t bytes, int p, ptrdiff_t b, const int8_t *x, ptrdiff_t xstride,
                           const float *scale, const float *xscale, ptrdiff_t G, int T, float *acc) {
    const int shifts = 8 / p;
    const uint8x16_t mask = vdupq_n_u8((uint8_t)((1 << p) - 1));
    float32x4_t sums[TOKENS];
    for (int t = 0; t < T; t++) sums[t] = vdupq_n_f32(0);
    for (ptrdiff_t i = 0; i < bytes; i += 16) {
        uint8_t tail[16] = {0};
        const uint8_t *from = codes + i;
        if (bytes - i < 16) from = memcpy(tail, from, (size_t)(bytes - i));
        const uint8x16_t packed = vld1q_u8(from);
        const int8_t *xi = x + (i / BLOCK) * BLOCK * shifts + i % BLOCK;
        for (int t = 0; t < T; t++, xi += xstride) {
            int32x4_t sum = vdupq_n_s32(0);
            for (int s = 0; s < shifts; s++) {
                const int8x16_t q = vreinterpretq_s8_u8(vandq_u8(vshlq_u8(packed, vdupq_n_s8((int8_t)(-s * p))), mask));
                const int8x16_t v = vld1q_s8(xi + s * BLOCK);
                const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(q), vget_low_s8(v)));
                const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(q), vget_high_s8(v)));
                sum = vaddq_s32(sum, vpaddq_s32(low, high));
            }
            float both[4];
            for (int j = 0; j < 4; j++) { /* lanes beyond the row have zero codes: any group of the row will do */
                const ptrdiff_t g = (i + 4 * j) / b < G ? (i + 4 * j) / b : G - 1;
                both[j] = scale[g] * xscale[t * G + g];
            }
            sums[t] = vfmaq_f32(sums[t], vcvtq_f32_s32(sum), vld1q_f32(both));
        }
    }
    for (int t = 0; t < T; t++) acc[t] += vaddvq_f32(sums[t]);
}
#endif

/* ---- which machine ---- */

struct isa {
    const char *name;
    plane_row plane;
    row_scales scales;
    plain_row plain[PLAIN_FORMATS];
};

static const struct isa GENERIC = {"generic", plane_row_generic, row_scales_generic, {int8_row_generic, bfloat_row_generic, half_row_generic}};
static struct isa chosen = {"generic", plane_row_generic, row_scales_generic, {int8_row_generic, bfloat_row_generic, half_row_generic}};

/* Takes the named instruction set, or the best for NULL. Returns its name, or NULL where this machine does not have it. */
const char *apex_select(const char *name) {
#if defined(__x86_64__)
    static const struct isa avx512 = {"avx512-vnni", plane_row_avx512, row_scales_avx512, {int8_row_avx512, bfloat_row_avx512, half_row_avx512}};
    static const struct isa avx2 = {"avx2", plane_row_avx2, row_scales_avx2, {int8_row_avx2, bfloat_row_avx2, half_row_avx2}};
    __builtin_cpu_init();
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const struct isa *known[] = {has_avx512 ? &avx512 : NULL, has_avx2 ? &avx2 : NULL, &GENERIC};
#elif defined(__aarch64__)
    static const struct isa neon = {"neon", plane_row_neon, row_scales_generic, {int8_row_generic, bfloat_row_generic, half_row_generic}};
    const struct isa *known[] = {&neon, &GENERIC};
#else
    const struct isa *known[] = {&GENERIC};
#endif
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i] && (!name || !strcmp(name, known[i]->name))) {
            chosen = *known[i];
            return chosen.name;
        }
    return NULL;
}

/* ---- matrices ---- */

struct matrix {
    ptrdiff_t N, K, group, bits; /* group 0: not grouped */
    ptrdiff_t format;            /* of a matrix without groups; a 16-bit one has no scale */
    const uint8_t *codes[2];     /* the planes, lowest bits first, or the codes or weights */
    const void *scale;           /* half [N][G] or float [N] */
    const uint16_t *zero;        /* half [N][G] */
};

struct expert {
    struct matrix up, down;
};

/* The inputs of a matrix for T tokens, as its rows want them. */
struct inputs {
    int T, planes, widths[2];
    const float *x; /* [T][K] */
    int8_t *xi[2];  /* of each plane: [T][stride] */
    ptrdiff_t stride[2];
    float *scale, *sum; /* [T][G] */
};

static ptrdiff_t arranged_bytes(ptrdiff_t K, int p) { return (K * p / 8 + BLOCK - 1) / BLOCK * BLOCK * (8 / p); }

/* Activations of one token to int8 by groups: xi in the order of plane p, x ~ scale * xi, sum = scale * (sum of xi). */
static void arrange(const float *x, ptrdiff_t K, ptrdiff_t group, int p, int8_t *xi, float *scale, float *sum) {
    const ptrdiff_t b = group * p / 8, G = K / group;
    const int shifts = 8 / p;
    memset(xi, 0, (size_t)arranged_bytes(K, p));
    for (ptrdiff_t g = 0; g < G; g++) {
        const float *xg = x + g * group;
        float most = 0;
        for (ptrdiff_t k = 0; k < group; k++) most = fabsf(xg[k]) > most ? fabsf(xg[k]) : most;
        const float inverse = most > 0 ? 127 / most : 0;
        int32_t total = 0;
        for (int s = 0; s < shifts; s++)
            for (ptrdiff_t j = 0; j < b; j++) {
                const ptrdiff_t at = g * b + j;
                const int8_t v = (int8_t)lrintf(xg[s * b + j] * inverse);
                xi[(at / BLOCK) * BLOCK * shifts + s * BLOCK + at % BLOCK] = v;
                total += v;
            }
        scale[g] = most / 127;
        sum[g] = scale[g] * (float)total;
    }
}

/* Bytes of scratch that the inputs of a matrix with K columns need. */
static size_t scratch_bytes(const struct matrix *m, int T) {
    const ptrdiff_t G = m->group ? m->K / m->group : 0;
    return (size_t)T * (size_t)(arranged_bytes(m->K, 2) + arranged_bytes(m->K, 1) + arranged_bytes(m->K, 4) +
                                2 * G * (ptrdiff_t)sizeof(float)) + BLOCK;
}

static struct inputs prepare(const struct matrix *m, const float *x, int T, void *scratch) {
    struct inputs in = {.T = T, .x = x, .planes = m->bits == 3 ? 2 : 1, .widths = {m->bits == 4 ? 4 : 2, 1}};
    if (!m->group) return in;
    const ptrdiff_t G = m->K / m->group;
    in.scale = scratch;
    in.sum = in.scale + T * G;
    int8_t *next = (int8_t *)(in.sum + T * G);
    for (int i = 0; i < in.planes; i++) {
        in.stride[i] = arranged_bytes(m->K, in.widths[i]);
        in.xi[i] = next;
        next += T * in.stride[i];
        for (int t = 0; t < T; t++)
            arrange(x + t * m->K, m->K, m->group, in.widths[i], in.xi[i] + t * in.stride[i], in.scale + t * G, in.sum + t * G);
    }
    return in;
}

/* y[t] = row n times the inputs. scales: room for G floats. */
static void row(const struct matrix *m, ptrdiff_t n, const struct inputs *in, float *scales, float *y) {
    const ptrdiff_t K = m->K;
    if (!m->group) {
        chosen.plain[m->format](m->codes[0] + n * K * (m->format == INT8 ? 1 : 2), in->x, K, in->T, y);
        if (m->format == INT8)
            for (int t = 0; t < in->T; t++) y[t] *= ((const float *)m->scale)[n];
        return;
    }
    const ptrdiff_t G = K / m->group;
    chosen.scales((const uint16_t *)m->scale + n * G, m->zero + n * G, G, in->sum, in->T, scales, y);
    for (int i = 0; i < in->planes; i++) {
        const ptrdiff_t b = m->group * in->widths[i] / 8, bytes = K * in->widths[i] / 8;
        const plane_row plane = b % 4 || b > BLOCK ? plane_row_generic : chosen.plane;
        float acc[TOKENS] = {0};
        plane(m->codes[i] + n * bytes, bytes, in->widths[i], b, in->xi[i], in->stride[i], scales, in->scale, G, in->T, acc);
        for (int t = 0; t < in->T; t++) y[t] += i ? 4 * acc[t] : acc[t]; /* the high plane of three bits counts fours */
    }
}

static ptrdiff_t room(const struct matrix *m) { return m->group ? m->K / m->group : 1; }

/* y [T][N] = x [T][K] times the matrix, T <= TOKENS, rounded to a 16-bit format if there is one. */
static void linear(const struct matrix *m, const float *x, int T, float *y, int round, void *scratch) {
    const struct inputs in = prepare(m, x, T, scratch);
#pragma omp parallel
    {
        float scales[room(m)], acc[TOKENS];
#pragma omp for schedule(static)
        for (ptrdiff_t n = 0; n < m->N; n++) {
            row(m, n, &in, scales, acc);
            for (int t = 0; t < T; t++) y[t * m->N + n] = rounded(acc[t], round);
        }
    }
}

/* y [T][N / 2] = silu(first half of the rows) * second half, T <= TOKENS; `round` as torch rounds after each operation. */
static void swiglu(const struct matrix *m, const float *x, int T, float *y, int round, void *scratch) {
    const struct inputs in = prepare(m, x, T, scratch);
    const ptrdiff_t I = m->N / 2;
#pragma omp parallel
    {
        float scales[room(m)], gate[TOKENS], up[TOKENS];
#pragma omp for schedule(static)
        for (ptrdiff_t n = 0; n < I; n++) {
            row(m, n, &in, scales, gate);
            row(m, I + n, &in, scales, up);
            for (int t = 0; t < T; t++) {
                const float g = rounded(gate[t], round);
                y[t * I + n] = rounded(rounded(g / (1 + expf(-g)), round) * rounded(up[t], round), round);
            }
        }
    }
}

/* y [T][N] = x [T][K] times the matrix, any T. Returns 0, or -1 without memory. */
int apex_linear(const struct matrix *m, const float *x, ptrdiff_t T, float *y) {
    void *scratch = malloc(scratch_bytes(m, T < TOKENS ? (int)T : TOKENS));
    if (!scratch) return -1;
    for (ptrdiff_t t = 0; t < T; t += TOKENS)
        linear(m, x + t * m->K, (int)(T - t < TOKENS ? T - t : TOKENS), y + t * m->N, 0, scratch);
    free(scratch);
    return 0;
}

/* Experts with SwiGLU (rows of up: all gates, then all ups; silu) for the tokens routed to them.
 * The i-th expert, experts[slots[i]], serves the pairs first[i] .. first[i + 1]:
 * out[rows[j]] [H] = gates[rows[j]] * expert(x[tokens[j]]). `round`: the 16-bit format of the activations, 0 for float.
 * Returns 0, or -1 without memory. */
int apex_swiglu_experts(const struct expert *experts, const int64_t *slots, ptrdiff_t count, const int64_t *first,
                        const int64_t *tokens, const int64_t *rows, const float *gates, const float *x, int round, float *out) {
    if (!count) return 0;
    const ptrdiff_t H = experts[slots[0]].up.K, I = experts[slots[0]].down.K;
    int64_t most = 0;
    for (ptrdiff_t i = 0; i < count; i++) most = first[i + 1] - first[i] > most ? first[i + 1] - first[i] : most;
    const int M = most < TOKENS ? (int)most : TOKENS;
    const size_t floats = (size_t)M * (size_t)(2 * H + I);
    const size_t up_bytes = scratch_bytes(&experts[slots[0]].up, M), down_bytes = scratch_bytes(&experts[slots[0]].down, M);
    float *in = malloc(floats * sizeof(float) + (up_bytes > down_bytes ? up_bytes : down_bytes));
    if (!in) return -1;
    float *hidden = in + M * H, *y = hidden + M * I;
    void *scratch = y + M * H;
    for (ptrdiff_t i = 0; i < count; i++)
        for (int64_t j = first[i]; j < first[i + 1]; j += TOKENS) {
            const int T = (int)(first[i + 1] - j < TOKENS ? first[i + 1] - j : TOKENS);
            for (int t = 0; t < T; t++) memcpy(in + t * H, x + tokens[j + t] * H, (size_t)H * sizeof(float));
            swiglu(&experts[slots[i]].up, in, T, hidden, round, scratch);
            linear(&experts[slots[i]].down, hidden, T, y, round, scratch);
            for (int t = 0; t < T; t++)
                for (ptrdiff_t h = 0; h < H; h++) out[rows[j + t] * H + h] = gates[rows[j + t]] * y[t * H + h];
        }
    free(in);
    return 0;
}
