// What native.py passes to the library, as it packs it.

#pragma once

#include <cstdint>

extern "C" {

struct ChargptParams {
  double temperature, top_p, log_min_p, typical_p, repetition, presence, frequency;
  uint64_t seed;
  int64_t top_k, position, num_biased, num_seen, num_written, num_ends;  // position: of the first id
  const int32_t* biased;  // (num_biased,) ids
  const double* bias;     // (num_biased,)
  const int32_t* seen;    // (num_seen,) ids of the prompt; only where a penalty needs them
  const int32_t* written; // (num_written,) ids that were chosen before
  const int32_t* ends;    // (num_ends,) ids after which no more is chosen in a call
};

// A sequence's place in a pattern: an automaton as in constrain/automaton.py.
struct ChargptGuide {
  const uint16_t* classes;   // (V,) of each id
  const int16_t* table;      // (states, num_classes) next states; -1: outside the pattern
  const uint8_t* accepting;  // (states,)
  const int32_t* distance;   // (states,) fewest characters to an accepting state
  const uint8_t* layers;     // (num_layers, layer_bytes) bits of states, the first the highest; null: no minimum
  int32_t num_classes, layer_bytes, num_layers, repeat;
  int32_t state, remaining, missing, rules;  // remaining to the maximum, missing to the minimum length; MAY_LEAVE | …
};

struct ChargptItem {
  int32_t slot;
  int32_t count;              // ids to run; 0: the one that was chosen last
  int32_t steps;              // ids to choose after them
  int32_t alternatives;       // reported beside each log-probability
  const int32_t* ids;         // (count,)
  const int32_t* before;      // (7,) the last ids before them, the newest last; −1: the text begins later
  const int32_t* targets;     // (count,) the id after each, to be reported; −1: not to be; null: none is
  const ChargptGuide* guide;  // null: any id may be chosen
  int32_t* chosen;            // (steps,); those after one of `ends`, or with which a guide ends, are left as they are
  // The report: of R ids, first the targets, then the chosen ones; left as it is where logits are not finite.
  double* values;             // (R,) log-probabilities; null: no report
  uint32_t* top_ids;          // (R, alternatives)
  double* top_values;         // (R, alternatives)
  const uint32_t* which;      // (alternatives,) ids to report; null: the likeliest
};

struct ChargptConfig {
  int32_t vocab_size, block_size, n_layer, n_head, n_kv_head, n_embd, n_inner, slots, threads;
  int32_t dtype, is_half;  // 0 fp32, 1 fp64, 2 fp32 without fp16 in store; weights stored as fp16
  double norm_eps;
  const double* frequencies;  // (head_dim / 2,) radians per position
  // The tree of service/model/counts.py; counts_order is 0 without one. N contexts, E followers.
  int64_t counts_order, num_contexts;
  const double* mixture_weights;  // (counts_order, 256) by the length of the longest context, and the code of its rest
  const double* base;             // (V,)
  const double* rest_codes;       // (256,)
  const double* share_codes;      // (256,)
  const int32_t* first_child;     // (N + 1,)
  const int32_t* first_follower;  // (N + 1,)
  const int32_t* older;           // (N,)
  const uint8_t* rests;           // (N,) codes
  const int32_t* follower_ids;    // (E,)
  const uint8_t* shares;          // (E,) codes
};

}
