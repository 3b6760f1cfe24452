#include "c10d/recognise.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "c10d/memory.h"

namespace crystal {
namespace {

namespace py = pybind11;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Known {
  WeakTensor tensor;
  int32_t owner;
};

struct Parameters {
  std::mutex mutex;
  // A weak reference keeps the address from being used again.
  std::unordered_map<c10::TensorImpl*, Known> known;
  std::atomic<int> wrapping{0}; // how many of them wrap other tensors
};
Parameters& the_parameters() {
  static auto* parameters = new Parameters;
  return *parameters;
}

bool wraps(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// By torch's protocol for tensors that are made of others. One that does not follow it
// has no storage that we could find.
std::vector<at::Tensor> flattened(const py::object& tensor) {
  std::vector<at::Tensor> found;
  if (!py::hasattr(tensor, "__tensor_flatten__")) {
    return found;
  }
  const py::sequence parts = tensor.attr("__tensor_flatten__")();
  for (const auto& name : py::sequence(parts[0])) {
    const py::object inner = tensor.attr(py::str(name));
    if (THPVariable_Check(inner.ptr())) { // there may be others, a mesh say
      found.push_back(THPVariable_Unpack(inner.ptr()));
    }
  }
  return found;
}

std::vector<at::Tensor> inner_tensors(const at::Tensor& tensor) {
  py::gil_scoped_acquire gil;
  const auto self = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  // DTensor's, without the protocol's detours: they are looked at in every iteration.
  static PyObject* const kLocal = PyUnicode_InternFromString("_local_tensor");
  if (PyObject* local = PyObject_GetAttr(self.ptr(), kLocal)) {
    const auto held = py::reinterpret_steal<py::object>(local);
    if (THPVariable_Check(local)) {
      return {THPVariable_Unpack(local)};
    }
  }
  PyErr_Clear();
  try {
    return flattened(self);
  } catch (py::error_already_set&) { // looking on must not end a program
    return {};
  }
}

template <class Use>
void each_address(const at::Tensor& tensor, const Use& use) {
  if (!tensor.defined()) {
    return;
  }
  if (wraps(tensor)) {
    for (const auto& inner : inner_tensors(tensor)) {
      each_address(inner, use);
    }
  } else if (tensor.is_sparse()) {
    each_address(tensor._indices(), use);
    each_address(tensor._values(), use);
  } else if (tensor.device().is_cpu() && tensor.has_storage()) {
    if (const void* address = tensor.unsafeGetTensorImpl()->unsafe_storage().data()) {
      use(address);
    }
  }
}

void recognise(const at::Tensor& tensor, Recognised as, int32_t owner, Ledger& ledger) {
  each_address(tensor, [&](const void* address) { ledger.recognise(address, as, owner); });
}

void recognise_parameter(const at::Tensor& parameter, int32_t owner, Ledger& ledger) {
  recognise(parameter, Recognised::parameter, owner, ledger);
  recognise(parameter.unsafeGetTensorImpl()->grad(), Recognised::gradient, owner, ledger);
}

} // namespace

void recognise(const std::vector<at::Tensor>& tensors, Recognised as, int32_t owner) {
  if (Ledger* ledger = the_ledger()) {
    for (const auto& tensor : tensors) {
      recognise(tensor, as, owner, *ledger);
    }
  }
}

void know_parameter(const at::Tensor& parameter, int32_t owner) {
  Ledger* ledger = the_ledger();
  if (ledger == nullptr) {
    return;
  }
  {
    Parameters& parameters = the_parameters();
    std::lock_guard<std::mutex> lock(parameters.mutex);
    c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
    const auto [found, is_new] =
        parameters.known.try_emplace(impl, Known{WeakTensor(parameter.getIntrusivePtr()), owner});
    parameters.wrapping += is_new && wraps(parameter);
    owner = found->second.owner;
  }
  recognise_parameter(parameter, owner, *ledger);
}

int32_t owner_of(const at::Tensor& tensor) {
  Ledger* ledger = the_ledger();
  if (ledger == nullptr) {
    return -1;
  }
  {
    Parameters& parameters = the_parameters();
    std::lock_guard<std::mutex> lock(parameters.mutex);
    const auto found = parameters.known.find(tensor.unsafeGetTensorImpl());
    if (found != parameters.known.end()) {
      return found->second.owner;
    }
  }
  int32_t owner = -1;
  each_address(tensor, [&](const void* address) {
    owner = std::max(owner, ledger->owner_of_parameter(address));
  });
  return owner;
}

void look_at_parameters() {
  Ledger* ledger = the_ledger();
  if (ledger == nullptr) {
    return;
  }
  Parameters& parameters = the_parameters();
  // Taken before our lock, which a thread that holds the GIL may wait for.
  std::optional<py::gil_scoped_acquire> gil;
  if (parameters.wrapping > 0) {
    gil.emplace();
  }
  std::vector<std::pair<at::Tensor, int32_t>> alive; // let go of without the lock
  {
    std::lock_guard<std::mutex> lock(parameters.mutex);
    alive.reserve(parameters.known.size());
    for (auto known = parameters.known.begin(); known != parameters.known.end();) {
      if (auto tensor = known->second.tensor.lock()) {
        alive.emplace_back(at::Tensor(std::move(tensor)), known->second.owner);
        ++known;
      } else {
        known = parameters.known.erase(known);
      }
    }
  }
  for (const auto& [tensor, owner] : alive) {
    recognise_parameter(tensor, owner, *ledger);
  }
}

} // namespace crystal
