// A compiled model as data: the tables that a generated library defines and the container reads.
#pragma once
#include "gpu_model.h"

namespace alt::aot {

// A weight, or (after the first `Model::constants`) a literal of the program, which nobody may update.
struct Constant {
  const char* name;
  Dtype dtype;
  int rank;
  const int64_t *sizes, *strides;
  int64_t offset, bytes;  // in the block of weights
  int32_t type;           // as the loaders number them: 1 parameter, 2 buffer, 3 tensor constant
  bool written;           // the program writes it in place
  bool on_gpu;
};

// `appended`: in the file of the library after its code, which no linker has to copy.
enum class Storage { embedded, appended, file, external };
enum class From { constant, input, folded };

// The source of one input of a program.
struct Source {
  From from;
  int number;
};

struct Model {
  const char* isa;
  const char* const* features;  // of the CPU, ended by null
  const Constant* constants;
  int constant_count, literal_count;
  Storage storage;
  const unsigned char* embedded;
  const char *weights_file, *weights_digest;
  int64_t weights_bytes;
  const char* const* inputs;
  int input_count;
  const char* const* outputs;
  int output_count;
  const char *in_spec, *out_spec;
  const char* description;  // JSON: inputs, outputs and constants for people and for altbackend.aot_load
  const ProgramTable* main;
  const Source* main_sources;
  const ProgramTable* fold;  // computes what depends on weights alone; null if nothing does
  const Source* fold_sources;
  const GpuModel* gpu;  // null for the CPU
};

// Defined by the generated text.
extern const Model model;

}  // namespace alt::aot
