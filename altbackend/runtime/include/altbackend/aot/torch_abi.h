// The functions of torch's stable C ABI that generated host programs call. Declared here, since torch's header takes
// a quarter of a second to read; `c_interface.h` includes both, so that the compiler compares the declarations.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
using AOTITorchError = int32_t;
using AtenTensorHandle = struct AtenTensorOpaque*;
using AtenGeneratorHandle = struct AtenGeneratorOpaque*;
using StableListHandle = struct StableListOpaque*;
using StringHandle = struct StringOpaque*;
using StableIValue = uint64_t;

int32_t aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int64(), aoti_torch_dtype_int32(), aoti_torch_dtype_int16(), aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint64(), aoti_torch_dtype_uint32(), aoti_torch_dtype_uint16(), aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_bool(), aoti_torch_dtype_complex32(), aoti_torch_dtype_complex64(), aoti_torch_dtype_complex128();
int32_t aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e4m3fnuz();
int32_t aoti_torch_dtype_float8_e5m2(), aoti_torch_dtype_float8_e5m2fnuz();
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_device_type_cpu(), aoti_torch_device_type_cuda();
int32_t aoti_torch_layout_strided(), aoti_torch_layout_sparse_coo(), aoti_torch_layout_sparse_csr();
int32_t aoti_torch_memory_format_contiguous_format(), aoti_torch_memory_format_preserve_format();
int32_t aoti_torch_memory_format_channels_last(), aoti_torch_memory_format_channels_last_3d();

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void**);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_layout(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_is_defined(AtenTensorHandle, bool*);

AOTITorchError aoti_torch_item_float32(AtenTensorHandle, float*);
AOTITorchError aoti_torch_item_float64(AtenTensorHandle, double*);
AOTITorchError aoti_torch_item_int64(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_item_int32(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_item_int16(AtenTensorHandle, int16_t*);
AOTITorchError aoti_torch_item_int8(AtenTensorHandle, int8_t*);
AOTITorchError aoti_torch_item_uint64(AtenTensorHandle, uint64_t*);
AOTITorchError aoti_torch_item_uint32(AtenTensorHandle, uint32_t*);
AOTITorchError aoti_torch_item_uint16(AtenTensorHandle, uint16_t*);
AOTITorchError aoti_torch_item_uint8(AtenTensorHandle, uint8_t*);
AOTITorchError aoti_torch_item_bool(AtenTensorHandle, bool*);

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle, AtenTensorHandle*);
AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle*);
AOTITorchError aoti_torch_empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle*);
AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle*);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, AtenTensorHandle*);
AOTITorchError aoti_torch_clone_preserve_strides(AtenTensorHandle, AtenTensorHandle*);
AOTITorchError aoti_torch_copy_(AtenTensorHandle target, AtenTensorHandle source, int32_t non_blocking);
AOTITorchError aoti_torch_zero_(AtenTensorHandle);
AOTITorchError aoti_torch_scalar_to_tensor_int64(int64_t, AtenTensorHandle*);
AOTITorchError aoti_torch_scalar_to_tensor_float64(double, AtenTensorHandle*);
AOTITorchError aoti_torch_scalar_to_tensor_bool(bool, AtenTensorHandle*);

bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool);

AOTITorchError torch_get_num_threads(uint32_t*);
AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t torch_version);
AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle*);
AOTITorchError torch_new_list_reserve_size(size_t, StableListHandle*);
AOTITorchError torch_list_size(StableListHandle, size_t*);
AOTITorchError torch_list_get_item(StableListHandle, size_t, StableIValue*);
AOTITorchError torch_list_push_back(StableListHandle, StableIValue);
AOTITorchError torch_delete_list(StableListHandle);
}
