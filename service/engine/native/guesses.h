// Guesses of the next characters.
//
// The engine runs a guess beside the character before it. The guess counts only if the sampler then chooses it. So
// guesses change the time of a text and nothing else. They come from the counts of the training text (counts.h) and from the sequence's
// own text, never from another sequence: the time of a text tells nothing about the texts of others.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sampler.h"

namespace {

// What mostly follows the last four characters in a sequence's own text, as a processor predicts branches: for texts
// that are not drawn, as they repeat themselves, and where there are no counts.
class Repetitions {
 public:
  void forget() { table.assign(table.size(), Entry{}); }
  // `recent`: at least four ids. certainty: about how often this is right.
  int32_t after(const int32_t* recent, double* certainty) const {
    const Entry& entry = table[index(recent)];
    *certainty = (3 + entry.hits) / 6.0;
    return entry.hits ? entry.id : NONE;
  }
  void learn(const int32_t* recent, int32_t id) {
    Entry& entry = table[index(recent)];
    if (entry.id == id) entry.hits = std::min(entry.hits + 1, 3);
    else if (entry.hits) --entry.hits;
    else entry.id = id;
  }

 private:
  struct Entry {
    int32_t id = NONE, hits = 0;
  };
  static size_t index(const int32_t* recent) {
    uint64_t key = 0;
    for (int i = 1; i <= 4; ++i) key = key << 16 | uint16_t(recent[-i]);
    return key * 0x9E3779B97F4A7C15u >> 54;
  }
  std::vector<Entry> table = std::vector<Entry>(1 << 10);
};

}  // namespace
