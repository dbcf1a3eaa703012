// Two CUDA devices made of host memory, for a build of torch without CUDA (see __init__.py).
//
// Tensors are dense CUDA tensors whose memory is the host's. An operator without a kernel here is answered by the CPU's kernel on a twin that
// shares the memory. What the double adds to the CPU's results is what makes a device different:
// - tensors of several devices do not mix; random numbers come from the device's own generators;
// - reading a value, or a blocking copy, counts as a wait for the device, and is an error where the sync debug mode says so;
// - a copy to page-locked memory arrives at the next wait, and until then there is nonsense in it; page-locked memory that is overwritten
//   before the next wait is reported; memory that was never written holds nonsense too.
#include <torch/library.h>
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <map>
#include <set>
#include <mutex>
#include <cstdlib>
#include <cstring>

using at::Tensor; using c10::Device; using c10::DeviceType; using c10::Stream;
constexpr int N = 2;
static thread_local int current = 0;
static thread_local int64_t streams[N] = {0, 0};
static std::atomic<int64_t> next_stream{1};
static std::mutex lock;

// ------------------------------------------------------------------ records
static int sync_mode = 0;
static std::vector<std::string> violations;
struct Pending { Tensor dst, value, src; };
static std::vector<Pending> pending;
static void flush() {
  std::vector<Pending> all;
  { std::lock_guard<std::mutex> g(lock); all.swap(pending); }
  for (auto& p : all) {
    if (p.dst.defined()) { at::AutoDispatchBelowADInplaceOrView guard; p.dst.copy_(p.value); }
    else if (p.src.nbytes() == p.value.nbytes() && std::memcmp(p.src.data_ptr(), p.value.data_ptr(), p.value.nbytes()) != 0)
      violations.push_back("a page-locked tensor was overwritten while its copy to the device was running");
  }
}
static void synced(const std::string& name) {
  if (sync_mode == 2) TORCH_CHECK(false, "called a synchronizing CUDA operation: ", name);
  flush();
}

// ------------------------------------------------------------------ memory
static int64_t held[N] = {0, 0}, peak[N] = {0, 0};
static std::set<void*> pinned;
struct Ctx { void* p; size_t n; int dev; };
static void del(void* c) { auto* x = (Ctx*)c; { std::lock_guard<std::mutex> g(lock); if (x->dev >= 0) held[x->dev] -= (x->n + 511) / 512 * 512; else pinned.erase(x->p); } std::free(x->p); delete x; }
struct Alloc final : c10::Allocator {
  bool is_pin;
  explicit Alloc(bool p) : is_pin(p) {}
  c10::DataPtr allocate(size_t n) override {
    int d = is_pin ? -1 : current;
    if (d >= 0) {
      std::lock_guard<std::mutex> g(lock);
      held[d] += (n + 511) / 512 * 512; peak[d] = std::max(peak[d], held[d]);
    }
    void* p = n ? std::aligned_alloc(512, (n + 511) / 512 * 512) : nullptr;
    if (p) std::memset(p, 0x7f, n);  // what is not written is NaN-like or huge
    if (d < 0 && p) { std::lock_guard<std::mutex> g(lock); pinned.insert(p); }
    return {p, new Ctx{p, n, d}, &del, d < 0 ? Device(DeviceType::CPU) : Device(DeviceType::CUDA, d)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override { std::memcpy(d, s, n); }
};
static Alloc device_alloc(false), pin_alloc(true);
static bool is_pinned_ptr(const void* p) {
  std::lock_guard<std::mutex> g(lock);
  for (void* base : pinned) if (base == p) return true;
  return false;
}
static bool is_pinned_tensor(const Tensor& t) { return t.defined() && t.is_cpu() && t.has_storage() && is_pinned_ptr(t.storage().data()); }

// ------------------------------------------------------------------ generators
struct SimGen : at::CPUGeneratorImpl {
  SimGen(int d, uint64_t s = 67280421310721) : at::CPUGeneratorImpl(s) { device_ = Device(DeviceType::CUDA, d); }
  SimGen* clone_impl() const override { auto* g = new SimGen(device_.index()); g->set_engine(const_cast<SimGen*>(this)->engine()); return g; }
};
static at::Generator& default_gen(int d) {
  static std::vector<at::Generator> g = {at::make_generator<SimGen>(0), at::make_generator<SimGen>(1)};
  return g.at(d < 0 ? current : d);
}

// ------------------------------------------------------------------ hooks and guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType T = DeviceType::CUDA;
  DeviceType type() const override { return T; }
  Device exchangeDevice(Device d) const override { int o = current; if (d.index() >= 0) current = d.index(); return Device(T, o); }
  Device getDevice() const override { return Device(T, current); }
  void setDevice(Device d) const override { if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  Stream getStream(Device d) const override { int i = d.index() < 0 ? current : d.index(); return Stream(Stream::UNSAFE, Device(T, i), streams[i]); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(T, d.index() < 0 ? current : d.index()), 0); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, Device(T, d.index() < 0 ? current : d.index()), next_stream++); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override { int i = s.device_index(); auto o = streams[i]; streams[i] = s.id(); return Stream(Stream::UNSAFE, Device(T, i), o); }
  c10::DeviceIndex deviceCount() const noexcept override { return N; }
  void record(void** e, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *e = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { flush(); return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { flush(); }
  void synchronizeEvent(void*) const override { flush(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { flush(); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
static Guard the_guard;
struct SimHooks : at::CUDAHooksInterface {
  explicit SimHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex deviceCount() const override { return N; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { int o = current; if (d >= 0) current = d; return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  int getNumGPUs() const override { return N; }
  bool isPinnedPtr(const void* p) const override { return is_pinned_ptr(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pin_alloc; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_alloc; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_gen(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { static bool given[N] = {false, false}; int i = d < 0 ? current : d; if (!given[i]) { given[i] = true; return default_gen(i); } return at::make_generator<SimGen>(d < 0 ? current : d); }
  void deviceSynchronize(c10::DeviceIndex) const override { flush(); }
};
namespace at { using SimHooks = ::SimHooks; C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimHooks) }

// ------------------------------------------------------------------ tensors
static Tensor twin(const Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  void* p = t.has_storage() ? (char*)t.storage().mutable_data() : nullptr;
  size_t bytes = t.storage().nbytes();
  c10::Storage held = t.storage();
  c10::Storage s(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(p, new c10::Storage(held), [](void* c) { delete (c10::Storage*)c; }, Device(DeviceType::CPU)), c10::GetAllocator(DeviceType::CPU), true);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
static Tensor wrap(const Tensor& t, int dev) {
  if (!t.defined()) return t;
  if (t.is_cuda() || t.layout() != at::kStrided) return t;
  int o = current; current = dev;
  auto r = at::detail::empty_strided_generic(t.sizes(), t.strides(), &device_alloc, c10::DispatchKeySet(c10::DispatchKey::CUDA), t.scalar_type());
  current = o;
  size_t n = std::min(r.storage().nbytes(), t.storage().nbytes() - t.storage_offset() * t.itemsize());
  if (n && t.numel()) std::memcpy(r.storage().mutable_data(), (const char*)t.storage().data() + t.storage_offset() * t.itemsize(), n);
  return r;
}
static const std::set<std::string> SYNCS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::_unique2",
  "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave", "aten::bincount", "aten::histc", "aten::nonzero_static", "aten::_unique", "aten::multinomial_check"};
static const std::set<std::string> MIXED = {"aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::set_", "aten::_foreach_copy_"};

struct Quiet final : c10::WarningHandler { void process(const c10::Warning&) override {} };
static Quiet quiet;

static void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  std::string name = schema.name(), full = name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  auto begin = stack->size() - n;
  std::vector<c10::IValue> original(stack->begin() + begin, stack->end());
  std::vector<std::pair<Tensor, Tensor>> pairs;  // device tensor, twin
  int dev = -1; bool cpu_with_dims = false, cpu_any = false, sparse = false;
  auto convert = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    if (t.is_cuda()) {
      if (dev >= 0 && t.device().index() != dev && !MIXED.count(name)) TORCH_CHECK(false, "Expected all tensors to be on the same device, but found cuda:", dev, " and cuda:", (int)t.device().index(), " in ", full);
      dev = t.device().index();
      if (t.layout() != at::kStrided) { sparse = true; return t; }
      for (auto& p : pairs) if (p.first.is_same(t)) return p.second;
      pairs.emplace_back(t, twin(t));
      return pairs.back().second;
    }
    if (t.is_cpu()) { cpu_any = true; if (t.dim() > 0 || name.rfind("aten::_fused", 0) == 0 || name.rfind("aten::_amp", 0) == 0) cpu_with_dims = true; }
    return t;
  };
  c10::optional<Device> wanted; bool has_bool_index = false;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor()) v = convert(v.toTensor());
    else if (v.isTensorList()) { std::vector<Tensor> out; for (const Tensor& t : v.toTensorList()) out.push_back(convert(t)); v = c10::List<Tensor>(out); }
    else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const auto& t : v.toOptionalTensorList()) { std::optional<Tensor> o = t; 
        if (o && o->defined()) { if (o->is_cuda() && (o->scalar_type() == at::kBool || o->scalar_type() == at::kByte)) has_bool_index = true; out.push_back(convert(*o)); } else out.push_back(o); }
      v = out;
    }
    else if (v.isDevice()) { if (v.toDevice().is_cuda()) { wanted = v.toDevice(); v = Device(DeviceType::CPU); } }
    else if (v.isGenerator()) {}
  }
  TORCH_CHECK(!(cpu_with_dims && dev >= 0 && !MIXED.count(name)), "Expected all tensors to be on the same device, but found cuda:", dev, " and cpu in ", full);
  if (wanted) dev = wanted->index() < 0 ? current : wanted->index();
  if (dev < 0) dev = current;
  bool is_put = name.find("index_put") != std::string::npos;
  if (SYNCS.count(name) || (has_bool_index && !is_put) || (name == "aten::index" && cpu_any) || (is_put && cpu_with_dims)) synced(full);
  if (has_bool_index && is_put) { bool one = false; for (auto& v : original) if (v.isTensor() && v.toTensor().numel() == 1) one = true; if (!one) synced(full); }
  // random numbers come from the device's own generator
  const bool random = op.hasSchema() && [&] { for (auto tag : op.getTags()) if (tag == at::Tag::nondeterministic_seeded) return true; return false; }();
  at::Generator source; at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU); Tensor before; bool own = false;
  if (random) {
    source = default_gen(dev);
    for (size_t i = 0; i < n; i++) { auto& v = (*stack)[begin + i]; if (v.isGenerator()) {
      auto g = v.toGenerator(); TORCH_CHECK(g.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", g.device().str(), "' in ", full);
      source = g; v = c10::IValue(); } }
    before = cpu.get_state(); cpu.set_state(source.get_state()); own = true;
  }
  {
    if (full == "aten::mm.dtype" || full == "aten::addmm.dtype" || full == "aten::bmm.dtype") {
      at::ScalarType k = (*stack)[begin + 2].isInt() ? (*stack)[begin + 2].toScalarType() : at::kFloat;
      Tensor r = (full == "aten::mm.dtype") ? at::mm((*stack)[begin].toTensor().to(k), (*stack)[begin + 1].toTensor().to(k)) : at::bmm((*stack)[begin].toTensor().to(k), (*stack)[begin + 1].toTensor().to(k));
      torch::jit::drop(*stack, n); stack->push_back(r);
    } else {
      c10::WarningUtils::WarningHandlerGuard silent(&quiet);  // of outputs that the CPU's kernels resize
      try { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); }
      catch (...) { if (own) cpu.set_state(before); throw; }
    }
  }
  if (own) { source.set_state(cpu.get_state()); cpu.set_state(before); }
  // outputs
  auto rebuild = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    for (auto& p : pairs) if (p.second.is_same(t)) return p.first;
    for (auto& p : pairs) if (t.layout() == at::kStrided && t.has_storage() && t.storage().data() == p.second.storage().data() && t.storage().data() && p.second.storage().nbytes()) {  // a view
      auto r = at::native::as_strided_tensorimpl(p.first, t.sizes(), t.strides(), t.storage_offset()); 
      if (r.scalar_type() == t.scalar_type()) return r;
    }
    return wrap(t, dev);
  };
  for (auto& p : pairs) if (p.second.sizes() != p.first.sizes() || p.second.storage().data() != p.first.storage().data()) {  // resized or replaced
    Tensor fresh = p.second.storage().data() == p.first.storage().data() ? Tensor() : wrap(p.second, dev);
    if (fresh.defined()) p.first.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
    p.first.unsafeGetTensorImpl()->set_sizes_and_strides(p.second.sizes(), p.second.strides(), fresh.defined() ? 0 : p.second.storage_offset());
  }
  const auto m = schema.returns().size();
  for (size_t i = 0; i < m; i++) {
    auto& v = (*stack)[stack->size() - m + i];
    if (v.isTensor()) v = rebuild(v.toTensor());
    else if (v.isTensorList()) { std::vector<Tensor> out; for (const Tensor& t : v.toTensorList()) out.push_back(rebuild(t)); v = c10::List<Tensor>(out); }
  }
}

static Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  bool down = self.is_cpu() && src.is_cuda(), up = self.is_cuda() && src.is_cpu();
  Tensor s = src.is_cuda() ? twin(src) : src, d = self.is_cuda() ? twin(self) : self;
  if (src.numel() == 0 || self.numel() == 0) { return self; }
  if ((down || up) && !non_blocking) synced(down ? "copy to the host" : "copy to the device");
  if (down && non_blocking) {
    if (is_pinned_tensor(self)) {
      Tensor value = at::empty_like(d, d.options().pinned_memory(false)); value.copy_(s);
      if (d.is_non_overlapping_and_dense()) std::memset(d.data_ptr(), 0x7b, d.nbytes());
      std::lock_guard<std::mutex> l(lock); pending.push_back({d, value, Tensor()}); return self;
    }
    synced("copy to pageable host memory");
  }
  if (up && non_blocking && is_pinned_tensor(src) && src.is_non_overlapping_and_dense()) {
    Tensor value = at::empty_like(src, src.options().pinned_memory(false)); value.copy_(src);
    std::lock_guard<std::mutex> l(lock); pending.push_back({Tensor(), value, src});
  }
  d.copy_(s);
  return self;
}
static Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> f) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  int o = current; if (device && device->index() >= 0) current = device->index();
  TORCH_CHECK(current < N, "CUDA error: invalid device ordinal");
  auto r = at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_alloc, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), f);
  current = o; return r;
}
static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  int o = current; if (device && device->index() >= 0) current = device->index();
  auto r = at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_alloc, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
  current = o; return r;
}
static int64_t sdp(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }
static void record_stream(Tensor&, at::Stream) {}
static Tensor view_(const Tensor& t, at::IntArrayRef s) { return at::native::view(t, s); }
static Tensor strided(const Tensor& t, at::IntArrayRef a, at::IntArrayRef b, std::optional<int64_t> o) { return at::native::as_strided_tensorimpl(t, a, b, o); }
static Tensor alias_(const Tensor& t, at::IntArrayRef a, at::IntArrayRef b) { return at::native::as_strided_tensorimpl(t, a, b, t.storage_offset()); }
static const Tensor& resize_(const Tensor& t, at::IntArrayRef s, std::optional<at::MemoryFormat> f) {
  if (t.sizes() == s) return t;
  Tensor fresh = at::empty(s, t.options().memory_format(f));
  size_t keep = std::min(fresh.nbytes(), t.nbytes()); if (keep) std::memcpy(fresh.data_ptr(), t.data_ptr(), keep);
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
  return t;
}
static Tensor& set_storage(Tensor& t, at::Storage s, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(s));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return t;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("view", TORCH_FN(view_));
  m.impl("as_strided", TORCH_FN(strided));
  m.impl("_reshape_alias", TORCH_FN(alias_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  for (const char* name : {"convolution", "convolution_backward", "native_batch_norm", "native_dropout", "mm.dtype"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}
extern "C" {
void double_start() { *(void**)&at::detail::getCUDAHooks() = *(void**)new SimHooks(at::CUDAHooksArgs()); c10::impl::device_guard_impl_registry[(int)DeviceType::CUDA].store(&the_guard); }
int double_device() { return current; }
void double_set_device(int d) { current = d; }
int64_t double_stream(int d) { return streams[d]; }
void double_set_stream(int d, int64_t s) { streams[d] = s; }
int64_t double_new_stream() { return next_stream++; }
void double_flush() { flush(); }
void double_sync_mode(int m) { sync_mode = m; }
int64_t double_held(int d) { return held[d]; }
int64_t double_peak(int d) { return peak[d]; }
void double_reset_peak(int d) { peak[d] = held[d]; }
int64_t double_overwritten() { flush(); return violations.size(); }
}
