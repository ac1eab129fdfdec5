// The decoder as Python describes it: a record a layer and one for the whole, mirrored in library.py.
#pragma once

#include "matrix.h"

enum Norm : int32_t { RMS = 0, CENTRED = 1 };
enum Stored : int32_t { AS_FLOAT = 0, AS_HALF = 1, AS_BFLOAT = 2 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2 };

struct Layer {
  Matrix query, key, value, output, gate, up, down;
  // weights of norms, null where the layer has none: before and after attention, before and after the MLP
  const float *attention_in, *attention_out, *mlp_in, *mlp_out;
  const float *query_norm, *key_norm;
  const float* rotation;  // [position][cosines, sines][rotated / 2]; null: positions are not rotated in
  // [kv head][capacity][head_dim]; places [begin, end) hold the tokens before this step
  float *keys, *values;
  int64_t capacity, begin, end;
  int64_t window;  // tokens that one sees, its own included; 0: all
};

struct Model {
  int64_t hidden, heads, kv_heads, head_dim, intermediate, vocabulary, layers, rotated;
  Layer* layer;
  Matrix head;
  const Matrix* embedding_rows;  // packed rows to look tokens up in, else
  const void* embedding;         // [known][hidden], in the type that `embedding_type` names
  int64_t known;                 // ids that have a row
  const float* final_norm;
  float embedding_scale, norm_epsilon, norm_offset, attention_scale, attention_cap, logit_cap, logit_scale, residual_scale;
  float clip;  // of queries, keys and values; 0: none
  int32_t norm, activation, norms_whole_projection, embedding_type;
};
