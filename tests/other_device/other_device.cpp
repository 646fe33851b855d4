// A device of its own kind, in the CPU's memory: what assumes a CPU fails on it as on a GPU, on any machine.
//
// Operators run on the CPU, by torch's fallback, after a look at where their tensors are: as on a GPU, tensors of two
// devices meet only in copies, as indices, or as numbers (tensors of no axis).

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE{KIND, 0};

struct OneDevice final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, OneDevice);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

struct Memory final : c10::Allocator {
  static void release(void* bytes) { c10::GetCPUAllocator()->raw_deallocate(bytes); }
  c10::DataPtr allocate(size_t count) override {
    void* bytes = count == 0 ? nullptr : c10::GetCPUAllocator()->raw_allocate(count);
    return {bytes, bytes, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

const c10::DispatchKeySet KEYS{c10::DispatchKey::PrivateUse1};

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& x) {
  if (x.is_cpu()) return x;
  auto seen = at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
  seen._set_neg(x.is_neg());
  seen._set_conj(x.is_conj());
  return seen;
}

at::Tensor copy(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes());
  return copy(from, to, false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, source, 0, count, {});
}

void look(const std::string& name, const at::Tensor& x) {
  const bool fits = !x.defined() || x.dim() == 0 || x.device() == DEVICE;
  TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found other:0 and ", x.device(), " (", name, ")");
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const bool indexes = name.find("aten::index") == 0 || name.find("aten::_index_put") == 0;
  for (const auto& argument : torch::jit::last(stack, schema.arguments().size())) {
    if (argument.isTensor()) {
      look(name, argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& x : argument.toTensorVector()) look(name, x);
    } else if (argument.isGenerator() && argument.toGenerator().defined()) {
      TORCH_CHECK(false, "Expected a generator of the device, but found one of ", argument.toGenerator().device());
    } else if (argument.isOptionalTensorList() && !indexes) {
      for (const std::optional<at::Tensor>& x : argument.toOptionalTensorVector()) {
        if (x) look(name, *x);
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

}  // namespace
