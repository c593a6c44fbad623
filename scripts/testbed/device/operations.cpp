// SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
// SPDX-License-Identifier: Apache-2.0
// aten's operations on the emulated device: what has a kernel for the device and one for the CPU
// becomes a kernel of the current stream that runs the CPU's on the same memory, without Python.
// platform.hpp says which device torch has it as.
#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "operations_api.hpp"
#include <platform.hpp>
#include "report.hpp"

namespace {

using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using platform::kType;
using torch::jit::Stack;

// What torch does through the runtime, without a kernel: memory, views, and reading one value.
const std::set<std::string> kThroughRuntime = {
    "empty",
    "empty_strided",
    "resize_",
    "set_",
    "is_set_to",
    "record_stream",
    "_local_scalar_dense",
    "is_pinned",
    "_pin_memory",
    "set_data",
    "empty_like",
    "_to_copy",
    "new_empty_strided",
    "resize_as_",
    "_copy_from_and_resize",
    "as_strided_",
    "_lazy_clone",
};

// Operations of all devices that choose a kernel by themselves.
const std::set<std::string> kLaunchesByItself = {"ldexp", "ldexp_"};

std::mutex waited_mutex;
std::map<std::string, int64_t> waited;  // operations that waited for their stream, with how often

bool is_here(const at::Tensor& tensor) { return tensor.device().type() == kType; }

// ---- tensors on the other side

// A number of the caller's program, which promotes types less than a tensor does.
at::Tensor as_number_of(const at::Tensor& tensor, at::Tensor copy) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor converted(const at::Tensor& tensor, c10::DeviceType type) {
  if (!tensor.defined() || tensor.device().type() == type) return tensor;
  auto options = tensor.options().device(type);
  at::Tensor result =
      type == c10::kCPU
          ? at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options)
          : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return as_number_of(tensor, result);
}

// A launch takes the values of the host as they are now (Programming Guide, kernel arguments).
at::Tensor as_argument(const at::Tensor& tensor) {
  if (!tensor.defined() || is_here(tensor)) return converted(tensor, c10::kCPU);
  return as_number_of(tensor, tensor.clone());
}

// torch's meta kernels take numbers of the caller's program as they are.
at::Tensor as_shape(const at::Tensor& tensor) {
  const bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
  return is_number ? tensor : converted(tensor, c10::kMeta);
}

template <typename Convert>
IValue each_tensor(const IValue& value, const Convert& convert, c10::DeviceType type) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isDevice()) return c10::Device(type);
  if (value.isGenerator()) return IValue();
  if (value.isTensorList() || value.isOptionalTensorList() ||
      (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensor())) {
    auto list = value.toList();
    c10::impl::GenericList converted(list.elementType());
    for (const IValue& item : list.vec()) converted.push_back(each_tensor(item, convert, type));
    return converted;
  }
  return value;
}

template <typename Convert>
Stack all_tensors(const Stack& values, const Convert& convert, c10::DeviceType type) {
  Stack result;
  for (const IValue& value : values) result.push_back(each_tensor(value, convert, type));
  return result;
}

void flatten(const IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
}

c10::Stream stream_for(const Stack& arguments) {
  const c10::impl::VirtualGuardImpl guard(kType);
  for (const IValue& value : arguments) {
    std::vector<at::Tensor> tensors;
    flatten(value, tensors);
    for (const at::Tensor& tensor : tensors)
      if (tensor.defined() && is_here(tensor)) return guard.getStream(tensor.device());
  }
  return guard.getStream(guard.getDevice());
}

// As CUDA's kernels do, of which only those that take indices take some from the host.
void refuse_other_devices(const OperatorHandle& op, const Stack& arguments) {
  static const std::set<std::string> kTakeIndices = {"aten::index", "aten::_index_put_impl_",
                                                     "aten::_unsafe_index"};
  if (kTakeIndices.count(op.operator_name().name)) return;
  for (const IValue& value : arguments) {
    std::vector<at::Tensor> tensors;
    flatten(value, tensors);
    for (const at::Tensor& tensor : tensors)
      TORCH_CHECK(!tensor.defined() || is_here(tensor) || tensor.dim() == 0,
                  "Expected all tensors to be on the same device: ", op.operator_name(),
                  " got one on ", tensor.device());
  }
}

// ---- what an operation reads and writes

using Accesses = std::vector<device::Access>;

// The bytes of a tensor, run by run: what lies between the rows of a slice is not its own.
void add_bytes(const at::Tensor& tensor, bool is_write, Accesses& accesses) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return;
  auto start = static_cast<const char*>(tensor.const_data_ptr());
  if (!is_here(tensor) && !asynchzp_device_is_pinned(start)) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0)
      dims.push_back({tensor.stride(dim), tensor.size(dim)});
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;  // elements next to one another
  size_t inner = 0;
  for (; inner < dims.size() && dims[inner].first <= run; inner++)
    run = std::max(run, dims[inner].first * (dims[inner].second - 1) + run);
  const size_t item = tensor.element_size();
  std::vector<int64_t> index(dims.size() - inner);
  for (;;) {
    int64_t offset = 0;
    for (size_t i = 0; i < index.size(); i++) offset += index[i] * dims[inner + i].first;
    accesses.push_back({start + offset * item, run * item, is_write});
    size_t i = 0;
    while (i < index.size() && ++index[i] == dims[inner + i].second) index[i++] = 0;
    if (i == index.size()) return;
  }
}

void add_bytes_of_all(const IValue& value, bool is_write, Accesses& accesses) {
  auto add = [&](const at::Tensor& tensor) {
    add_bytes(tensor, is_write, accesses);
    return tensor;
  };
  each_tensor(value, add, kType);
}

// The schema says which arguments an operation changes.
Accesses accesses_of(const OperatorHandle& op, const Stack& arguments, const Stack& outputs) {
  Accesses accesses;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto alias = op.schema().arguments()[i].alias_info();
    add_bytes_of_all(arguments[i], alias && alias->isWrite(), accesses);
  }
  for (const IValue& output : outputs) add_bytes_of_all(output, true, accesses);
  return accesses;
}

// ---- random numbers

// As a kernel takes them: at the call, from the state of the device's generator, which moves on, or
// in a captured graph from memory that each launch writes (CUDAGeneratorImpl.h, "Philox engine" and
// "CUDA Graph-safe RNG states"). The numbers are those of a CPU's generator.
std::optional<platform::Numbers> drawn_numbers(const Stack& arguments, c10::Device device) {
  at::Generator of_device = at::globalContext().defaultGenerator(device);
  for (const IValue& value : arguments)
    if (value.isGenerator()) of_device = value.toGenerator();
  std::lock_guard lock(of_device.mutex());
  return platform::drawn(of_device, 4);  // as few as CUDA allows
}

at::Generator generator_of(const platform::Numbers& numbers) {
  uint64_t seed = numbers.seed, offset = numbers.offset;
  if (numbers.seed_memory) {
    seed = *numbers.seed_memory;
    offset += *numbers.offset_memory;
  }
  return at::make_generator<at::CPUGeneratorImpl>((seed + 1) * 0x9e3779b97f4a7c15 + offset);
}

std::optional<size_t> generator_argument(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].name() == "generator") return i;
  return std::nullopt;
}

// An operation that asks the CPU's default generator gets these numbers from it.
template <typename Run>
void with_numbers_of(const at::Generator& generator, const Run& run) {
  at::Generator own = at::globalContext().defaultGenerator(c10::kCPU);
  const at::Tensor before = own.get_state();
  own.set_state(generator.get_state());
  run();
  own.set_state(before);
}

bool is_dropout(const OperatorHandle& op) {
  return op.operator_name().name == "aten::native_dropout";
}

// As aten's native_dropout_cpu computes it, which takes no generator.
Stack dropped(const Stack& values, const at::Generator& generator) {
  const at::Tensor input = values[0].toTensor();
  const double kept = 1 - values[1].toDouble();
  at::Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  if (const auto training = values[2].toOptional<bool>(); training && !*training)
    return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(kept, generator);
  return {input.mul(mask).mul_(kept == 0 ? 0. : 1. / kept), mask};
}

// ---- the two ways to run an operation

// From here on what the caching allocator takes back is poisoned, on the stream that it belongs to.
// A block that record_stream holds for another stream counts as freed when it is let go.
//
// Tensor.record_stream asks of who frees without it "that any non-creation stream uses of a tensor
// are synced back to the creation stream before you deallocate the tensor". The allocator itself
// overwrites nothing before it hands the block out again: with ASYNCHZP_DEVICE_FREES=late that is
// when it is checked and poisoned, for programs that order the stream in between.
void follow_allocator() {
  using platform::TraceEntry;
  const char* text = getenv("ASYNCHZP_DEVICE_FREES");
  const bool is_late = text && !strcmp(text, "late");
  auto note = [is_late](const TraceEntry& entry) {
    auto start = reinterpret_cast<void*>(entry.addr_);
    // Memory of a graph belongs to it while it may be launched: what is freed outside of a capture
    // is free for later captures alone. What a capture frees of another pool is no part of it.
    static std::pair<unsigned long long, c10::MempoolId_t> capturing;  // each has one pool
    const auto pool = entry.mempool_;
    const auto capture = asynchzp_device_capture(entry.stream_);
    if (capture && entry.action_ == TraceEntry::ALLOC) capturing = {capture, pool};
    if (capture ? capturing != std::pair{capture, pool} : pool != c10::MempoolId_t{0, 0}) return;
    void* stream = entry.stream_;
    const size_t size = entry.size_;
    if (entry.action_ == TraceEntry::FREE_COMPLETED && !is_late)
      platform::in_order(stream, "freeing", [=] { asynchzp_device_freed(start, size, stream); });
    if (entry.action_ == TraceEntry::ALLOC)
      platform::in_order(stream, "allocating", [=] {
        const device::Access access{start, size, true};
        asynchzp_device_submit(stream, device::watch::Kind::allocation, "allocating", &access, 1);
        if (is_late) asynchzp_device_poison(start, size, stream);
      });
  };
  platform::attach_to_allocator(note);
}

void launch(const c10::Stream& stream, const std::string& name, const Accesses& accesses,
            std::function<void()> run) {
  static std::once_flag once;
  std::call_once(once, follow_allocator);  // torch has made its allocator by now
  std::function<void()> kernel = [name, run = std::move(run)] {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    try {
      run();
    } catch (const c10::Error& error) {
      device::end("%s failed: %.600s", name.c_str(), error.what_without_backtrace());
    } catch (const std::exception& error) {
      device::end("%s failed: %.600s", name.c_str(), error.what());
    }
  };
  void* handle = platform::handle_of(stream);
  platform::in_order(handle, name, [=, kernel = std::move(kernel)]() mutable {
    asynchzp_device_submit(handle, device::watch::Kind::kernel, name, accesses.data(),
                           accesses.size());
    asynchzp_device_launch(handle, &kernel);
  });
}

struct Returns {
  std::vector<int> argument;  // that a return is, or -1
  bool has_new = false, are_tensors = true;
};

Returns returns_of(const c10::FunctionSchema& schema) {
  Returns found;
  for (const c10::Argument& one : schema.returns()) {
    const c10::TypePtr& type = one.type();
    found.are_tensors &= type->isSubtypeOf(*c10::TensorType::get()) ||
                         type->isSubtypeOf(*c10::ListType::ofTensors());
    int index = -1;
    if (one.alias_info())
      for (size_t i = 0; i < schema.arguments().size(); i++) {
        auto alias = schema.arguments()[i].alias_info();
        if (alias && alias->beforeSets() == one.alias_info()->beforeSets()) index = i;
      }
    found.argument.push_back(index);
    found.has_new |= index < 0;
  }
  return found;
}

// An out= that is empty gets the shape that the result has on torch's own meta device.
void resize_empty_outputs(const OperatorHandle& op, const Stack& arguments) {
  std::vector<size_t> empty;
  for (size_t i = 0; i < arguments.size(); i++)
    if (op.schema().arguments()[i].is_out() && arguments[i].isTensor() &&
        arguments[i].toTensor().numel() == 0)
      empty.push_back(i);
  if (empty.empty()) return;
  const Stack on_meta = all_tensors(arguments, as_shape, c10::kMeta);
  Stack values = on_meta;
  op.callBoxed(values);
  for (size_t i : empty) arguments[i].toTensor().resize_(on_meta[i].toTensor().sizes());
}

// Where the CPU's kernel takes other types than CUDA's: its layer norm keeps mean and deviation in
// the type of the input or, beside weights of another type, in fp32 (layer_norm.cpp), and its
// softmax does not convert (SoftMax.cpp).
void adapt_types(const OperatorHandle& op, Stack& values) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::native_layer_norm_backward") {
    const auto type = values[1].toTensor().scalar_type();
    const auto weight = values[5].toOptional<at::Tensor>();
    const bool is_mixed = weight && weight->defined() && weight->scalar_type() != type;
    for (int i : {3, 4}) values[i] = values[i].toTensor().to(is_mixed ? at::kFloat : type);
  }
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && values[2].toBool()) {
    values[0] = values[0].toTensor().to(at::kFloat);
    values[2] = false;
  }
  if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data")
    values[3] = values[0].toTensor().scalar_type();
}

// Of the stream's memory, as the CPU sees it; results are copied to where the caller expects them.
void run_on_cpu(const OperatorHandle& op, Stack values, const std::vector<IValue>& outputs,
                const std::optional<platform::Numbers>& numbers) {
  adapt_types(op, values);
  if (numbers && is_dropout(op)) {
    values = dropped(values, generator_of(*numbers));
  } else {
    if (numbers) values[*generator_argument(op)] = generator_of(*numbers);
    op.callBoxed(values);
  }
  for (size_t i = 0; i < outputs.size(); i++) {
    std::vector<at::Tensor> expected, got;
    flatten(outputs[i], expected);
    if (expected.empty()) continue;
    flatten(values[i], got);
    for (size_t j = 0; j < expected.size(); j++)
      if (expected[j].defined()) expected[j].copy_(got[j]);
  }
}

// Results whose shape depends on values, and values for the host: these wait on a device too, and
// torch says so where it is asked to (torch.cuda.set_sync_debug_mode). numbers: of an operation
// that takes no generator as an argument, so that they have to be drawn at the call.
void run_now(const OperatorHandle& op, Stack* stack, const Stack& arguments,
             const c10::Stream& stream, const std::optional<platform::Numbers>& numbers) {
  const std::string name = c10::toString(op.operator_name());
  {
    std::lock_guard lock(waited_mutex);
    waited[name]++;
  }
  launch(stream, name, accesses_of(op, arguments, {}), [] {});
  if (numbers)
    platform::wait_untold(stream);
  else
    stream.synchronize();
  Stack values = all_tensors(arguments, as_argument, c10::kCPU);
  {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    const auto argument = generator_argument(op);
    if (numbers && argument) values[*argument] = generator_of(*numbers);
    if (numbers && !argument)
      with_numbers_of(generator_of(*numbers), [&] { op.callBoxed(values); });
    else
      op.callBoxed(values);
  }
  const Returns returns = returns_of(op.schema());
  auto on_device = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto result = at::empty_strided(tensor.sizes(), tensor.strides(),
                                    tensor.options().device(kType, stream.device_index()));
    at::Tensor target = converted(result, c10::kCPU);
    Accesses accesses;
    add_bytes(result, true, accesses);
    launch(stream, name, accesses, [target, tensor] { target.copy_(tensor); });
    return result;
  };
  for (size_t i = 0; i < values.size(); i++) {
    const int same = returns.argument[i];
    stack->push_back(same < 0 ? each_tensor(values[i], on_device, kType) : arguments[same]);
  }
}

// The new tensors that the operation returns, or false where torch cannot say their shapes.
bool new_outputs(const OperatorHandle& op, const Stack& arguments, c10::Device device,
                 Stack& outputs) {
  Stack values = all_tensors(arguments, as_shape, c10::kMeta);
  try {
    op.callBoxed(values);
  } catch (const std::exception&) {
    return false;
  }
  outputs = all_tensors(
      values,
      [&](const at::Tensor& meta) {
        if (!meta.defined()) return meta;
        return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
      },
      kType);
  return true;
}

void run_operation(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const Stack arguments = torch::jit::pop(*stack, num_arguments);
  refuse_other_devices(op, arguments);
  const auto stream = stream_for(arguments);
  const Returns returns = returns_of(op.schema());
  Stack outputs(returns.argument.size());
  std::optional<platform::Numbers> numbers;
  if (op.hasTag(at::Tag::nondeterministic_seeded))
    numbers = drawn_numbers(arguments, stream.device());
  if (!returns.are_tensors || (numbers && !generator_argument(op) && !is_dropout(op)) ||
      (returns.has_new && !new_outputs(op, arguments, stream.device(), outputs)))
    return run_now(op, stack, arguments, stream, numbers);
  resize_empty_outputs(op, arguments);
  Stack values = all_tensors(arguments, as_argument, c10::kCPU);
  std::vector<IValue> expected;
  for (size_t i = 0; i < outputs.size(); i++) {
    const int same = returns.argument[i];
    stack->push_back(same < 0 ? outputs[i] : arguments[same]);
    expected.push_back(same < 0 ? each_tensor(outputs[i], as_argument, c10::kCPU) : IValue());
  }
  const std::string name = c10::toString(op.operator_name());
  Accesses accesses = accesses_of(op, arguments, outputs);
  if (numbers && numbers->seed_memory)
    for (const int64_t* one : {numbers->seed_memory, numbers->offset_memory})
      accesses.push_back({reinterpret_cast<const char*>(one), sizeof *one, false});
  launch(stream, name, accesses,
         [op, values, expected, numbers] { run_on_cpu(op, values, expected, numbers); });
}

// Where kernels find a tensor of the device, or of the host in page-locked memory.
at::Tensor for_kernels(const at::Tensor& tensor) {
  if (is_here(tensor)) return converted(tensor, c10::kCPU);
  void* start = asynchzp_device_for_kernels(tensor.data_ptr());
  return at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.options());
}

// ---- copies: they follow the rules of cudaMemcpyAsync, with conversion and strides

void run_copy(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (platform::has_copied(op, keys, stack)) return;
  Stack arguments = torch::jit::pop(*stack, 3);
  at::Tensor to = arguments[0].toTensor(), from = arguments[1].toTensor();
  stack->push_back(to);
  if (to.numel() == 0) return;
  const c10::impl::VirtualGuardImpl guard(kType);
  const auto stream = guard.getStream((is_here(to) ? to : from).device());
  const at::Tensor& host = is_here(to) ? from : to;
  const bool is_later = arguments[2].toBool() && !is_here(host) && host.is_pinned();
  at::Tensor target = for_kernels(to);
  at::Tensor source = is_here(from) || is_later ? for_kernels(from) : as_argument(from);
  Accesses accesses;
  if (is_here(from) || is_later) add_bytes(from, false, accesses);
  add_bytes(to, true, accesses);
  const bool is_over_link = !is_here(host), is_to_host = !is_here(to);
  launch(stream, "aten::copy_", accesses, [=, handle = platform::handle_of(stream)] {
    target.copy_(source);
    if (is_over_link) asynchzp_device_carry(handle, target.nbytes(), is_to_host);
  });
  if (is_later)  // as torch's own copy: the memory is kept until the stream is through
    at::getHostAllocator(kType)->record_event(host.data_ptr(),
                                              host.storage().data_ptr().get_context(), stream);
  // As aten/src/ATen/native/cuda/Copy.cu: it waits unless it was asked not to.
  if (!is_here(to) && !is_later) stream.synchronize();
}

// ---- installation

bool has_kernel(const OperatorHandle& op, DispatchKey key) {
  return op.hasKernelForDispatchKey(key);
}

bool is_emulated(const OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string name = op.operator_name().name.substr(6);
  if (kThroughRuntime.count(name) || name == "copy_") return false;
  if (!has_kernel(op, platform::kKey) && !kLaunchesByItself.count(name)) return false;
  if (!has_kernel(op, DispatchKey::CPU) &&
      !has_kernel(op, DispatchKey::CompositeExplicitAutograd) &&
      !(platform::kHasComposites && has_kernel(op, DispatchKey::CompositeImplicitAutograd)))
    return false;
  for (const c10::Argument& one : schema.returns())  // a view
    if (one.alias_info() && !one.alias_info()->isWrite()) return false;
  return true;
}

// ---- tracebacks

using torch::CapturedTraceback;

// may_wait: for the interpreter's lock.
std::shared_ptr<void> gather(bool may_wait) {
  if (!may_wait && !(PyGILState_Check && PyGILState_Check())) return nullptr;
  return CapturedTraceback::gather(true, false, true);
}

std::string text_of(const std::shared_ptr<void>& traceback) {
  auto found = torch::symbolize({static_cast<CapturedTraceback*>(traceback.get())});
  std::string text;
  for (uint64_t index : found.tracebacks[0]) {
    const auto& frame = found.all_frames[index];
    text += frame.filename + ":" + std::to_string(frame.lineno) + " " + frame.funcname + "\n";
  }
  return text;
}

auto& registrations = *new std::vector<c10::RegistrationHandleRAII>;

void install(const c10::OperatorName& name, c10::KernelFunction kernel) {
  registrations.push_back(c10::Dispatcher::singleton().registerImpl(
      name, platform::kKey, std::move(kernel), std::nullopt, nullptr, "emulated device"));
}

}  // namespace

// With the variable set the watch keeps where each operation comes from: slower.
EXPORT void asynchzp_device_trace() {
  if (getenv("ASYNCHZP_DEVICE_TRACEBACKS")) asynchzp_device_keep_tracebacks(gather, text_of);
}

// Called once, by the runtime.
EXPORT void asynchzp_device_install_operations() {
  platform::prepare();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (op && is_emulated(*op))
      install(name, c10::KernelFunction::makeFromBoxedFunction<&run_operation>());
  }
  install({"aten::copy_", ""}, c10::KernelFunction::makeFromBoxedFunction<&run_copy>());
  asynchzp_device_trace();
}

// "name count" of each operation that waited for its stream, one a line.
EXPORT const char* asynchzp_device_waited() {
  static std::string text;
  std::lock_guard lock(waited_mutex);
  text.clear();
  for (auto& [name, count] : waited) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}
