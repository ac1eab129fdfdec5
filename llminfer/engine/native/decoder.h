// One step of a decoder-only transformer: a few new tokens through all layers, on keys and values in place.
//
// The families that it serves differ in what their layers have (norms, biases, windows, caps), not in how
// they are built, so a layer is a record with nulls and zeros for what it lacks. Every thread keeps the whole
// residual stream of the new tokens for itself, and norms it for itself: that costs less than meeting.
#pragma once

#include "few_vectors.h"
#include "many_vectors.h"
#include "model.h"

constexpr long MOST_TOKENS = 16;  // in one step
constexpr long TILE_TOKENS = 64;  // of keys that stay in the first-level cache

class Decoder {
 public:
  explicit Decoder(const Model& model)
      : m_(model),
        queries_(model.heads * model.head_dim),
        kvs_(model.kv_heads * model.head_dim),
        projected_(MOST_TOKENS * (queries_ + 2 * kvs_)),
        mixed_(MOST_TOKENS * model.hidden),
        gated_(MOST_TOKENS * model.intermediate),
        ups_(MOST_TOKENS * model.intermediate) {}

  // Feed `count` ids, the first at `position`; the last `wanted` of them give logits, [wanted][vocabulary].
  // False, and nothing done, for ids without a row, more of them than a step takes, or places that are not there.
  bool step(const int64_t* ids, long count, long position, float* logits, long wanted) {
    std::lock_guard<std::mutex> turn(turn_);
    if (!fits(ids, count, position, wanted)) return false;
    Threads& threads = Threads::shared();
    const int most = threads.most();
    while (static_cast<int>(own_.size()) < most) own_.emplace_back(m_, queries_);
    ids_ = ids, count_ = count, position_ = position;
    threads.run([&](int thread) { run(thread, threads.count(), logits, wanted); }, most);
    return true;
  }

 private:
  // What a thread has for itself.
  struct Own {
    Own(const Model& m, long queries)
        : stream(MOST_TOKENS * m.hidden),
          normed(MOST_TOKENS * std::max(m.hidden, std::max(queries, m.intermediate))),
          query(MOST_TOKENS * queries),
          sums(MOST_TOKENS * queries),
          largest(MOST_TOKENS * m.heads),
          total(MOST_TOKENS * m.heads) {}
    std::vector<float> stream, normed, query, sums, largest, total;
    IntegerStore integers;
  };

  bool fits(const int64_t* ids, long count, long position, long wanted) const {
    if (count < 1 || count > MOST_TOKENS || position < 0 || wanted < 0 || wanted > count) return false;
    for (long t = 0; t < count; ++t)
      if (ids[t] < 0 || ids[t] >= m_.known) return false;
    for (long l = 0; l < m_.layers; ++l) {
      const Layer& layer = m_.layer[l];
      if (layer.begin < 0 || layer.end < layer.begin || layer.end + count > layer.capacity) return false;
    }
    return true;
  }

  void run(int thread, int team, float* logits, long wanted) {
    threads_ = team;  // the same on every thread
    Own& own = own_[thread];
    look_up(own);
    for (long l = 0; l < m_.layers; ++l) {
      const Layer& layer = m_.layer[l];
      project(layer, own, thread);
      Threads::shared().barrier();
      attend(layer, own, thread);
      barrier(layer.output, thread);
      project_output(layer, own, thread);
      prefetch(layer.up, thread, team);
      barrier(layer.gate, thread);
      add(mixed_.data(), layer.attention_out, own);
      gate(layer, own, thread);
      barrier(layer.down, thread);
      const Vectors gated = prepare(layer.down, gated_.data(), m_.intermediate, own, count_);
      rows_of(layer.down, gated, count_, mixed_.data(), m_.hidden, thread);
      barrier(l + 1 < m_.layers ? m_.layer[l + 1].query : m_.head, thread);
      add(mixed_.data(), layer.mlp_out, own);
    }
    norm_stream(m_.final_norm, count_ - wanted, own);
    const Vectors x = prepare(m_.head, own.normed.data(), m_.hidden, own, wanted);
    rows_of(m_.head, x, wanted, logits, m_.vocabulary, thread);
    finish_logits(logits, wanted, thread);
  }

  // Wait for the other threads, with the beginning of what comes next on its way.
  void barrier(const Matrix& next, int thread) {
    prefetch(next, thread, threads_);
    Threads::shared().barrier();
  }

  void look_up(Own& own) {
    for (long t = 0; t < count_; ++t) {
      float* x = own.stream.data() + t * m_.hidden;
      if (m_.embedding != nullptr) {
        widen(ids_[t] * m_.hidden, x);
      } else {
        std::vector<float> group(GROUP * BLOCK * blocks_of(m_.hidden));
        row_to_floats(*m_.embedding_rows, ids_[t], group, x);
      }
      if (m_.embedding_scale != 1.0f)
        for (long c = 0; c < m_.hidden; ++c) x[c] *= m_.embedding_scale;
    }
  }

  // One row of the embedding as floats, from its element `first` on.
  void widen(long first, float* to) const {
    const uint16_t* narrow = static_cast<const uint16_t*>(m_.embedding) + first;
    if (m_.embedding_type == AS_FLOAT) {
      std::memcpy(to, static_cast<const float*>(m_.embedding) + first, m_.hidden * sizeof(float));
    } else if (m_.embedding_type == AS_HALF) {
      for (long c = 0; c < m_.hidden; ++c) to[c] = half_to_float(narrow[c]);
    } else {
      for (long c = 0; c < m_.hidden; ++c) {
        const uint32_t bits = static_cast<uint32_t>(narrow[c]) << 16;
        std::memcpy(to + c, &bits, 4);
      }
    }
  }

  // x / sqrt(mean(x²) + ε) · (weight + offset), or the same around the mean
  void norm(const float* x, const float* weight, long size, float* to) const {
    if (weight == nullptr) {
      std::memcpy(to, x, size * sizeof(float));
      return;
    }
    double sum = 0, squares = 0;
    for (long i = 0; i < size; ++i) sum += x[i], squares += static_cast<double>(x[i]) * x[i];
    const double mean = m_.norm == CENTRED ? sum / size : 0.0;
    const float inverse = static_cast<float>(1.0 / std::sqrt(squares / size - mean * mean + m_.norm_epsilon));
    const float centre = static_cast<float>(mean);
    for (long i = 0; i < size; ++i) to[i] = (x[i] - centre) * inverse * (weight[i] + m_.norm_offset);
  }

  // The residual streams of the tokens from `first` on into the beginning of `normed`.
  void norm_stream(const float* weight, long first, Own& own) const {
    for (long t = first; t < count_; ++t)
      norm(own.stream.data() + t * m_.hidden, weight, m_.hidden, own.normed.data() + (t - first) * m_.hidden);
  }

  Vectors prepare(const Matrix& matrix, const float* values, long stride, Own& own, long count) const {
    if (!takes_integers(matrix.format)) return {values, stride};
    return own.integers.fill(values, stride, matrix.columns, count);
  }

  // This thread's rows of a product.
  void rows_of(const Matrix& matrix, const Vectors& x, long count, float* y, long stride, int thread) {
    const Range mine = share(groups_of(matrix.rows), thread, threads_);
    multiply_few(matrix, mine.begin, mine.end, x, count, y, stride);
  }

  void project(const Layer& layer, Own& own, int thread) {
    norm_stream(layer.attention_in, 0, own);
    const Matrix* parts[] = {&layer.query, &layer.key, &layer.value};
    const long offsets[] = {0, queries_, queries_ + kvs_};
    Vectors x{};
    long total = 0;
    for (const Matrix* part : parts) total += groups_of(part->rows);
    const Range mine = share(total, thread, threads_);
    const Matrix* prepared = nullptr;
    long before = 0;
    for (int p = 0; p < 3; ++p) {
      const long groups = groups_of(parts[p]->rows);
      const long begin = std::max(0L, mine.begin - before), end = std::min(groups, mine.end - before);
      if (begin < end) {
        // what suits one integer format suits the other
        if (prepared == nullptr || takes_integers(prepared->format) != takes_integers(parts[p]->format))
          x = prepare(*parts[p], own.normed.data(), m_.hidden, own, count_), prepared = parts[p];
        multiply_few(*parts[p], begin, end, x, count_, projected_.data() + offsets[p], queries_ + 2 * kvs_);
      }
      before += groups;
    }
  }

  void clip(float* x, long size) const {
    if (m_.clip > 0)
      for (long i = 0; i < size; ++i) x[i] = std::max(-m_.clip, std::min(m_.clip, x[i]));
  }

  void norm_heads(const float* x, const float* weight, long heads, float* to) const {
    const long size = heads * m_.head_dim;
    if (m_.norms_whole_projection) return norm(x, weight, size, to);
    for (long h = 0; h < heads; ++h) norm(x + h * m_.head_dim, weight, m_.head_dim, to + h * m_.head_dim);
  }

  // Rotary positions: the first `rotated` elements of every head, in pairs half of them apart (Su et al., 2021).
  void rotate(const Layer& layer, long position, long heads, float* x) const {
    if (layer.rotation == nullptr) return;
    const long half = m_.rotated / 2;
    const float *cosines = layer.rotation + position * m_.rotated, *sines = cosines + half;
    for (long h = 0; h < heads; ++h, x += m_.head_dim)
      for (long i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
      }
  }

  void attend(const Layer& layer, Own& own, int thread) {
    const long d = m_.head_dim;
    for (long t = 0; t < count_; ++t) {
      float* from = projected_.data() + t * (queries_ + 2 * kvs_);
      float* query = own.query.data() + t * queries_;
      std::vector<float>& scratch = own.normed;
      std::memcpy(scratch.data(), from, queries_ * sizeof(float));
      clip(scratch.data(), queries_);
      norm_heads(scratch.data(), layer.query_norm, m_.heads, query);
      rotate(layer, position_ + t, m_.heads, query);
      for (long i = 0; i < queries_; ++i) query[i] *= m_.attention_scale;
      if (thread == threads_ - 1) store(layer, own, from + queries_, t);
    }
    std::fill(own.largest.begin(), own.largest.end(), -INFINITY);
    std::fill(own.total.begin(), own.total.end(), 0.0f);
    std::fill(own.sums.begin(), own.sums.begin() + count_ * queries_, 0.0f);
    // old tokens are shared out; the new ones, which the last thread has just stored, are its own
    const Range old = share(layer.end - layer.begin, thread, threads_);
    const long group = m_.heads / m_.kv_heads;
    for (long h = 0; h < m_.kv_heads; ++h) {
      const float *keys = layer.keys + h * layer.capacity * d, *values = layer.values + h * layer.capacity * d;
      const long begin = layer.begin + old.begin;
      const long end = thread == threads_ - 1 ? layer.end + count_ : layer.begin + old.end;
      for (long first = begin; first < end; first += TILE_TOKENS)
        for (long t = 0; t < count_; ++t) {
          // the newest place that token t sees, and the oldest
          const long last = std::min({first + TILE_TOKENS, end, layer.end + t + 1});
          const long oldest = layer.window > 0 ? std::max(first, layer.end + t + 1 - layer.window) : first;
          if (oldest >= last) continue;
          for (long g = 0; g < group; ++g)
            attend_tile(keys + oldest * d, values + oldest * d, last - oldest, t, h * group + g, g == 0, own);
        }
    }
  }

  // The new token's key and value into the cache.
  void store(const Layer& layer, Own& own, float* from, long t) {
    const long d = m_.head_dim, place = layer.end + t;
    clip(from, 2 * kvs_);
    norm_heads(from, layer.key_norm, m_.kv_heads, own.normed.data());
    rotate(layer, position_ + t, m_.kv_heads, own.normed.data());
    for (long h = 0; h < m_.kv_heads; ++h) {
      std::memcpy(layer.keys + (h * layer.capacity + place) * d, own.normed.data() + h * d, d * sizeof(float));
      std::memcpy(layer.values + (h * layer.capacity + place) * d, from + kvs_ + h * d, d * sizeof(float));
    }
  }

  // Softmax over tiles with a running maximum (Milakov and Gimelshein, 2018). The first head of a group asks for
  // the values while it works on the keys.
  void attend_tile(const float* keys, const float* values, long tokens, long t, long head, bool first,
                   Own& own) const {
    const long d = m_.head_dim;
    const float* query = own.query.data() + t * queries_ + head * d;
    alignas(32) float scores[TILE_TOKENS];
    float largest = -INFINITY;
    for (long i = 0; i < tokens; ++i) {
      float8 even = {}, odd = {};
      const float* key = keys + i * d;
      if (first)
        for (long at = 0; at < d; at += 16) {
          __builtin_prefetch(values + i * d + at);
          __builtin_prefetch(key + TILE_TOKENS / 4 * d + at);
        }
      long c = 0;
      for (; c + 16 <= d; c += 16) {
        even += load8(key + c) * load8(query + c);
        odd += load8(key + c + 8) * load8(query + c + 8);
      }
      if (c < d) even += load8(key + c) * load8(query + c);
      float score = sum8(even + odd);
      if (m_.attention_cap > 0) score = m_.attention_cap * std::tanh(score / m_.attention_cap);
      scores[i] = score;
      largest = std::max(largest, score);
    }
    for (long i = tokens; i % 8 != 0; ++i) scores[i] = -INFINITY;
    float& running = own.largest[t * m_.heads + head];
    const float now = std::max(running, largest);
    const float fade = std::exp(running - now);
    running = now;
    float8 total = {};
    for (long i = 0; i < tokens; i += 8) {
      const float8 p = exp8(load8(scores + i) - all8(now));
      total += p;
      store8(scores + i, p);
    }
    float& sum = own.total[t * m_.heads + head];
    sum = sum * fade + sum8(total);
    float* out = own.sums.data() + t * queries_ + head * d;
    long c = 0;
    for (; c + 64 <= d; c += 64) add_values<8>(values + c, scores, tokens, fade, out + c);
    for (; c + 32 <= d; c += 32) add_values<4>(values + c, scores, tokens, fade, out + c);
    for (; c < d; c += 8) add_values<1>(values + c, scores, tokens, fade, out + c);
  }

  template <int V>
  void add_values(const float* values, const float* weights, long tokens, float fade, float* out) const {
    float8 sums[V];
    for (int v = 0; v < V; ++v) sums[v] = load8(out + 8 * v) * fade;
    for (long i = 0; i < tokens; ++i)
      for (int v = 0; v < V; ++v) sums[v] += load8(values + i * m_.head_dim + 8 * v) * weights[i];
    for (int v = 0; v < V; ++v) store8(out + 8 * v, sums[v]);
  }

  // The threads' sums as one, then this thread's rows of the output projection.
  void project_output(const Layer& layer, Own& own, int thread) {
    const long d = m_.head_dim;
    for (long t = 0; t < count_; ++t)
      for (long h = 0; h < m_.heads; ++h) {
        float largest = -INFINITY, total = 0;
        for (int other = 0; other < threads_; ++other)
          largest = std::max(largest, own_[other].largest[t * m_.heads + h]);
        float* out = own.normed.data() + t * queries_ + h * d;
        std::fill(out, out + d, 0.0f);
        for (int other = 0; other < threads_; ++other) {
          const float weight = std::exp(own_[other].largest[t * m_.heads + h] - largest);
          if (weight == 0) continue;
          total += own_[other].total[t * m_.heads + h] * weight;
          const float* sums = own_[other].sums.data() + t * queries_ + h * d;
          for (long i = 0; i < d; ++i) out[i] += sums[i] * weight;
        }
        for (long i = 0; i < d; ++i) out[i] /= total;
      }
    const Vectors x = prepare(layer.output, own.normed.data(), queries_, own, count_);
    rows_of(layer.output, x, count_, mixed_.data(), m_.hidden, thread);
  }

  // Into the residual stream, through a norm where the layer has one.
  void add(const float* values, const float* weight, Own& own) const {
    for (long t = 0; t < count_; ++t) {
      const float* from = values + t * m_.hidden;
      float* stream = own.stream.data() + t * m_.hidden;
      if (weight != nullptr) {
        norm(from, weight, m_.hidden, own.normed.data());
        from = own.normed.data();
      }
      for (long i = 0; i < m_.hidden; ++i) stream[i] += from[i] * m_.residual_scale;
    }
  }

  void gate(const Layer& layer, Own& own, int thread) {
    norm_stream(layer.mlp_in, 0, own);
    const Vectors x = prepare(layer.gate, own.normed.data(), m_.hidden, own, count_);
    const Range mine = share(groups_of(layer.gate.rows), thread, threads_);
    // the same rows of both, so that they meet without a barrier
    const long first = mine.begin * GROUP, last = std::min<long>(mine.end * GROUP, m_.intermediate);
    multiply_few(layer.gate, mine.begin, mine.end, x, count_, gated_.data(), m_.intermediate);
    const bool alike = takes_integers(layer.up.format) == takes_integers(layer.gate.format);
    const Vectors y = alike ? x : prepare(layer.up, own.normed.data(), m_.hidden, own, count_);
    multiply_few(layer.up, mine.begin, mine.end, y, count_, ups_.data(), m_.intermediate);
    for (long t = 0; t < count_; ++t)
      activate(gated_.data() + t * m_.intermediate + first, ups_.data() + t * m_.intermediate + first, last - first);
  }

  void activate(float* gate, const float* up, long size) const {
    const float root = 0.7978845608028654f, cubic = 0.044715f;
    for (long i = 0; i < size; i += 8) {
      float8 x = {}, y = {};
      const long filled = std::min(8L, size - i);
      std::memcpy(&x, gate + i, filled * sizeof(float));
      std::memcpy(&y, up + i, filled * sizeof(float));
      if (m_.activation == SILU) {
        x = x / (all8(1.0f) + exp8(-x));
      } else if (m_.activation == GELU_TANH) {
        // (1 + tanh u) / 2 = 1 / (1 + e^(-2u))
        x = x / (all8(1.0f) + exp8(all8(-2.0f * root) * (x + all8(cubic) * x * x * x)));
      } else {
        for (long j = 0; j < filled; ++j) x[j] = 0.5f * x[j] * (1.0f + std::erf(x[j] * 0.70710678118654752f));
      }
      x *= y;
      std::memcpy(gate + i, &x, filled * sizeof(float));
    }
  }

  void finish_logits(float* logits, long wanted, int thread) const {
    const Range mine = share(groups_of(m_.head.rows), thread, threads_);
    const long first = mine.begin * GROUP, last = std::min<long>(mine.end * GROUP, m_.vocabulary);
    for (long t = 0; t < wanted; ++t)
      for (long i = first; i < last; ++i) {
        float& logit = logits[t * m_.vocabulary + i];
        if (m_.logit_scale != 1.0f) logit *= m_.logit_scale;
        if (m_.logit_cap > 0) logit = m_.logit_cap * std::tanh(logit / m_.logit_cap);
      }
  }

  const Model m_;
  const long queries_, kvs_;
  std::vector<float> projected_, mixed_, gated_, ups_;
  std::vector<Own> own_;
  std::mutex turn_;  // one step at a time
  const int64_t* ids_ = nullptr;
  long count_ = 0, position_ = 0;
  std::atomic<int> threads_{1};
};
