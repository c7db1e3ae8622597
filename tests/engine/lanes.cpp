// Functions of native/lanes.h over arrays whose length is a multiple of the Lanes.

#include "service/engine/native/lanes.h"

extern "C" __attribute__((visibility("default"))) void logarithms(double* x, int count) {
  for (int i = 0; i < count; i += LANES<double>) store(x + i, log_of(load(x + i)));
}
