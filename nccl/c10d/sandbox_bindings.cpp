#include "c10d/sandbox_bindings.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <cstring>
#include <unordered_map>

#include "core/trace.h"
#include "core/world.h"
#include "sandbox/live_rule.h"

namespace py = pybind11;

namespace crystal {
namespace {

using CallTuple = std::tuple<int64_t, int64_t, std::string>; // call, lane, key

std::vector<ExpectedCall> expected(const std::vector<CallTuple>& calls) {
  std::vector<ExpectedCall> made;
  for (const auto& [call, lane, key] : calls) {
    made.push_back(ExpectedCall{call, lane, key});
  }
  return made;
}

std::vector<crystal_instruction> instructions_in(const py::bytes& bytes) {
  const std::string_view data = bytes;
  TORCH_CHECK_VALUE(
      data.size() % sizeof(crystal_instruction) == 0, "Instructions have another size. ",
      data.size(), " bytes, ", sizeof(crystal_instruction),
      " each. Pass an array of engine.INSTRUCTION.");
  std::vector<crystal_instruction> made(data.size() / sizeof(crystal_instruction));
  std::memcpy(made.data(), data.data(), data.size());
  return made;
}

// How each call came to its end, by the order of calls; times are CLOCK_MONOTONIC.
py::dict outcome_columns(const World& world) {
  const auto happened = world.events();
  std::unordered_map<int64_t, const Wait*> waits;
  for (const auto& wait : happened.waits) {
    waits.emplace(wait.call, &wait);
  }
  py::list call, captured, transport, arrival, start, release, wait_begin, wait_end;
  for (const auto& r : happened.calls) {
    const bool is_known = r.release && r.release->poll();
    const auto wait = waits.find(r.call);
    const bool is_awaited = wait != waits.end();
    call.append(r.call);
    captured.append(r.captured_call);
    transport.append(to_string(r.transport));
    arrival.append(r.arrival_ns);
    start.append(is_known ? r.release->start_ns() : -1);
    release.append(is_known ? r.release->end_ns() : -1);
    wait_begin.append(is_awaited ? wait->second->begin_ns : -1);
    wait_end.append(is_awaited ? wait->second->end_ns : -1);
  }
  py::dict columns;
  columns["call"] = call;
  columns["captured_call"] = captured;
  columns["transport"] = transport;
  columns["arrival_ns"] = arrival;
  columns["start_ns"] = start;
  columns["release_ns"] = release;
  columns["wait_begin_ns"] = wait_begin;
  columns["wait_end_ns"] = wait_end;
  return columns;
}

py::object deviation_of(const World& world) {
  if (!world.trace() || !world.trace()->deviation()) {
    return py::none();
  }
  const Deviation& d = *world.trace()->deviation();
  py::dict found;
  found["rank"] = d.rank;
  found["iteration"] = d.iteration;
  found["call"] = d.call;
  found["captured_call"] = d.captured_call;
  found["captured"] = d.captured;
  found["came"] = d.came;
  found["text"] = d.text;
  return found;
}

} // namespace

void bind_sandbox(py::module_& m) {
  py::class_<Trace, std::shared_ptr<Trace>>(m, "Trace")
      .def(py::init([](int rank, const std::vector<CallTuple>& prologue,
                       const std::vector<CallTuple>& body, const std::vector<CallTuple>& epilogue,
                       int64_t num_bodies) {
             return std::make_shared<Trace>(
                 rank, expected(prologue), expected(body), expected(epilogue), num_bodies);
           }),
           py::kw_only(), py::arg("rank"), py::arg("prologue"), py::arg("body"),
           py::arg("epilogue"), py::arg("num_bodies"),
           "Calls as (ordinal in the capture, host thread, key); a run repeats the body.")
      .def("end", &Trace::end, py::arg("num_calls"),
           "The program has ended: what it still should have called is a deviation.");

  py::class_<ReleaseRule, std::shared_ptr<ReleaseRule>>(m, "ReleaseRule");
  py::class_<LiveRule, ReleaseRule, std::shared_ptr<LiveRule>>(m, "LiveRule")
      .def(py::init([](std::string library, std::string address, int rank, int num_threads,
                       const py::bytes& instructions, std::vector<int64_t> cpu_ns,
                       std::vector<int64_t> call_ns,
                       int64_t first_mark, int64_t period, int64_t limit_ns, int64_t body_ns) {
             LiveRule::Options options;
             options.library = std::move(library);
             options.address = std::move(address);
             options.rank = rank;
             options.num_threads = num_threads;
             options.instructions = instructions_in(instructions);
             options.cpu_ns = std::move(cpu_ns);
             options.call_ns = std::move(call_ns);
             options.first_mark = first_mark;
             options.period = period;
             options.limit_ns = limit_ns;
             options.body_ns = body_ns;
             return std::make_shared<LiveRule>(std::move(options));
           }),
           py::kw_only(), py::arg("library"), py::arg("address"), py::arg("rank"),
           py::arg("num_threads"), py::arg("instructions"), py::arg("cpu_ns"),
           py::arg("call_ns"),
           py::arg("first_mark"), py::arg("period"), py::arg("limit_ns"),
           py::arg("body_ns"),
           "Attaches to a live run. Instructions and CPU times are by ordinal of the captured "
           "call.")
      .def_property_readonly("epoch_ns", &LiveRule::epoch_ns)
      .def("close", &LiveRule::close, py::call_guard<py::gil_scoped_release>());

  auto world = py::reinterpret_borrow<py::class_<World, std::shared_ptr<World>>>(m.attr("World"));
  world.def("follow", &World::follow, py::arg("trace"), "From here on calls have to be the trace's.")
      .def("set_release_rule", &World::set_release_rule, py::arg("rule"))
      .def("outcome_columns", &outcome_columns, "How each call that is kept came to its end.")
      .def_property_readonly("trace", &World::trace)
      .def_property_readonly(
          "mark_times",
          [](const World& world) {
            std::vector<int64_t> times;
            for (const auto& mark : world.events().marks) {
              times.push_back(mark.at_ns);
            }
            return times;
          },
          "CLOCK_MONOTONIC of each iteration mark.")
      .def_property_readonly(
          "begin_ns", [](const World& world) { return world.events().begin_ns; },
          "CLOCK_MONOTONIC since which records are kept.")
      .def_property_readonly("deviation", &deviation_of, "Where the run left its trace, or None.");
}

} // namespace crystal
