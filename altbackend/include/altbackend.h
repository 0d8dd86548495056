/* The C interface of libraries that altbackend.aot_compile makes, for programs without torch's loaders.
 *
 * A program links a library, or opens it with dlopen and looks these names up. Functions that return int32_t return 0,
 * or 1 after an error; altbackend_last_error then says what was wrong in this thread's last call. A model may run in any
 * number of threads at once, also while its weights are replaced: a call uses the old or the new weights, never both.
 *
 * Libraries that were compiled with the option `aot_prefix` have the prefix before each name. Include this file
 * once for each prefix, with ALTBACKEND_PREFIX defined as the prefix; undefine it in between. */
#ifndef ALTBACKEND_H
#define ALTBACKEND_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct altbackend_model altbackend_model;

typedef enum {
  ALTBACKEND_FLOAT32,
  ALTBACKEND_FLOAT64,
  ALTBACKEND_FLOAT16,
  ALTBACKEND_BFLOAT16,
  ALTBACKEND_INT64,
  ALTBACKEND_INT32,
  ALTBACKEND_INT16,
  ALTBACKEND_INT8,
  ALTBACKEND_UINT8,
  ALTBACKEND_UINT16,
  ALTBACKEND_UINT32,
  ALTBACKEND_UINT64,
  ALTBACKEND_BOOL,
  ALTBACKEND_COMPLEX32,
  ALTBACKEND_COMPLEX64,
  ALTBACKEND_COMPLEX128,
  ALTBACKEND_FLOAT8_E4M3FN,
  ALTBACKEND_FLOAT8_E5M2,
  ALTBACKEND_FLOAT8_E4M3FNUZ,
  ALTBACKEND_FLOAT8_E5M2FNUZ
} altbackend_dtype;

/* A tensor in memory. `sizes` and `strides` count elements; null strides mean row-major without gaps. `owner` is null in
 * a tensor of the program; in a result it holds the memory, and the sizes, until altbackend_release. */
typedef struct {
  void* data;
  int32_t dtype; /* altbackend_dtype */
  int32_t rank;
  const int64_t* sizes;
  const int64_t* strides;
  void* owner;
} altbackend_tensor;

#ifdef __cplusplus
}
#endif

/* The prefix is expanded before the names are joined. */
#define ALTBACKEND_JOINED(prefix, name) prefix##name
#define ALTBACKEND_JOIN(prefix, name) ALTBACKEND_JOINED(prefix, name)
#define ALTBACKEND_NAME(name) ALTBACKEND_JOIN(ALTBACKEND_PREFIX, name)
#endif

/* --- functions, declared for each prefix --- */
#ifndef ALTBACKEND_PREFIX
#define ALTBACKEND_PREFIX
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* JSON: inputs, outputs, ranges of dynamic sizes, and weights. Valid as long as the library is open. */
const char* ALTBACKEND_NAME(altbackend_describe)(void);

/* Makes a model with the weights that the library holds. `device` is "cpu". */
int32_t ALTBACKEND_NAME(altbackend_create)(const char* device, altbackend_model** result);
void ALTBACKEND_NAME(altbackend_destroy)(altbackend_model* model);

/* Runs the model. The inputs stay the program's; inputs that the model writes are written in place. A result whose
 * `owner` is null is nothing (None). */
int32_t ALTBACKEND_NAME(altbackend_run)(altbackend_model* model, const altbackend_tensor* inputs, size_t input_count,
                       altbackend_tensor* outputs, size_t output_count);
void ALTBACKEND_NAME(altbackend_release)(altbackend_tensor* result);

/* Replaces weights by name, with copies, or (`shared`) with the program's own memory, which must then outlive the model.
 * `inactive`: in the set that altbackend_swap makes the active one. */
int32_t ALTBACKEND_NAME(altbackend_update)(altbackend_model* model, const char* const* names, const altbackend_tensor* values,
                          size_t count, int32_t inactive, int32_t shared);
int32_t ALTBACKEND_NAME(altbackend_swap)(altbackend_model* model);

/* The error of this thread's last call, or "". */
const char* ALTBACKEND_NAME(altbackend_last_error)(void);

#ifdef __cplusplus
}
#endif
