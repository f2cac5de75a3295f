// What a CPU-only torch lacks to trace programs of fake tensors on "cuda": see cuda_stand_in.py.
#include <ATen/DeviceAccelerator.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device device{c10::DeviceType::CUDA, 0};

// Autograd asks for the stream of every value, and lets streams wait for one another.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return device; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());

struct Hooks final : at::CUDAHooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

// torch's order on a GPU, of what its kernels take: flash of 16 bits without a mask, memory
// efficient, and the form that writes the scores out where the mask needs a gradient.
int64_t choose(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
               const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (!mask.has_value() && half) {
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  }
  return static_cast<int64_t>(mask.has_value() && mask->requires_grad()
                                  ? at::SDPBackend::math
                                  : at::SDPBackend::efficient_attention);
}

}  // namespace

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose)
}  // namespace at::native

// These two take the place of torch's own, which know at compile time that there is no CUDA.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const Hooks hooks;
  return hooks;
}
}  // namespace at::detail
