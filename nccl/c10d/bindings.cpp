// The Python face of the logical world and of the c10d backend.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <set>

#include "c10d/backend.h"
#include "c10d/completion.h"
#include "c10d/memory.h"
#include "c10d/memory_bindings.h"
#include "c10d/sandbox_bindings.h"
#include "c10d/store.h"
#include "core/clock.h"
#include "core/events.h"
#include "core/follow.h"
#include "core/world.h"

namespace py = pybind11;
using namespace crystal;

namespace {

constexpr auto kDefaultTimeout = kBackendDefaultTimeout;

py::dict columns_of(const std::vector<CallRecord>& records, const World& world) {
  const auto groups = world.groups();
  py::list call, kind, op, dtype, count, group, root, offset, wraps, batch, stream;
  py::list text, seq, mark, seq_in_mark, root_rank, peer_rank, any_source, tag, in_elements,
      out_elements, in_splits, out_splits, is_async, arrival, release;
  for (const auto& r : records) {
    const Group& g = *groups.at(r.group);
    call.append(r.call);
    kind.append(to_string(r.kind));
    op.append(r.reduce_op);
    dtype.append(r.dtype);
    count.append(r.count);
    group.append(r.group);
    root.append(to_string(r.root));
    offset.append(r.peer_offset);
    wraps.append(r.peer_wraps);
    batch.append(r.batch);
    stream.append(r.stream);
    text.append(key(r, g));
    seq.append(r.position.seq);
    mark.append(r.position.mark);
    seq_in_mark.append(r.position.seq_in_mark);
    root_rank.append(r.root_rank < 0 ? -1 : g.global(r.root_rank));
    peer_rank.append(r.peer_rank < 0 ? -1 : g.global(r.peer_rank));
    any_source.append(r.any_source);
    tag.append(r.tag);
    in_elements.append(r.in_elements);
    out_elements.append(r.out_elements);
    in_splits.append(r.in_splits);
    out_splits.append(r.out_splits);
    is_async.append(r.is_async);
    arrival.append(r.arrival_ns);
    release.append(r.release && r.release->poll() ? r.release->end_ns() : r.arrival_ns);
  }
  py::dict columns;
  columns["call"] = call;
  columns["kind"] = kind;
  columns["reduce_op"] = op;
  columns["dtype"] = dtype;
  columns["count"] = count;
  columns["group"] = group;
  columns["root"] = root;
  columns["peer_offset"] = offset;
  columns["peer_wraps"] = wraps;
  columns["batch"] = batch;
  columns["stream"] = stream;
  columns["key"] = text;
  columns["seq"] = seq;
  columns["mark"] = mark;
  columns["seq_in_mark"] = seq_in_mark;
  columns["root_rank"] = root_rank;
  columns["peer_rank"] = peer_rank;
  columns["any_source"] = any_source;
  columns["tag"] = tag;
  columns["in_elements"] = in_elements;
  columns["out_elements"] = out_elements;
  columns["in_splits"] = in_splits;
  columns["out_splits"] = out_splits;
  columns["is_async"] = is_async;
  columns["arrival_ns"] = arrival;
  columns["release_ns"] = release;
  return columns;
}

// Records hold static text, which a trace's words have to be turned into.
const char* intern(const std::string& text) {
  static auto* words = new std::set<std::string>;
  return words->insert(text).first->c_str();
}

int64_t record_call(
    World& world, Group& group, const std::string& kind, const std::string& reduce_op,
    const std::string& dtype, int64_t count, int64_t in_elements, int64_t out_elements,
    std::vector<int64_t> in_splits, std::vector<int64_t> out_splits, int root, int peer,
    bool any_source, int tag, int64_t batch, int64_t stream, bool is_async, int64_t arrival_ns,
    int64_t release_ns) {
  for (int member : {root, peer}) {
    TORCH_CHECK_VALUE(
        member < group.size(), "A recorded call names member ", member, " of a group of ",
        group.size(), ". Group ", group.identity(), ", ", kind, ". Give ranks of the group.");
  }
  Call call;
  call.kind = kind_of(kind);
  call.reduce_op = intern(reduce_op);
  call.dtype = intern(dtype);
  call.count = count;
  call.in_elements = in_elements;
  call.out_elements = out_elements;
  call.in_splits = std::move(in_splits);
  call.out_splits = std::move(out_splits);
  call.root = root;
  call.peer = peer;
  call.any_source = any_source;
  call.tag = tag;
  call.batch = batch;
  call.stream = stream;
  call.is_async = is_async;
  return world.record(call, group, arrival_ns, release_ns).call;
}

py::dict event_columns(const World& world) {
  const auto events = events_of(world.events(), now_ns());
  py::list kind, lane, mark, call, after, start, duration, bytes;
  for (const auto& e : events) {
    kind.append(e.kind);
    lane.append(e.lane);
    mark.append(e.mark);
    call.append(e.call);
    after.append(e.after);
    start.append(e.start_ns);
    duration.append(e.duration_ns);
    bytes.append(e.bytes);
  }
  py::dict columns;
  columns["kind"] = kind;
  columns["lane"] = lane;
  columns["mark"] = mark;
  columns["call"] = call;
  columns["after"] = after;
  columns["start_ns"] = start;
  columns["duration_ns"] = duration;
  columns["bytes"] = bytes;
  return columns;
}

c10::intrusive_ptr<VirtualOptions> with_timeout(
    const char* backend, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<VirtualOptions>(backend, timeout);
}

template <class Options>
void options_methods(Options& cls) {
  // torch copies a parent's options before it changes them for a child.
  cls.def("__deepcopy__", [](py::object self, const py::dict&) {
    const auto& from = self.cast<VirtualOptions&>();
    auto copy = with_timeout(from.backend.c_str(), from.timeout);
    copy->group_name = from.group_name;
    copy->group_desc = from.group_desc;
    copy->global_ranks_in_group = from.global_ranks_in_group;
    py::object made = py::cast(copy);
    made.attr("__dict__").attr("update")(self.attr("__dict__"));
    return made;
  });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Logical world, virtual c10d backend and rendezvous store.";
  // The base classes of ours are registered there.
  py::module_::import("torch._C._distributed_c10d");

  py::class_<Payload>(m, "Payload")
      .def(py::init([](std::string dtype, const py::bytes& bytes, std::vector<int64_t> splits) {
             return Payload{std::move(dtype), bytes, std::move(splits)};
           }),
           py::arg("dtype"), py::arg("bytes"), py::arg("splits") = std::vector<int64_t>{});

  py::class_<Group, std::shared_ptr<Group>>(m, "Group")
      .def_property_readonly("id", &Group::id)
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size)
      .def_property_readonly("members", &Group::members)
      .def_property_readonly("creation", &Group::creation)
      .def_property_readonly("mates", &Group::mates,
                             "Group ranks of the members that run side by side, this one among "
                             "them; none where nobody but this rank does.")
      .def("is_mate", &Group::is_mate, py::arg("group_rank"))
      .def_property_readonly("signature", &Group::signature)
      .def_property_readonly("identity", &Group::identity)
      .def_property_readonly("description", &Group::description)
      .def_property_readonly("backend", &Group::backend)
      .def_property_readonly("num_collectives", &Group::num_collectives)
      .def("num_received", &Group::num_received, py::arg("from_rank"));

  m.def("axis_signature", &axis_signature, py::arg("members"));
  m.def("digest", &digest, py::arg("numbers"));

  py::class_<World, std::shared_ptr<World>>(m, "World")
      .def(py::init<int, int, uint64_t>(), py::arg("rank"), py::arg("size"), py::arg("seed") = 0)
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("groups", &World::groups)
      .def("set_mates", &World::set_mates, py::arg("ranks"), py::arg("limit_ms") = 0,
           "Global ranks that run for real in processes of this host, this one among them. An "
           "exchange with one may take so long; 0 leaves it to the group's timeout.")
      .def_property_readonly("num_calls", &World::num_calls)
      .def_property_readonly("num_invented", &World::num_invented)
      .def_property_readonly(
          "inventions",
          [](const World& world) {
            py::list found;
            for (const auto& i : world.inventions()) {
              found.append(py::make_tuple(i.call, i.key, i.how));
            }
            return found;
          },
          "The first hundred invented control values: (call, key, how).")
      .def("note_invented", &World::note_invented, py::arg("what"), py::arg("how"))
      .def("create_group",
           [](World& world, std::vector<int> members, const std::string& description,
              const std::string& backend) {
             auto group = world.create_group(std::move(members));
             group->describe(description);
             group->set_backend(backend);
             return group;
           },
           py::arg("members"), py::arg("description") = "", py::arg("backend") = "",
           "A communicator of these global ranks, in group order; this rank is one of them.")
      .def("record_call", &record_call, py::arg("group"), py::arg("kind"), py::kw_only(),
           py::arg("reduce_op") = "", py::arg("dtype") = "", py::arg("count") = 0,
           py::arg("in_elements") = 0, py::arg("out_elements") = 0,
           py::arg("in_splits") = std::vector<int64_t>{},
           py::arg("out_splits") = std::vector<int64_t>{}, py::arg("root") = -1,
           py::arg("peer") = -1, py::arg("any_source") = false, py::arg("tag") = 0,
           py::arg("batch") = -1, py::arg("stream") = 0, py::arg("is_async") = false,
           py::arg("arrival_ns") = 0, py::arg("release_ns") = 0,
           "Records a call that was made elsewhere, as a trace tells it. Root and peer are group "
           "ranks. Returns its ordinal.")
      .def("new_batch", &World::new_batch)
      .def("keep_records", &World::keep_records, py::arg("keep"))
      .def("take_records",
           [](World& world) { return columns_of(world.take_records(), world); })
      .def("event_columns", &event_columns,
           "Calls, waits and computation of the host threads so far; lanes as numbers.")
      .def("set_transfer_ns",
           [](World& world, int64_t ns) { world.set_release_rule(fixed_release(ns)); },
           py::arg("transfer_ns"), "Every call ends so long after its arrival.")
      .def("set_strict", &World::set_strict, py::arg("strict"))
      .def("keep_buffers", &World::keep_buffers, py::arg("keep"))
      .def("move_objects", &World::move_objects, py::arg("begin"))
      .def("keep_memory", [](std::shared_ptr<World> world) { watch_memory(std::move(world)); },
           "Keep the allocations of CPU tensors.")
      .def("mark", &World::mark, py::arg("by_hand") = true)
      .def_property_readonly("marks", &World::marks)
      .def("keep_contributions", &World::keep_contributions, py::arg("keep"))
      .def("take_contributions",
           [](World& world) {
             py::list found;
             for (auto& c : world.take_contributions()) {
               found.append(py::make_tuple(
                   c.group, c.seq, c.rank, c.peer, c.payload.dtype, py::bytes(c.payload.bytes), c.payload.splits));
             }
             return found;
           },
           "(group, seq, rank, peer, dtype, bytes, splits) of each.")
      .def_property_readonly("has_live_source", &World::has_live_source)
      .def("set_payload_source",
           [](World& world, py::function ask, bool is_live) {
             // Called from threads without the GIL; the function outlives the world's last call.
             auto held = std::shared_ptr<py::function>(
                 new py::function(std::move(ask)), [](py::function* function) {
                   py::gil_scoped_acquire gil;
                   delete function;
                 });
             world.set_payload_source(
                 [held](const Group& group, int64_t seq, const std::vector<int>& ranks, int peer,
                        const std::string& key) {
                   py::gil_scoped_acquire gil;
                   (*held)(py::cast(&group, py::return_value_policy::reference), seq, ranks, peer,
                           key);
                 },
                 is_live);
           },
           py::arg("ask"), py::kw_only(), py::arg("is_live"),
           "ask(group, seq, ranks, peer, key) adds the payloads that it finds. A live source waits "
           "for those that are not made yet.")
      .def("add_payload", &World::add_payload, py::arg("group"), py::arg("seq"), py::arg("rank"),
           py::arg("peer"), py::arg("payload"))
      .def("drop_payload", &World::drop_payload, py::arg("group"), py::arg("seq"),
           py::arg("rank"), py::arg("peer"))
      .def("has_payload",
           [](World& world, const Group& group, int64_t seq, int rank, int peer) {
             if (!world.has_live_source()) {
               world.fetch(group, seq, {rank}, peer, "");
             }
             const auto found = world.payloads(group, seq);
             return found != nullptr && found->count({rank, peer}) > 0;
           },
           py::arg("group"), py::arg("seq"), py::arg("rank"), py::arg("peer") = -1,
           "Whether it is known already, without making a live source wait for it.");

  bind_sandbox(m);
  bind_memory(m);

  m.def("the_world", &the_world);
  m.def("set_world", &set_world, py::arg("world").none(true));
  m.def("connect_mates_by",
        [](py::function make) {
          auto* held = new py::function(std::move(make)); // as long as groups are created
          set_connect([held](const Group& group, std::chrono::milliseconds timeout) {
            py::gil_scoped_acquire gil;
            return (*held)(py::cast(&group, py::return_value_policy::reference), timeout)
                .cast<c10::intrusive_ptr<c10d::Backend>>();
          });
        },
        py::arg("make"),
        "make(group, timeout) gives a real backend among the group's mates, in their order.");
  m.def("now_ns", &now_ns);
  py::class_<Completion>(m, "Completion", "When a collective call of a real backend was done.")
      .def(py::init([](const c10::intrusive_ptr<c10d::Work>& work) { return Completion(*work); }),
           py::arg("work"))
      .def_property_readonly("ns", &Completion::ns, "By CLOCK_MONOTONIC; 0 until it is done.");
  m.def("stop_timer",
        [] {
          stop_following();
          stop_timer();
        },
        py::call_guard<py::gil_scoped_release>());
  m.def("add_store_payload",
        [](const std::string& key, const py::bytes& value) { add_store_payload(key, value); },
        py::arg("key"), py::arg("value"));
  m.def("reset_stores", &reset_stores);

  py::class_<VirtualStore, c10::intrusive_ptr<VirtualStore>, c10d::Store>(m, "VirtualStore")
      .def(py::init([](const std::string& endpoint, std::chrono::milliseconds timeout, int size) {
             return c10::make_intrusive<VirtualStore>(endpoint, timeout, size);
           }),
           py::arg("endpoint"), py::arg("timeout") = c10d::Store::kDefaultTimeout,
           py::arg("size") = 0);

  py::class_<VirtualOptions, c10::intrusive_ptr<VirtualOptions>, c10d::Backend::Options>
      options(m, "Options", py::dynamic_attr());
  options.def(py::init([](const std::string& backend, std::chrono::milliseconds timeout) {
                return c10::make_intrusive<VirtualOptions>(backend, timeout);
              }),
              py::arg("backend"), py::arg("timeout") = kDefaultTimeout);
  options_methods(options);

  py::class_<VirtualBackend, c10::intrusive_ptr<VirtualBackend>, c10d::Backend>(
      m, "VirtualBackend", py::dynamic_attr())
      .def_property_readonly(
          "crystal_group",
          [](VirtualBackend& self) {
            const int id = self.group().id();
            return the_world()->groups().at(id);
          })
      .def("carry_by", &VirtualBackend::carry_by, py::arg("carrier"),
           "A real backend moves the data from here on; calls are recorded as ever.")
      .def_property_readonly("options", &VirtualBackend::virtual_options)
      .def("_get_backend_name", &VirtualBackend::getBackendName)
      .def("comm_split_count", &VirtualBackend::splits)
      .def("perform_nocolor_split", [](VirtualBackend&, const py::object&) {})
      .def("_is_initialized", [](VirtualBackend&) { return true; })
      .def("_set_default_timeout", &VirtualBackend::setTimeout, py::arg("timeout"))
      .def("_add_ephemeral_timeout",
           [](VirtualBackend&, std::chrono::milliseconds) {
             // Lengthens the timeout of the next call only; ours ends on time.
           },
           py::arg("timeout"))
      .def("_verify_work_timeout",
           [](VirtualBackend& self, const py::object&, std::chrono::milliseconds timeout) {
             return self.virtual_options()->timeout == timeout;
           },
           py::arg("work"), py::arg("timeout"))
      .def("_group_start", [](VirtualBackend& self) { self.startCoalescing(); })
      .def("_group_end", [](VirtualBackend& self) { self.endCoalescing(); })
      .def("get_error", [](VirtualBackend&) { return c10d::ErrorType::SUCCESS; })
      .def("abort", [](VirtualBackend&) {})
      .def("shutdown", [](VirtualBackend&) {});

  py::class_<GlooBackend, c10::intrusive_ptr<GlooBackend>, VirtualBackend>(m, "GlooBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout) {
             return c10::make_intrusive<GlooBackend>(
                 Flavour::gloo, store, rank, size, with_timeout("gloo", timeout));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout") = kDefaultTimeout)
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<VirtualOptions> options) {
             return c10::make_intrusive<GlooBackend>(
                 Flavour::gloo, store, rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"));

  py::class_<NcclBackend, c10::intrusive_ptr<NcclBackend>, VirtualBackend>(m, "NcclBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<VirtualOptions> options) {
             return c10::make_intrusive<NcclBackend>(
                 Flavour::nccl, store, rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout) {
             return c10::make_intrusive<NcclBackend>(
                 Flavour::nccl, store, rank, size, with_timeout("nccl", timeout));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout") = kDefaultTimeout);
}
