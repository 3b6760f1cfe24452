#include "c10d/memory_bindings.h"

#include <pybind11/numpy.h>

#include <algorithm>

#include "c10d/memory.h"
#include "c10d/recognise.h"

namespace py = pybind11;

namespace crystal {
namespace {

Ledger& kept_ledger() {
  TORCH_CHECK(
      the_ledger() != nullptr, "No account of memory is kept. This process. Start it before.");
  return *the_ledger();
}

Recognised recognised(const std::string& as) {
  for (const auto known : {Recognised::parameter, Recognised::gradient, Recognised::optimizer,
                           Recognised::communication}) {
    if (as == to_string(known)) {
      return known;
    }
  }
  TORCH_CHECK_VALUE(
      false, "Nothing is recognised as ", as,
      ". Memory's account. Use parameter, gradient, optimizer or communication.");
}

template <class T, class Value>
py::array_t<T> column(const std::vector<Block>& blocks, Value value) {
  py::array_t<T> made(static_cast<py::ssize_t>(blocks.size()));
  T* out = made.mutable_data();
  for (const auto& block : blocks) {
    *out++ = static_cast<T>(value(block));
  }
  return made;
}

py::dict block_columns() {
  const auto blocks = kept_ledger().blocks();
  py::dict columns;
  columns["bytes"] = column<int64_t>(blocks, [](const Block& b) { return b.bytes; });
  columns["taken"] = column<int64_t>(blocks, [](const Block& b) { return b.taken; });
  columns["given"] = column<int64_t>(blocks, [](const Block& b) { return b.given; });
  columns["taken_ns"] = column<int64_t>(blocks, [](const Block& b) { return b.taken_ns; });
  columns["given_ns"] = column<int64_t>(blocks, [](const Block& b) { return b.given_ns; });
  columns["taken_mark"] = column<int64_t>(blocks, [](const Block& b) { return b.taken_mark; });
  columns["given_mark"] = column<int64_t>(blocks, [](const Block& b) { return b.given_mark; });
  columns["owner"] = column<int32_t>(blocks, [](const Block& b) { return b.owner; });
  columns["is_shared"] = column<bool>(blocks, [](const Block& b) { return b.is_shared; });
  columns["as"] = column<int8_t>(blocks, [](const Block& b) { return b.as; });
  columns["phase"] = column<int8_t>(blocks, [](const Block& b) { return b.phase; });
  columns["by_library"] = column<bool>(blocks, [](const Block& b) { return b.by_library; });
  return columns;
}

py::list refusals() {
  py::list found;
  for (const auto& r : kept_ledger().refusals()) {
    py::dict one;
    one["bytes"] = r.bytes;
    one["held_bytes"] = r.held_bytes;
    one["change"] = r.change;
    one["at_ns"] = r.at_ns;
    one["mark"] = r.mark;
    one["phase"] = to_string(r.phase);
    one["by_library"] = r.by_library;
    found.append(one);
  }
  return found;
}

} // namespace

void bind_memory(py::module_& m) {
  auto memory = m.def_submodule("memory", "The account of CPU tensors' memory.");
  memory.def(
      "start",
      [](std::shared_ptr<World> world, int64_t limit_bytes) {
        keep_ledger(std::move(world), limit_bytes);
        set_look(look_at_parameters);
      },
      py::arg("world").none(false), py::arg("limit_bytes") = -1,
      "Begins the account; requests that pass the limit end in torch.OutOfMemoryError.");
  memory.def("is_kept", [] { return the_ledger() != nullptr; });
  memory.def("held_bytes", [] { return kept_ledger().held_bytes(); });
  memory.def("block_columns", &block_columns, "Every block so far, by column.");
  memory.def("refusals", &refusals, "The first hundred requests that passed the limit.");
  memory.def(
      "recognise",
      [](const std::vector<at::Tensor>& tensors, const std::string& as, int32_t owner) {
        recognise(tensors, recognised(as), owner);
      },
      py::arg("tensors"), py::arg("as_"), py::arg("owner") = -1);
  memory.def(
      "know_parameters",
      [](const std::vector<at::Tensor>& parameters, const std::vector<int32_t>& owners) {
        for (size_t i = 0; i < std::min(parameters.size(), owners.size()); ++i) {
          know_parameter(parameters[i], owners[i]);
        }
      },
      py::arg("parameters"), py::arg("owners"));
  memory.def("owner_of", &owner_of, py::arg("tensor"),
             "Of a known parameter, or of one whose storage the tensor shares; else -1.");
  memory.def("look_at_parameters", &look_at_parameters);
  memory.def("in_optimizer", &in_optimizer, py::arg("begin"));
  memory.def("step_kept_memory", &step_kept_memory);
  memory.def("forward_begins", &forward_begins);
  memory.def("unwatch", &unwatch, py::arg("begin"));
}

} // namespace crystal
