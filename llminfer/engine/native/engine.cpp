// What Python calls. Everything is plain pointers; shapes are checked on the Python side.

#include "decoder.h"
#include "pack.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

extern "C" {

// Of the records that Python fills: a layout that has drifted apart would be read as foreign memory.
void llminfer_record_sizes(int64_t* sizes) { sizes[0] = sizeof(Matrix), sizes[1] = sizeof(Layer), sizes[2] = sizeof(Model); }

// What the vector code was compiled to.
const char* llminfer_vectors() {
#if defined(LLMINFER_AVX2) && defined(__AVX512F__)
  return "AVX-512";
#elif defined(LLMINFER_AVX2)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "portable";
#endif
}

void llminfer_threads(int32_t count) { Threads::shared().resize(count); }

// GOMP_parallel and omp_get_num_threads of the OpenMP that torch runs on.
void llminfer_openmp(void* parallel, void* team_size) {
  Threads::shared().use(reinterpret_cast<Threads::Parallel>(parallel), reinterpret_cast<Threads::TeamSize>(team_size));
}

int64_t llminfer_packed_bytes(int32_t format, int64_t rows, int64_t columns) {
  return groups_of(rows) * group_bytes(format, columns);
}

// Ask for huge pages: fewer address translations on the way through large weights.
void llminfer_advise(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

// Row-major floats, [rows][columns], into `matrix.data`, which is all zeros.
void llminfer_pack(const Matrix* matrix, const float* weights) {
  uint8_t* to = const_cast<uint8_t*>(matrix->data);
  const long bytes = group_bytes(matrix->format, matrix->columns);
  Threads& threads = Threads::shared();
  threads.run([&](int thread) {
    const Range mine = share(groups_of(matrix->rows), thread, threads.count());
    for (long r = mine.begin * GROUP; r < std::min<long>(mine.end * GROUP, matrix->rows); ++r)
      pack_row(matrix->format, weights + r * matrix->columns, matrix->columns, r % GROUP, to + r / GROUP * bytes);
  });
}

// The rows that `ids` name as floats, [count][columns].
void llminfer_rows(const Matrix* matrix, const int64_t* ids, int64_t count, float* out) {
  Threads& threads = Threads::shared();
  threads.run([&](int thread) {
    std::vector<float> group(GROUP * BLOCK * blocks_of(matrix->columns));
    const Range mine = share(count, thread, threads.count());
    for (long i = mine.begin; i < mine.end; ++i) row_to_floats(*matrix, ids[i], group, out + i * matrix->columns);
  });
}

// y = x · weightsᵀ + bias: x is [count][columns], y is [count][rows].
void llminfer_multiply(const Matrix* matrix, const float* x, int64_t count, float* y) {
  Threads& threads = Threads::shared();
  const bool many = count >= many_from(matrix->format);
  IntegerStore store;
  Vectors vectors{x, matrix->columns};
  if (!many && takes_integers(matrix->format)) vectors = store.fill(x, matrix->columns, matrix->columns, count);
  threads.run([&](int thread) {
    const Range mine = share(groups_of(matrix->rows), thread, threads.count());
    (many ? multiply_many : multiply_few)(*matrix, mine.begin, mine.end, vectors, count, y, matrix->rows);
  });
}

void* llminfer_decoder(const Model* model) { return new Decoder(*model); }

void llminfer_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

int64_t llminfer_most_tokens() { return MOST_TOKENS; }

// 1 when done, 0 when refused.
int32_t llminfer_step(void* decoder, const int64_t* ids, int64_t count, int64_t position, float* logits,
                      int64_t wanted) {
  return static_cast<Decoder*>(decoder)->step(ids, count, position, logits, wanted);
}

}  // extern "C"
