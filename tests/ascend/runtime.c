/* What kernels compiled by execution.py call. */
#include <stdint.h>
#include <string.h>

typedef struct {
  int64_t rank;
  int64_t* descriptor; /* allocated pointer, aligned pointer, offset, sizes, strides */
} Memref;

/* Copies a buffer of any rank and strides; MLIR emits calls to it for memref.copy. */
void memrefCopy(int64_t element, Memref* from, Memref* to) {
  int64_t rank = from->rank;
  int64_t *size = from->descriptor + 3, *from_stride = size + rank, *to_stride = to->descriptor + 3 + rank;
  char* source = (char*)from->descriptor[1] + from->descriptor[2] * element;
  char* target = (char*)to->descriptor[1] + to->descriptor[2] * element;
  int64_t index[8] = {0};
  for (int64_t i = 0; i < rank; i++)
    if (size[i] <= 0) return;
  for (;;) {
    int64_t from_offset = 0, to_offset = 0;
    for (int64_t i = 0; i < rank; i++) {
      from_offset += index[i] * from_stride[i];
      to_offset += index[i] * to_stride[i];
    }
    memcpy(target + to_offset * element, source + from_offset * element, element);
    int64_t i = rank - 1;
    for (; i >= 0; i--) {
      if (++index[i] < size[i]) break;
      index[i] = 0;
    }
    if (i < 0) return;
  }
}

/* Round to nearest even; bfloat16 travels in the register of a half. */
_Float16 __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  int nan = (bits & 0x7fffffff) > 0x7f800000;
  uint16_t upper = nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  _Float16 result;
  memcpy(&result, &upper, 2);
  return result;
}
_Float16 __truncdfbf2(double x) { return __truncsfbf2((float)x); }
