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
 * bfloat16 weights are multiplied with float activations too, or, where every bit must be torch's own, with bfloat16 ones in the
 * order of the sums of oneDNN, which torch calls: IN_PAIRS.
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
#define MOST_GROUP 256
#define TILE 32  /* rows that a thread takes at once */
#define AHEAD 2048 /* bytes to prefetch ahead: rows are too short for the processor to see the pattern */
#define CHUNK 512 /* inputs that a sum of oneDNN takes in before it begins anew */
#define PAIRS 64 /* (token, expert) pairs in the works at once */
#define ALONE 250000 /* products up to which one thread does all: to wake another takes longer, beside loads many times so */

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")))
#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#endif
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
/* All of it for rows of 2-bit codes in groups of 64, the usual case, where an instruction set has it:
 * y[t * ystride + n] = row n times the inputs of t. */
typedef void (*int2_rows)(const uint8_t *codes, const uint16_t *scale, const uint16_t *zero, ptrdiff_t G, ptrdiff_t rows,
                          const int8_t *x, ptrdiff_t xstride, const float *xscale, const float *xsum, int T, float *y,
                          ptrdiff_t ystride);
/* acc[t] = sum over k of w[k] * x[t][k], for w of int8, bfloat16 or float16. */
typedef void (*plain_row)(const void *w, const float *x, ptrdiff_t K, int T, float *acc);

/* IN_PAIRS: bfloat16 times bfloat16, where `apex_has_pairs`. */
enum { INT8, BFLOAT16, FLOAT16, PLAIN_FORMATS, IN_PAIRS = PLAIN_FORMATS };

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

/* The nearest bfloat16 or float16, as a float: what torch stores between its operations. Format 0: f itself. */
static inline float rounded(float f, int format) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint32_t sign = bits & 0x80000000, magnitude = bits & 0x7fffffff;
    if (format == BFLOAT16) bits = f == f ? (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000 : bits;
    if (format == FLOAT16) {
        const float shifted = (fabsf(f) + 0.5f) - 0.5f; /* the nearest multiple of 2^-24, the subnormals' step */
        uint32_t small, normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & 0xffffe000;
        memcpy(&small, &shifted, 4);
        normal = normal >= 0x47800000 ? 0x7f800000 : normal; /* 2^16 */
        normal = magnitude < 0x38800000 ? small : normal;    /* 2^-14 */
        bits = f == f ? sign | normal : bits;
    }
    memcpy(&f, &bits, 4);
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

/* The sums of four registers: thirteen operations for what takes eight each. */
AVX512 static inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* y[t][r] = R rows of 2-bit codes in groups of 64 times T inputs: four groups a block, sixteen scales at once.
 * R and T are constants where this is inlined, so that the arrays are registers. */
AVX512 static inline __attribute__((always_inline)) void int2_some(const uint8_t *codes, const uint16_t *scale, const uint16_t *zero,
                                                                   ptrdiff_t G, const int8_t *x, ptrdiff_t xstride,
                                                                   const float *xscale, const float *xsum, const int R, const int T,
                                                                   float *y, ptrdiff_t ystride) {
    const __m512i mask = _mm512_set1_epi8(3);
    const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    __m512 sums[8], w[8];
    for (int i = 0; i < R * T; i++) sums[i] = _mm512_setzero_ps();
    for (ptrdiff_t g = 0; g < G; g += 16) {
        const ptrdiff_t left = G - g < 16 ? G - g : 16;
        const __mmask16 have = (__mmask16)((1u << left) - 1);
        for (int r = 0; r < R; r++) {
            _mm_prefetch((const char *)(scale + r * G + g) + AHEAD / 4, _MM_HINT_T0);
            _mm_prefetch((const char *)(zero + r * G + g) + AHEAD / 4, _MM_HINT_T0);
            const __m512 s = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(have, scale + r * G + g));
            const __m512 offset = _mm512_mul_ps(s, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(have, zero + r * G + g)));
            for (int t = 0; t < T; t++) {
                w[r * T + t] = _mm512_mul_ps(s, _mm512_maskz_loadu_ps(have, xscale + t * G + g));
                sums[r * T + t] = _mm512_fnmadd_ps(offset, _mm512_maskz_loadu_ps(have, xsum + t * G + g), sums[r * T + t]);
            }
        }
        for (ptrdiff_t j = 0; j < left; j += 4) {
            const __mmask64 bytes = left - j >= 4 ? ~0ull : (1ull << (left - j) * 16) - 1;
            const __m512i which = _mm512_add_epi32(spread, _mm512_set1_epi32((int)j));
            for (int r = 0; r < R; r++) {
                const __m512i packed = _mm512_maskz_loadu_epi8(bytes, codes + (r * G + g + j) * 16);
                _mm_prefetch((const char *)codes + (r * G + g + j) * 16 + AHEAD, _MM_HINT_T0);
                const __m512i q0 = _mm512_and_si512(packed, mask), q1 = _mm512_and_si512(_mm512_srli_epi16(packed, 2), mask);
                const __m512i q2 = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
                const __m512i q3 = _mm512_and_si512(_mm512_srli_epi16(packed, 6), mask);
                for (int t = 0; t < T; t++) {
                    const int8_t *xi = x + t * xstride + (g + j) * 64;
                    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q0, _mm512_loadu_si512(xi));
                    sum = _mm512_dpbusd_epi32(sum, q1, _mm512_loadu_si512(xi + 64));
                    sum = _mm512_dpbusd_epi32(sum, q2, _mm512_loadu_si512(xi + 128));
                    sum = _mm512_dpbusd_epi32(sum, q3, _mm512_loadu_si512(xi + 192));
                    const __m512 both = _mm512_permutexvar_ps(which, w[r * T + t]);
                    sums[r * T + t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, sums[r * T + t]);
                }
            }
        }
    }
    for (int i = R * T; i % 4; i++) sums[i] = _mm512_setzero_ps();
    for (int i = 0; i < R * T; i += 4) { /* the same order of adding for any R and T */
        float four[4];
        _mm_storeu_ps(four, sums_of(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
        for (int j = i; j < i + 4 && j < R * T; j++) y[j % T * ystride + j / T] = four[j - i];
    }
}

/* The same, to the bit, for one token and rows of up to four groups: one register has the scales of four rows, one block the
 * codes of a row. */
AVX512 static void int2_narrow(const uint8_t *codes, const uint16_t *scale, const uint16_t *zero, ptrdiff_t G, ptrdiff_t rows,
                               const int8_t *x, const float *xscale, const float *xsum, float *y) {
    const __m512i mask = _mm512_set1_epi8(3);
    const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __mmask64 bytes = ~0ull >> (64 - 16 * G);
    const __mmask16 row = (__mmask16)((1u << G) - 1), four = (__mmask16)((1u << 4 * G) - 1);
    __m512 xscales = _mm512_setzero_ps(), xsums = _mm512_setzero_ps(); /* four times those of the token */
    for (int r = 0; r < 4; r++) {
        xscales = _mm512_mask_expandloadu_ps(xscales, (__mmask16)(row << r * G), xscale);
        xsums = _mm512_mask_expandloadu_ps(xsums, (__mmask16)(row << r * G), xsum);
    }
    for (ptrdiff_t n = 0; n < rows; n += 4, codes += 64 * G, scale += 4 * G, zero += 4 * G) {
        for (ptrdiff_t i = 0; i < 64 * G; i += 64) _mm_prefetch((const char *)codes + i + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)scale + AHEAD / 4, _MM_HINT_T0);
        _mm_prefetch((const char *)zero + AHEAD / 4, _MM_HINT_T0);
        const __m512 s = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(four, scale));
        const __m512 offset = _mm512_mul_ps(_mm512_mul_ps(s, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(four, zero))), xsums);
        const __m512 w = _mm512_mul_ps(s, xscales);
        __m512 sums[4];
        for (int r = 0; r < 4; r++) {
            const __m512i packed = _mm512_maskz_loadu_epi8(bytes, codes + r * G * 16);
            const __m512i at = _mm512_set1_epi32(r * (int)G);
            __m512i sum = _mm512_setzero_si512();
            sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(packed, mask), _mm512_loadu_si512(x));
            sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(packed, 2), mask), _mm512_loadu_si512(x + 64));
            sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask), _mm512_loadu_si512(x + 128));
            sum = _mm512_dpbusd_epi32(sum, _mm512_and_si512(_mm512_srli_epi16(packed, 6), mask), _mm512_loadu_si512(x + 192));
            sums[r] = _mm512_fmsub_ps(_mm512_cvtepi32_ps(sum), _mm512_permutexvar_ps(_mm512_add_epi32(spread, at), w),
                                      _mm512_maskz_permutexvar_ps(row, _mm512_add_epi32(lanes, at), offset));
        }
        _mm_storeu_ps(y + n, sums_of(sums[0], sums[1], sums[2], sums[3]));
    }
}

AVX512 static void int2_rows_avx512(const uint8_t *codes, const uint16_t *scale, const uint16_t *zero, ptrdiff_t G, ptrdiff_t rows,
                                    const int8_t *x, ptrdiff_t xstride, const float *xscale, const float *xsum, int T, float *y,
                                    ptrdiff_t ystride) {
#define SOME(R, N)                                                                                                          \
    for (; t + N <= T; t += N)                                                                                              \
        int2_some(codes + n * G * 16, scale + n * G, zero + n * G, G, x + t * xstride, xstride, xscale + t * G, xsum + t * G, \
                  R, N, y + t * ystride + n, ystride);
    ptrdiff_t n = 0;
    if (T == 1 && G <= 4) int2_narrow(codes, scale, zero, G, n = rows / 4 * 4, x, xscale, xsum, y);
    for (int t = 0; T == 1 && n + 4 <= rows; n += 4, t = 0) { SOME(4, 1) }
    for (int t = 0; n < rows; n++, t = 0) { SOME(1, 8) SOME(1, 4) SOME(1, 2) SOME(1, 1) }
#undef SOME
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
                if (sizeof(TYPE) == 1) _mm_prefetch((const char *)(w + k) + AHEAD, _MM_HINT_T0); /* 16 bits: slower */   \
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

#ifdef AVX512_BF16
/* y[n] = the sum of w[n][k] * x[k], w and x bfloat16, in the order of oneDNN; 16 | rows, 8 | K.
 *
 * A row is one lane here, whose sum takes in two products at a time, from the first to the last, but begins anew every CHUNK
 * inputs: the sums of chunks are added at the end. Subnormal numbers are zero, on the way and in the end. */
AVX512_BF16 static void in_pairs(const uint16_t *w, ptrdiff_t K, ptrdiff_t rows, const uint16_t *x, float *y) {
    for (ptrdiff_t n = 0; n < rows; n += 16, w += 16 * K) {
        __m512 total = _mm512_setzero_ps();
        for (ptrdiff_t from = 0; from < K; from += CHUNK) {
            __m512 sum = _mm512_setzero_ps();
            for (ptrdiff_t k = from; k < K && k < from + CHUNK; k += 8) {
                if (k % 32 == 0)
                    for (int i = 16; i < 32; i++) _mm_prefetch((const char *)(w + i * K + k), _MM_HINT_T1);
                __m512i q[4]; /* q[i]: four pairs of the rows i, i + 4, i + 8, i + 12 */
                for (int i = 0; i < 4; i++) {
                    const __m128i *row = (const __m128i *)(w + i * K + k);
                    q[i] = _mm512_broadcast_i32x4(_mm_loadu_si128(row));
                    q[i] = _mm512_mask_broadcast_i32x4(q[i], 0x00f0, _mm_loadu_si128(row + K / 2));
                    q[i] = _mm512_mask_broadcast_i32x4(q[i], 0x0f00, _mm_loadu_si128(row + K));
                    q[i] = _mm512_mask_broadcast_i32x4(q[i], 0xf000, _mm_loadu_si128(row + K / 2 * 3));
                }
                const __m512i a = _mm512_unpacklo_epi32(q[0], q[1]), b = _mm512_unpackhi_epi32(q[0], q[1]);
                const __m512i c = _mm512_unpacklo_epi32(q[2], q[3]), d = _mm512_unpackhi_epi32(q[2], q[3]);
                const __m512i pair[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
                                         _mm512_unpackhi_epi64(b, d)}; /* of the rows 0 .. 15, a lane each */
                for (int i = 0; i < 4; i++) {
                    int32_t both;
                    memcpy(&both, x + k + 2 * i, 4);
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)pair[i]);
                }
            }
            total = _mm512_add_ps(total, sum);
        }
        const __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(total), _mm512_set1_ps(0x1p-126f), _CMP_LT_OQ);
        _mm512_storeu_ps(y + n, _mm512_mask_mov_ps(total, small, _mm512_setzero_ps()));
    }
}
#endif

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

/* To be raised with VERSION in native.py where what is called from there changes. */
int apex_version(void) { return 2; }

/* What computes with an instruction set. Constant: whoever calls says which, and nobody can change it meanwhile. */
struct isa {
    const char *name;
    plane_row plane;
    row_scales scales;
    plain_row plain[PLAIN_FORMATS];
    int2_rows int2; /* or NULL */
};

static const struct isa GENERIC = {"generic", plane_row_generic, row_scales_generic, {int8_row_generic, bfloat_row_generic, half_row_generic}, NULL};
#if defined(__x86_64__)
static const struct isa IN_AVX512 = {"avx512-vnni", plane_row_avx512, row_scales_avx512, {int8_row_avx512, bfloat_row_avx512, half_row_avx512}, int2_rows_avx512};
static const struct isa IN_AVX2 = {"avx2", plane_row_avx2, row_scales_avx2, {int8_row_avx2, bfloat_row_avx2, half_row_avx2}, NULL};
#elif defined(__aarch64__)
static const struct isa NEON = {"neon", plane_row_neon, row_scales_generic, {int8_row_generic, bfloat_row_generic, half_row_generic}, NULL};
#endif

/* Whether this machine can do IN_PAIRS. */
int apex_has_pairs(void) {
#ifdef AVX512_BF16
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

/* The named instruction set, or the best for NULL. NULL where this machine does not have it. */
const struct isa *apex_isa(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const struct isa *known[] = {has_avx512 ? &IN_AVX512 : NULL, has_avx2 ? &IN_AVX2 : NULL, &GENERIC};
#elif defined(__aarch64__)
    const struct isa *known[] = {&NEON, &GENERIC};
#else
    const struct isa *known[] = {&GENERIC};
#endif
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i] && (!name || !strcmp(name, known[i]->name))) return known[i];
    return NULL;
}

const char *apex_isa_name(const struct isa *isa) { return isa->name; }

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
    int8_t *xi[2];  /* of each plane: [T][stride]; IN_PAIRS: x itself in bfloat16 */
    ptrdiff_t stride[2];
    float *scale, *sum; /* [T][G] */
};

static ptrdiff_t groups(const struct matrix *m) { return m->group ? m->K / m->group : 0; }
static ptrdiff_t arranged_bytes(ptrdiff_t K, int p) { return (K * p / 8 + BLOCK - 1) / BLOCK * BLOCK * (8 / p); }

/* A group of activations to int8: v = round(x / scale), nearest even. Returns the sum of v. */
static int32_t quantize(const float *x, ptrdiff_t group, int8_t *v, float *scale) {
    uint32_t most_bits = 0, bits;
    float most, product[MOST_GROUP];
    for (ptrdiff_t k = 0; k < group; k++) { /* magnitudes compare like their bits, and this way NaN is the largest */
        memcpy(&bits, x + k, 4);
        bits &= 0x7fffffff;
        most_bits = bits > most_bits ? bits : most_bits;
    }
    memcpy(&most, &most_bits, 4);
    const float inverse = most > 0 ? 127 / most : 0;
    for (ptrdiff_t k = 0; k < group; k++) product[k] = x[k] * inverse; /* a loop of its own: not fused with the sum below */
    int32_t total = 0;
    for (ptrdiff_t k = 0; k < group; k++) { /* adding 3 * 2^22 leaves the rounded integer in the low bits */
        const float shifted = product[k] + 0x1.8p23f;
        memcpy(&bits, &shifted, 4);
        v[k] = (int8_t)bits;
        total += (int8_t)bits;
    }
    *scale = most / 127;
    return total;
}

/* Room for the inputs of T tokens, with those of `x` [T][K] still to be put there by `arrange`. */
static struct inputs inputs_at(const struct matrix *m, const float *x, int T, void *room) {
    struct inputs in = {.T = T, .x = x};
    if (m->format == IN_PAIRS) in.planes = 1, in.xi[0] = room, in.stride[0] = 2 * m->K;
    if (!m->group) return in;
    in.planes = m->bits == 3 ? 2 : 1;
    in.widths[0] = m->bits == 4 ? 4 : 2, in.widths[1] = 1;
    in.scale = room;
    in.sum = in.scale + T * groups(m);
    int8_t *next = (int8_t *)(in.sum + T * groups(m));
    for (int i = 0; i < in.planes; i++) {
        in.stride[i] = arranged_bytes(m->K, in.widths[i]);
        in.xi[i] = next;
        next += T * in.stride[i];
    }
    return in;
}

static size_t room_bytes(const struct matrix *m, int T) {
    return (size_t)T * (size_t)(arranged_bytes(m->K, 2) + arranged_bytes(m->K, 1) + arranged_bytes(m->K, 4) +
                                2 * groups(m) * (ptrdiff_t)sizeof(float)) + BLOCK;
}

/* The inputs of token t to int8 by groups: xi in the order of each plane, x ~ scale * xi, sum = scale * (sum of xi).
 * IN_PAIRS they are in bfloat16 already, if as floats: nothing is rounded. */
static void arrange(const struct matrix *m, const struct inputs *in, int t) {
    const ptrdiff_t group = m->group, G = groups(m);
    if (m->format == IN_PAIRS) {
        uint16_t *narrow = (uint16_t *)(in->xi[0] + t * in->stride[0]);
        for (ptrdiff_t k = 0; k < m->K; k++) {
            uint32_t bits;
            memcpy(&bits, in->x + t * m->K + k, 4);
            narrow[k] = (uint16_t)(bits >> 16);
        }
        return;
    }
    int8_t v[MOST_GROUP];
    for (int i = 0; i < in->planes; i++) /* a block that is not full ends in zeros */
        memset(in->xi[i] + (t + 1) * in->stride[i] - BLOCK * (8 / in->widths[i]), 0, (size_t)(BLOCK * (8 / in->widths[i])));
    for (ptrdiff_t g = 0; g < G; g++) {
        float *scale = in->scale + t * G + g;
        const int32_t total = quantize(in->x + t * m->K + g * group, group, v, scale);
        in->sum[t * G + g] = *scale * (float)total;
        for (int i = 0; i < in->planes; i++) {
            const int p = in->widths[i], shifts = 8 / p;
            const ptrdiff_t b = group * p / 8;
            int8_t *xi = in->xi[i] + t * in->stride[i];
            if (b == 16) { /* the usual case, and inside one block */
                int8_t *at = xi + g * 16 / BLOCK * BLOCK * shifts + g * 16 % BLOCK;
                for (int s = 0; s < shifts; s++) memcpy(at + s * BLOCK, v + s * 16, 16);
            } else
                for (int s = 0; s < shifts; s++)
                    for (ptrdiff_t j = 0, at = g * b; j < b; j++, at++)
                        xi[at / BLOCK * BLOCK * shifts + s * BLOCK + at % BLOCK] = v[s * b + j];
        }
    }
}

/* The inputs of `T` tokens from `t` on. */
static struct inputs part(const struct matrix *m, const struct inputs *in, int t, int T) {
    struct inputs some = *in;
    some.T = T;
    some.x += t * m->K;
    some.scale += t * groups(m);
    some.sum += t * groups(m);
    for (int i = 0; i < in->planes; i++) some.xi[i] += t * in->stride[i];
    return some;
}

/* y[t * ystride + i] = row n + i times the inputs, for i < count, T <= TOKENS. */
static void rows(const struct isa *isa, const struct matrix *m, ptrdiff_t n, ptrdiff_t count, const struct inputs *in, float *y,
                 ptrdiff_t ystride) {
    const ptrdiff_t K = m->K, G = groups(m);
    const int T = in->T;
    const uint16_t *scale = (const uint16_t *)m->scale + n * G, *zero = m->zero + n * G;
    if (m->bits == 2 && m->group == 64 && isa->int2) {
        isa->int2(m->codes[0] + n * K / 4, scale, zero, G, count, in->xi[0], in->stride[0], in->scale, in->sum, T, y, ystride);
        return;
    }
#ifdef AVX512_BF16
    if (m->format == IN_PAIRS) {
        const uint16_t *w = (const uint16_t *)m->codes[0] + n * K, *x = (const uint16_t *)in->xi[0];
        for (int t = 0; t < T; t++) in_pairs(w, K, count, x + t * K, y + t * ystride);
        return;
    }
#endif
    float scales[G + 1], sums[TOKENS];
    for (ptrdiff_t i = 0; i < count; i++, scale += G, zero += G, n++) {
        if (m->group) isa->scales(scale, zero, G, in->sum, T, scales, sums);
        else isa->plain[m->format](m->codes[0] + n * K * (m->format == INT8 ? 1 : 2), in->x, K, T, sums);
        for (int j = 0; j < in->planes; j++) {
            const ptrdiff_t b = m->group * in->widths[j] / 8, bytes = K * in->widths[j] / 8;
            const plane_row plane = b % 4 || b > BLOCK ? plane_row_generic : isa->plane;
            float acc[TOKENS] = {0};
            plane(m->codes[j] + n * bytes, bytes, in->widths[j], b, in->xi[j], in->stride[j], scales, in->scale, G, T, acc);
            for (int t = 0; t < T; t++) sums[t] += j ? 4 * acc[t] : acc[t]; /* the high plane of three bits counts fours */
        }
        const float factor = m->format == INT8 && !m->group ? ((const float *)m->scale)[n] : 1;
        for (int t = 0; t < T; t++) y[t * ystride + i] = factor * sums[t];
    }
}

/* y [T][N] = x [T][K] times the matrix, any T. Returns 0, or -1 without memory. */
int apex_linear(const struct isa *isa, const struct matrix *m, const float *x, ptrdiff_t tokens, float *y) {
    void *room = malloc(room_bytes(m, tokens < TOKENS ? (int)tokens : TOKENS));
    if (!room) return -1;
    for (ptrdiff_t done = 0; done < tokens; done += TOKENS) {
        const int T = (int)(tokens - done < TOKENS ? tokens - done : TOKENS);
        const struct inputs in = inputs_at(m, x + done * m->K, T, room);
#pragma omp parallel
        {
#pragma omp for
            for (int t = 0; t < T; t++) arrange(m, &in, t);
#pragma omp for schedule(static)
            for (ptrdiff_t n = 0; n < m->N; n += TILE)
                rows(isa, m, n, m->N - n < TILE ? m->N - n : TILE, &in, y + done * m->N + n, m->N);
        }
    }
    free(room);
    return 0;
}

/* ---- experts ---- */

/* Up to TOKENS pairs of one expert, the first of them the `at`-th of those in the works. */
struct block {
    const struct expert *expert;
    int at, T;
    struct inputs up, down;
};

struct work {
    const struct isa *isa;
    const void *x;
    const float *gates;
    float *out;
    int x_format, round, pairs, blocks;
    struct block block[PAIRS];
    int64_t token[PAIRS], row[PAIRS];
    ptrdiff_t H, I, tile; /* rows that a thread takes at once */
    float *wide, *hidden; /* [PAIRS][H], [PAIRS][I] */
    void *room;           /* for the inputs of a matrix */
    struct inputs up, down;
};

/* y[i] = x[from + i], of a 16-bit format or, with 0, float. */
static void widen(const void *x, int format, ptrdiff_t from, ptrdiff_t count, float *y) {
    if (format == BFLOAT16)
        for (ptrdiff_t i = 0; i < count; i++) y[i] = from_bfloat(x, from + i);
    else if (format == FLOAT16)
        for (ptrdiff_t i = 0; i < count; i++) y[i] = from_half(x, from + i);
    else memcpy(y, (const float *)x + from, (size_t)count * sizeof(float));
}

/* exp(x) to three units in the last place, infinite above 88.72: 2^n times the Taylor polynomial of the rest, which is at most
 * half of ln 2. Below -80 it is exp(-80), which added to 1 is lost as well. */
static inline float exponential(float x) {
    const float most = 88.72f, within = x > most ? most : x < -80 ? -80 : x;
    const float shifted = within * 0x1.715476p0f + 0x1.8p23f, n = shifted - 0x1.8p23f; /* n in the low bits of shifted */
    const float r = within - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f; /* ln 2 in two parts, the first of few bits */
    const float p = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f))))));
    uint32_t bits, power;
    float f;
    memcpy(&power, &shifted, 4);
    memcpy(&bits, &p, 4);
    bits += power << 23;
    memcpy(&f, &bits, 4);
    return x > most ? INFINITY : f;
}

/* y = silu(gate) * up, rounded where torch rounds: after each operation. */
static inline __attribute__((always_inline)) void swiglu_of(const float *gate, const float *up, ptrdiff_t count, const int round, float *y) {
    for (ptrdiff_t i = 0; i < count; i++) {
        const float g = rounded(gate[i], round);
        y[i] = rounded(rounded(g / (1 + exponential(-g)), round) * rounded(up[i], round), round);
    }
}

static void swiglu(const float *gate, const float *up, ptrdiff_t count, int round, float *y) {
    /* a loop for each format, without calls or choices: the compiler makes vectors of it */
    if (round == BFLOAT16) swiglu_of(gate, up, count, BFLOAT16, y);
    else if (round == FLOAT16) swiglu_of(gate, up, count, FLOAT16, y);
    else swiglu_of(gate, up, count, 0, y);
}

static ptrdiff_t tiles(const struct work *w, ptrdiff_t rows) { return (rows + w->tile - 1) / w->tile * w->blocks; }

static const struct block *tile_of(const struct work *w, ptrdiff_t rows, ptrdiff_t j, ptrdiff_t *n, ptrdiff_t *count) {
    const ptrdiff_t each = tiles(w, rows) / w->blocks;
    *n = j % each * w->tile;
    *count = rows - *n < w->tile ? rows - *n : w->tile;
    return &w->block[j / each];
}

static void take_in(const struct work *w, int pair) {
    widen(w->x, w->x_format, w->token[pair] * w->H, w->H, w->wide + pair * w->H);
    arrange(&w->block[0].expert->up, &w->up, pair);
}

static void up_tile(const struct work *w, ptrdiff_t j) {
    float gate[TOKENS * TILE], up[TOKENS * TILE];
    ptrdiff_t n, count;
    const struct block *b = tile_of(w, w->I, j, &n, &count);
    rows(w->isa, &b->expert->up, n, count, &b->up, gate, w->tile);
    rows(w->isa, &b->expert->up, w->I + n, count, &b->up, up, w->tile);
    for (int t = 0; t < b->T; t++)
        swiglu(gate + t * w->tile, up + t * w->tile, count, w->round, w->hidden + (b->at + t) * w->I + n);
}

static void down_tile(const struct work *w, ptrdiff_t j) {
    float down[TOKENS * TILE];
    ptrdiff_t n, count;
    const struct block *b = tile_of(w, w->H, j, &n, &count);
    rows(w->isa, &b->expert->down, n, count, &b->down, down, w->tile);
    for (int t = 0; t < b->T; t++) {
        const int64_t to = w->row[b->at + t];
        const float gate = w->gates[to], *from = down + t * w->tile;
        float *y = w->out + to * w->H + n;
        for (ptrdiff_t i = 0; i < count; i++) y[i] = gate * rounded(from[i], w->round);
    }
}

/* All experts have the same layout. */
static void swiglu_experts(struct work *w) {
    const struct matrix *up = &w->block[0].expert->up, *down = &w->block[0].expert->down;
    w->up = inputs_at(up, w->wide, w->pairs, w->room);
    w->down = inputs_at(down, w->hidden, w->pairs, w->room);
    for (struct block *b = w->block; b < w->block + w->blocks; b++) {
        b->up = part(up, &w->up, b->at, b->T);
        b->down = part(down, &w->down, b->at, b->T);
    }
    w->tile = TILE;
    if (w->pairs * (up->N + w->I) * w->H <= ALONE) { /* not even a region of one thread, which takes a microsecond */
        if (w->pairs == w->blocks) w->tile = TOKENS * TILE;
        for (int i = 0; i < w->pairs; i++) take_in(w, i);
        for (ptrdiff_t j = 0; j < tiles(w, w->I); j++) up_tile(w, j);
        for (int i = 0; i < w->pairs; i++) arrange(down, &w->down, i);
        for (ptrdiff_t j = 0; j < tiles(w, w->H); j++) down_tile(w, j);
        return;
    }
#pragma omp parallel /* one region for all: a decode step is too short for more */
    {
#pragma omp for schedule(static)
        for (int i = 0; i < w->pairs; i++) take_in(w, i);
#pragma omp for schedule(guided)
        for (ptrdiff_t j = 0; j < tiles(w, w->I); j++) up_tile(w, j);
#pragma omp for schedule(static)
        for (int i = 0; i < w->pairs; i++) arrange(down, &w->down, i);
#pragma omp for schedule(guided)
        for (ptrdiff_t j = 0; j < tiles(w, w->H); j++) down_tile(w, j);
    }
}

/* Experts with SwiGLU (rows of up: all gates, then all ups; silu) for the tokens routed to them.
 * The i-th expert, experts[slots[i]], serves the pairs first[i] .. first[i + 1]:
 * out[rows[j]] [H] = gates[rows[j]] * expert(x[tokens[j]]). The 16-bit format, 0 for float: `x_format` of x, `round` of the
 * activations.
 * Returns 0, or -1 without memory. */
int apex_swiglu_experts(const struct isa *isa, const struct expert *experts, const int64_t *slots, ptrdiff_t count,
                        const int64_t *first, const int64_t *tokens, const int64_t *rows, const float *gates, const void *x,
                        int x_format, int round, float *out) {
    if (!count || first[count] == first[0]) return 0;
    const int64_t all = first[count] - first[0];
    const int most = all < PAIRS ? (int)all : PAIRS;
    const struct matrix *up = &experts[slots[0]].up, *down = &experts[slots[0]].down;
    const size_t up_bytes = room_bytes(up, most), down_bytes = room_bytes(down, most);
    struct work work = {.isa = isa, .x = x, .gates = gates, .out = out, .x_format = x_format, .round = round, .H = up->K, .I = down->K};
    work.wide = malloc((size_t)most * (size_t)(up->K + down->K) * sizeof(float) + (up_bytes > down_bytes ? up_bytes : down_bytes));
    if (!work.wide) return -1;
    work.hidden = work.wide + most * up->K;
    work.room = work.hidden + most * down->K;
    for (ptrdiff_t i = 0; i < count; i++)
        for (int64_t j = first[i]; j < first[i + 1];) {
            const int64_t left = first[i + 1] - j, space = PAIRS - work.pairs;
            const int T = (int)(left < TOKENS ? left : TOKENS);
            if (T > space) {
                swiglu_experts(&work);
                work.pairs = work.blocks = 0;
            }
            work.block[work.blocks++] = (struct block){.expert = &experts[slots[i]], .at = work.pairs, .T = T};
            for (int t = 0; t < T; t++, j++, work.pairs++) work.token[work.pairs] = tokens[j], work.row[work.pairs] = rows[j];
        }
    if (work.pairs) swiglu_experts(&work);
    free(work.wide);
    return 0;
}
