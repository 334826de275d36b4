// Eight CUDA devices that compute nothing, for a torch that was built without CUDA.
//
// Autograd, tensor factories and device contexts ask a device guard and CUDA's hooks which devices there are and which
// is the current one. With these answers, fake tensors on "cuda" go through forward and backward; no kernel can run.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 8;

// As in CUDA, every thread has a current device; autograd's threads set theirs.
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override {
    return c10::Device(c10::DeviceType::CUDA, current);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return false;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  int getNumGPUs() const override {
    return kDevices;
  }
  c10::DeviceIndex current_device() const override {
    return current;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current;
    current = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

} // namespace

// For Python, which asks and sets this through torch.cuda.
extern "C" int fake_cuda_current_device() {
  return current;
}
extern "C" void fake_cuda_set_device(int device) {
  current = static_cast<c10::DeviceIndex>(device);
}
extern "C" int fake_cuda_device_count() {
  return kDevices;
}

namespace at {
using ::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
} // namespace at
