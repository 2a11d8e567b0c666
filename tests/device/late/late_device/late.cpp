// `late`: an accelerator made of host memory, whose asynchrony is real. See README.md beside this file.
//
// Work lies in a queue per (device, stream) until something must see its result: then the queue runs, in order. Until
// that moment the result is poison (0xFF, NaN in every float type). What forgets to synchronise therefore reads poison
// each time, not once in a thousand runs. Kernels are PyTorch's own CPU kernels.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/extension.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;
constexpr int kPoison = 0xFF;
constexpr int kPollsUntilDone = 3;  // an event that is only polled ends some day, as on real hardware

// ---------------------------------------------------------------- streams

using StreamKey = std::pair<int, int64_t>;  // device, stream

struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t done = 0, issued = 0;  // counts since the beginning
};

std::recursive_mutex mutex;  // of all that follows; host threads take turns
using Lock = std::lock_guard<std::recursive_mutex>;
std::map<StreamKey, Queue> queues;
int64_t next_stream = 1;
bool late_kernels = false;  // schedule B; otherwise schedule A, late copies
uint64_t kernels = 0, late_copies = 0;
std::map<std::string, uint64_t> waits;      // what makes the host wait for a device on real hardware -> how often
std::map<std::string, uint64_t> transfers;  // between host and device
std::map<int, int64_t> allocated, peak;     // bytes of each device
std::set<int> contexts;  // devices that this process has touched: a context costs memory on real hardware

thread_local int current_device = 0;  // as on CUDA: every thread begins at device 0
thread_local int64_t current_stream[kDevices] = {0};
thread_local bool in_kernel = false;  // what a kernel copies, as PyTorch's CPU kernels must, is no transfer

int index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
StreamKey key_of(const Stream& stream) { return {index_of(stream.device()), stream.id()}; }
StreamKey current(int device) { return {device, current_stream[device]}; }
Stream stream_of(int device, int64_t id) { return Stream(Stream::UNSAFE, Device(kLate, device), id); }
void touch(int device) { contexts.insert(device); }

void issue(StreamKey key, std::function<void()> work) {
  auto& queue = queues[key];
  queue.work.push_back(std::move(work));
  queue.issued++;
}

void run_until(StreamKey key, uint64_t count) {
  auto& queue = queues[key];
  while (queue.done < count && !queue.work.empty()) {
    auto work = std::move(queue.work.front());
    queue.work.pop_front();
    queue.done++;
    work();
  }
}

void run_all(StreamKey key) { run_until(key, queues[key].issued); }

void run_device(int device) {
  for (auto& [key, queue] : queues)
    if (key.first == device) run_all(key);
}

struct Event {
  StreamKey key;
  uint64_t count;
  int polls = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kLate; }
  Device getDevice() const override { return Device(kLate, current_device); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    uncheckedSetDevice(device);
    return old;
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override {
    int index = index_of(device);
    return stream_of(index, current_stream[index]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    touch(index_of(device));
    return stream_of(index_of(device), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    int index = stream.device_index();
    Stream old = stream_of(index, current_stream[index]);
    current_stream[index] = stream.id();
    return old;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    auto& queue = queues[key_of(stream)];
    return queue.done == queue.issued;
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(mutex);
    waits["stream"]++;
    run_all(key_of(stream));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    Lock lock(mutex);
    waits["device"]++;
    run_device(index < 0 ? current_device : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override;

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    auto key = key_of(stream);
    *static_cast<Event*>(*event) = {key, queues[key].issued};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Lock lock(mutex);
    auto [key, count, _] = *static_cast<Event*>(event);
    if (queues[key].done < count) issue(key_of(stream), [key = key, count = count] { run_until(key, count); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock(mutex);
    auto* known = static_cast<Event*>(event);
    if (queues[known->key].done < known->count && ++known->polls >= kPollsUntilDone)
      run_until(known->key, known->count);
    return queues[known->key].done >= known->count;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock(mutex);
    waits["event"]++;
    run_until(static_cast<Event*>(event)->key, static_cast<Event*>(event)->count);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- device memory

// A caching allocator, as the vendors have: a freed block is for the next allocation of its size on its stream. It is
// poisoned in stream order; other streams that use it must be told (`record_stream`).
struct Block {
  void* data;
  size_t size;
  StreamKey key;
  std::vector<StreamKey> used_on;
};
std::map<std::pair<StreamKey, size_t>, std::vector<void*>> freed;

void recycle(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  Lock lock(mutex);
  allocated[block->key.first] -= block->size;
  for (auto& key : block->used_on) run_all(key);
  auto reuse = [data = block->data, size = block->size, key = block->key] {
    memset(data, kPoison, size);
    freed[{key, size}].push_back(data);
  };
  auto& queue = queues[block->key];
  if (queue.done == queue.issued)
    reuse();
  else
    issue(block->key, reuse);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    Lock lock(mutex);
    touch(current_device);
    size_t size = (std::max<size_t>(wanted, 1) + 511) / 512 * 512;
    auto key = current(current_device);
    auto& held = allocated[current_device] += size;
    peak[current_device] = std::max(peak[current_device], held);
    auto& spare = freed[{key, size}];
    void* data = nullptr;
    if (!spare.empty()) {
      data = spare.back();
      spare.pop_back();
    } else {
      TORCH_CHECK(!posix_memalign(&data, 512, size), "late: no memory");
      memset(data, kPoison, size);
    }
    return {data, new Block{data, size, key, {}}, &recycle, Device(kLate, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const final { memcpy(to, from, size); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kLate, &device_allocator);

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const {
  Lock lock(mutex);
  if (data.get_context()) static_cast<Block*>(data.get_context())->used_on.push_back(key_of(stream));
}

// ---------------------------------------------------------------- page-locked host memory

std::map<uintptr_t, size_t> pinned;

void pin(uintptr_t address, size_t size) {
  Lock lock(mutex);
  touch(current_device);  // cudaHostRegister makes the calling thread's current device a context, too
  pinned[address] = size;
}
void unpin(uintptr_t address) {  // waits, as cudaHostUnregister does
  Lock lock(mutex);
  for (auto& [key, queue] : queues) run_all(key);
  pinned.erase(address);
}
bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = pinned.upper_bound(address);
  if (next == pinned.begin()) return false;
  --next;
  return address < next->first + next->second;
}
void free_pinned(void* data) {  // its memory is kept: the vendors' allocators wait for the events of its copies
  Lock lock(mutex);
  pinned.erase(reinterpret_cast<uintptr_t>(data));
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    void* data = nullptr;
    size_t size = std::max<size_t>(wanted, 1);
    TORCH_CHECK(!posix_memalign(&data, 64, size), "late: no memory");
    pin(reinterpret_cast<uintptr_t>(data), size);
    return {data, data, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t size) const final { memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex index) const override {
    Lock lock(mutex);
    return contexts.count(index) > 0;
  }
  void init() const override {}
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex index) const override { current_device = index; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    DeviceIndex old = current_device;
    if (index >= 0) current_device = index;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kLate, current_device); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(0); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto generator = at::make_generator<at::CPUGeneratorImpl>(0);
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    // To nothing or from it, as on the vendors' devices: what is freed is read until its stream gets there.
    if (!size || !storage.nbytes()) {
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
          size ? device_allocator.allocate(size) : c10::DataPtr(nullptr, storage.device()));
      storage.unsafeGetStorageImpl()->set_nbytes(size);
      return;
    }
    {
      Lock lock(mutex);
      run_device(current_device);
    }
    auto grown = device_allocator.allocate(size);
    memcpy(grown.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
Hooks hooks;
struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(&hooks); }
} register_hooks;

// ---------------------------------------------------------------- operators

bool is_late(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLate; }
bool is_late(const c10::IValue& value) { return value.isTensor() && is_late(value.toTensor()); }

// The same memory as a tensor of the CPU, which owns nothing: what is freed or changed meanwhile shows.
Tensor raw(const Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()));
}
void copy_now(const Tensor& from, Tensor to) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from.expand(to.sizes()));
}

Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  Lock lock(mutex);
  at::AutoDispatchBelowADInplaceOrView below;
  bool out = is_late(from), in = is_late(to);
  int device = (out ? from : to).device().index();
  auto key = current(device);
  touch(device);
  if (out && in && from.device() != to.device()) run_device(to.device().index());
  if (out && in && from.device() == to.device() && late_kernels) {
    issue(key, [from = raw(from), to = raw(to)] { copy_now(from, to); });
    return to;
  }
  // As on CUDA: only page-locked host memory is copied beside the host, pageable memory is there when the call returns.
  const Tensor& host = out ? to : from;
  bool beside = non_blocking && out != in && is_pinned(host.const_data_ptr()) && host.is_contiguous();
  if (out != in && !in_kernel) {
    const char* way = out ? "copy to the host" : "copy to the device";
    transfers[way]++;
    if (!beside) waits[way]++;
  }
  if (beside && !late_kernels) {
    late_copies++;
    issue(key, [from = raw(from), to = raw(to)] { copy_now(from, to); });
  } else {
    run_all(key);
    copy_now(out ? raw(from) : from, in ? raw(to) : to);
  }
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const Tensor& tensor) {
  Lock lock(mutex);
  waits["item"]++;
  run_all(current(tensor.device().index()));
  return raw(tensor).item();
}
const Tensor& resize_(const Tensor& tensor, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  size_t size = (tensor.numel() + tensor.storage_offset()) * tensor.itemsize();
  if (size > tensor.storage().nbytes()) hooks.resizePrivateUse1Bytes(tensor.storage(), size);
  return tensor;
}
Tensor as_strided(const Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
Tensor view(const Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}
Tensor& set_tensor(Tensor& tensor, const Tensor& other) { return at::native::set_tensor_(tensor, other); }
Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.itemsize();
  return at::native::set_storage_cpu_(tensor, storage, 0, {count}, {});
}
Tensor& set_storage_offset(Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                           c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (strides.size() == sizes.size())
    impl->set_sizes_and_strides(sizes, strides);
  else
    impl->set_sizes_contiguous(sizes);
  return tensor;
}
void record_stream(Tensor& tensor, Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}
bool compatible(const Tensor&, const Tensor&) { return true; }

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// An in-place kernel with one target runs when its stream gets there. Returns whether this is one.
bool issued_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack, StreamKey key) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), base = stack->size() - count, targets = 0;
  torch::jit::Stack later;
  for (size_t i = 0; i < count; i++) {
    const auto& value = (*stack)[base + i];
    targets += writes(schema.arguments()[i]);
    if (value.isDevice() || value.isGenerator() || value.isTensorList() || value.isOptionalTensorList()) return false;
    if (value.isTensor() && value.toTensor().defined())
      later.push_back(is_late(value) ? raw(value.toTensor()) : value.toTensor().clone());
    else
      later.push_back(value);
  }
  c10::IValue target = count ? (*stack)[base] : c10::IValue();
  if (targets != 1 || !writes(schema.arguments()[0]) || schema.returns().size() != 1 || !is_late(target) ||
      !target.toTensor().numel())
    return false;
  torch::jit::drop(*stack, count);
  stack->push_back(target);
  issue(key, [op, later] {
    at::AutoDispatchBelowADInplaceOrView below;
    auto copy = later;
    op.callBoxed(copy);
  });
  return true;
}

// Whether the host needs the values of a kernel to go on: they say how large its result is, or are its result.
bool asks_for_sizes(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::set<std::string> always = {"aten::nonzero",          "aten::masked_select",      "aten::equal",
                                               "aten::_unique2",         "aten::unique_dim",         "aten::_unique",
                                               "aten::unique_consecutive"};
  const auto& schema = op.schema();
  const auto& name = schema.name();
  if (always.count(name)) return true;
  size_t base = stack.size() - schema.arguments().size();
  if (name == "aten::repeat_interleave") return stack.back().isNone();  // output_size
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_")
    for (const auto& index : stack[base + 1].toOptionalTensorVector())
      if (index.has_value() && index->defined() && index->scalar_type() == at::kBool) return true;
  return false;
}

// Show `shown` (poison, or what was there before) until the stream gets to the kernel that has already run.
void hide(const Tensor& tensor, const Tensor* before, StreamKey key) {
  if (!tensor.numel() || !tensor.is_non_overlapping_and_dense()) return;
  Tensor visible = raw(tensor), result = visible.clone();
  if (before)
    visible.copy_(*before);
  else
    memset(visible.data_ptr(), kPoison, tensor.numel() * tensor.itemsize());
  issue(key, [visible, result] { copy_now(result, visible); });
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto leave = c10::make_scope_exit([before = std::exchange(in_kernel, true)] { in_kernel = before; });
  at::native::cpu_fallback(op, stack);
}

void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Lock lock(mutex);
  kernels++;
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), base = stack->size() - count;
  int device = -1;
  for (size_t i = 0; i < count && device < 0; i++) {
    const auto& value = (*stack)[base + i];
    if (is_late(value)) device = value.toTensor().device().index();
    if (value.isTensorList() && value.toTensorVector().size() && is_late(value.toTensorVector()[0]))
      device = value.toTensorVector()[0].device().index();
  }
  if (device < 0) return fall_back(op, stack);
  auto key = current(device);
  touch(device);
  if (asks_for_sizes(op, *stack)) waits[op.schema().name()]++;
  if (late_kernels && issued_in_place(op, stack, key)) return;
  run_all(key);  // the kernel itself runs now, on the results of those before it in its stream
  if (!late_kernels) return fall_back(op, stack);
  size_t targets = 0;
  std::vector<std::pair<Tensor, Tensor>> before;
  for (size_t i = 0; i < count; i++) {
    if (!writes(schema.arguments()[i])) continue;
    targets++;
    const auto value = (*stack)[base + i];
    if (is_late(value) && value.toTensor().numel())
      before.emplace_back(value.toTensor(), raw(value.toTensor()).clone());
  }
  fall_back(op, stack);
  run_all(key);
  if (targets > before.size()) return;  // lists of targets: seen at once
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& [tensor, old] : before)
    if (tensor.sizes() == old.sizes()) hide(tensor, &old, key);
  if (!targets)
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
      if (is_late((*stack)[i])) hide((*stack)[i].toTensor(), nullptr, key);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("view", view);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int index) { current_device = index; });
  m.def("pin", &pin);
  m.def("unpin", &unpin);
  m.def("contexts", [] {
    Lock lock(mutex);
    return contexts;
  });
  m.def("set_late_kernels", [](bool on) {
    Lock lock(mutex);
    for (auto& [key, queue] : queues) run_all(key);
    late_kernels = on;
  });
  m.def("census", [] {
    Lock lock(mutex);
    return std::make_pair(waits, transfers);
  });
  m.def("memory", [](int device) {
    Lock lock(mutex);
    return std::make_pair(allocated[device], peak[device]);
  });
  m.def("reset_peak", [](int device) {
    Lock lock(mutex);
    peak[device] = allocated[device];
  });
  m.def("counts", [] {
    Lock lock(mutex);
    return std::make_pair(kernels, late_copies);
  });
}
