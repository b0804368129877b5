// The actors of actor_c.h.
#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "actors/exec/cluster.h"
#include "actors/values/values.h"
#include "base/available_memory.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/module.h"
#include "base/mutex.h"
#include "base/rate_limit.h"
#include "base/status_macros.h"
#include "gtrain/actor_c.h"
#include "net/port/net_module.h"
#include "runtime/capi/actors_handle.h"

struct gtrain_packer {
  gtrain::actors::Packer packer;
  bool out_of_memory = false;
};

namespace gtrain::capi {
namespace {

// A packer says in the end that there was no memory.
template <typename Body>
void Pack(gtrain_packer* packer, const Body& body) noexcept {
  if (packer == nullptr || packer->out_of_memory) return;
  try {
    body(packer->packer);
  } catch (const std::exception&) {
    packer->out_of_memory = true;
  }
}

absl::Status CheckSize(size_t size, size_t wanted, const char* what) {
  if (size == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the size of ", what, " is ", size, ", and should be ", wanted));
}

absl::Status TakeNext(gtrain_unpacker* unpacker, gtrain_value* out) {
  if (unpacker == nullptr || out == nullptr) return absl::InvalidArgumentError("`unpacker` or `out` is NULL");
  GT_RETURN_IF_ERROR(CheckSize(unpacker->size, sizeof(gtrain_unpacker), "gtrain_unpacker"));
  GT_RETURN_IF_ERROR(CheckSize(out->size, sizeof(gtrain_value), "gtrain_value"));
  absl::string_view bytes = View(unpacker->data, unpacker->left);
  actors::Value value;
  GT_RETURN_IF_ERROR(actors::TakeValue(&bytes, &value));
  static_assert(static_cast<int>(actors::ValueKind::kMap) == GTRAIN_VALUE_MAP);
  out->kind = static_cast<int32_t>(value.kind);
  out->dtype = static_cast<gtrain_dtype>(value.dtype);
  out->integer = value.integer;
  out->unsigned_integer = value.natural;
  out->number = value.number;
  out->data = value.bytes.data();
  const bool text = value.kind == actors::ValueKind::kString || value.kind == actors::ValueKind::kBytes;
  out->count = text ? value.bytes.size() : value.count;
  unpacker->data = bytes.data();
  unpacker->left = bytes.size();
  return absl::OkStatus();
}

absl::Status CheckPacked(const gtrain_packer& packer) {
  if (packer.out_of_memory) return absl::ResourceExhaustedError("there is no memory for this value");
  return packer.packer.status();
}

constexpr absl::Duration kJoinWithin = absl::Minutes(10);
constexpr uint64_t kMemoryAtMost = uint64_t{1} << 50;  // where nobody knows it

// How the ranks of a job find each other: the generations of a session.
class SessionGathering final : public actors::Gathering {
 public:
  explicit SessionGathering(std::shared_ptr<Session> session)
      : session_(std::move(session)), first_generation_(session_->generation()) {}
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view own, absl::Duration timeout) override {
    return session_->AllGather(own, timeout);
  }
  int rank() const override { return session_->rank(); }
  std::vector<int> left() const override { return session_->left(); }
  bool late() const override { return session_->in_place() && first_generation_ > 1; }
  absl::Status AwaitNext(absl::Duration timeout) override {
    const uint64_t before = session_->generation();
    const absl::Status status =
        session_->Rejoin({.join_timeout = timeout, .stays = true, .over_timeout = timeout});
    // It may have begun with some of its ranks still coming: they meet in the next AllGather.
    if (absl::IsDeadlineExceeded(status) && session_->generation() != before) return absl::OkStatus();
    return status;
  }
  void Report(uint64_t answered) override { session_->Report({.step = static_cast<int64_t>(answered)}); }
  void Note(const std::string& text) override { session_->ReportNote(kNoteActors, text); }

 private:
  const std::shared_ptr<Session> session_;
  const uint64_t first_generation_;
};

// None: the process is alone.
absl::StatusOr<std::optional<actors::ClusterNetwork>> NetworkOf(const std::shared_ptr<Session>& session) {
  if (session == nullptr || !session->managed() || (session->world_size() == 1 && !session->in_place()))
    return std::nullopt;
  actors::ClusterNetwork network;
  GT_ASSIGN_OR_RETURN(const Session::Reach reach, session->reach());
  if (reach.secret.empty()) {
    return absl::FailedPreconditionError(
        "GTRAIN_JOB_SECRET is not set: actors on several ranks need it, and an agent of another version of "
        "gtrain has started this process");
  }
  GT_ASSIGN_OR_RETURN(network.net,
                      LoadModuleTable<port::NetModule>("libgtrain_net.so", "GTRAIN_NET_MODULE",
                                                       "actors on several ranks need", port::kNetModuleEntry,
                                                       port::kNetModuleAbi));
  network.gathering = std::make_unique<SessionGathering>(session);
  network.secret = reach.secret;
  network.address = reach.address;
  network.node = reach.node;
  network.join_timeout = kJoinWithin;
  network.shared_memory = reach.actors_shm != "off";
  if (network.shared_memory && !reach.actors_shm.empty() && reach.actors_shm != "on") {
    return absl::FailedPreconditionError(
        absl::StrCat("GTRAIN_ACTORS_SHM is '", reach.actors_shm, "'; it must be on or off"));
  }
  return network;
}

actors::ObjectOptions ObjectOptionsOf(int64_t bytes) {
  actors::ObjectOptions options;
  if (bytes > 0) {
    options.bytes_max = static_cast<uint64_t>(bytes);
  } else {
    options.bytes_max = std::min(AvailableMemory(), kMemoryAtMost) / 10 * 3;
    options.of_machine = true;
  }
  // Objects and copies have a descriptor each, and the program needs some of them.
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0)
    options.objects_max = std::clamp<rlim_t>(files.rlim_cur / 4, 16, 65'536);
  return options;
}

absl::Status Open(gtrain_session* session, const gtrain_actors_options* options, gtrain_actors** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  actors::HostOptions host;
  host.threads = std::max(2, static_cast<int>(std::thread::hardware_concurrency()));
  if (options != nullptr) {
    GT_RETURN_IF_ERROR(CheckSize(options->size, sizeof(*options), "gtrain_actors_options"));
    if (options->threads < 0 || options->threads > 1024 || options->mailbox_calls < 0 ||
        options->mailbox_bytes < 0 || options->object_bytes < 0) {
      return absl::InvalidArgumentError(
          "`threads` is 0 to 1024, `mailbox_calls`, `mailbox_bytes` and `object_bytes` are not below 0");
    }
    if (options->threads > 0) host.threads = options->threads;
    if (options->mailbox_calls > 0) host.mailbox_calls = static_cast<size_t>(options->mailbox_calls);
    if (options->mailbox_bytes > 0) host.mailbox_bytes = static_cast<size_t>(options->mailbox_bytes);
  }
  auto handle = std::make_unique<gtrain_actors>();
  if (session != nullptr) {
    GT_RETURN_IF_ERROR(CheckHandle(session));
    handle->session = session->session;
  }
  static const auto* const clock = new RealClock;  // threads that are left to themselves may outlive main()
  handle->cluster = std::make_unique<actors::Cluster>(
      host, *clock, ObjectOptionsOf(options == nullptr ? 0 : options->object_bytes));
  if (handle->session != nullptr)
    handle->session->SetAsked(
        [cluster = handle->cluster.get()](absl::string_view question) { return cluster->List(question); });
  *out = handle.release();
  return absl::OkStatus();
}

absl::Status JoinCluster(gtrain_actors* handle) {
  GT_RETURN_IF_ERROR(CheckHandle(handle));
  GT_ASSIGN_OR_RETURN(auto network, NetworkOf(handle->session));
  return network ? handle->cluster->Join(*std::move(network)) : absl::OkStatus();
}

absl::Status StatusOf(gtrain_status status, const gtrain_error& error) {
  return status == GTRAIN_OK ? absl::OkStatus()
                             : absl::Status(static_cast<absl::StatusCode>(status), error.message);
}

void AddKeeping(const gtrain_actor_class& in, actors::ActorClass& type) {
  type.save = [save = in.save, user = in.user](void* self) -> absl::StatusOr<std::string> {
    gtrain_packer packer;
    gtrain_error error{};
    GT_RETURN_IF_ERROR(StatusOf(save(user, self, &packer, &error), error));
    GT_RETURN_IF_ERROR(CheckPacked(packer));
    return packer.packer.Take();
  };
  type.load = [load = in.load, user = in.user](void* self, absl::string_view state) {
    gtrain_error error{};
    return StatusOf(load(user, self, state.data(), state.size(), &error), error);
  };
}

absl::Status Register(gtrain_actors* handle, const gtrain_actor_class* in) {
  GT_RETURN_IF_ERROR(CheckHandle(handle));
  if (in == nullptr) return absl::InvalidArgumentError("`type` is NULL");
  GT_RETURN_IF_ERROR(CheckSize(in->size, sizeof(*in), "gtrain_actor_class"));
  if (in->name == nullptr || in->signature == nullptr || in->create == nullptr || in->destroy == nullptr ||
      in->call == nullptr || in->methods < 1)
    return absl::InvalidArgumentError("a class has a name, a signature, three functions and a method");
  actors::ActorClass type;
  type.name = in->name;
  type.signature = in->signature;
  type.methods = in->methods;
  type.create = [create = in->create, user = in->user](absl::string_view data) -> absl::StatusOr<void*> {
    void* self = nullptr;
    gtrain_error error{};
    const gtrain_status status = create(user, data.data(), data.size(), &self, &error);
    if (status == GTRAIN_OK) return self;
    return absl::Status(static_cast<absl::StatusCode>(status), error.message);
  };
  type.destroy = [destroy = in->destroy, user = in->user](void* self) { destroy(user, self); };
  type.call = [call = in->call, user = in->user](void* self, int method, absl::string_view data,
                                                 actors::BegunCall* begun) {
    call(user, self, method, data.data(), data.size(), reinterpret_cast<gtrain_call*>(begun));
  };
  if (in->save != nullptr && in->load != nullptr) AddKeeping(*in, type);
  for (int32_t i = 0; in->constant != nullptr && i < in->methods; ++i)
    type.constant.push_back(in->constant[i] != 0);
  return handle->cluster->Register(std::move(type));
}

struct HowToSpawn {
  actors::SpawnOptions options;
  actors::Placement placement;
  std::string name;
  bool detached = false;
};

absl::StatusOr<HowToSpawn> Read(const gtrain_spawn_options& options) {
  GT_RETURN_IF_ERROR(CheckSize(options.size, sizeof(options), "gtrain_spawn_options"));
  HowToSpawn how;
  if (options.restarts >= 0) how.options.restarts = options.restarts;
  if (options.spread < GTRAIN_SPREAD_PROCESSES || options.spread > GTRAIN_SPREAD_HERE)
    return absl::InvalidArgumentError("`spread` is none of GTRAIN_SPREAD_*");
  how.placement.spread = static_cast<actors::Spread>(options.spread);
  if (options.rank >= 0) how.placement.rank = options.rank;
  how.placement.apart = options.apart;
  how.options.keep = options.keep != 0;
  if (options.concurrency != 0) how.options.concurrency = options.concurrency;
  if (options.name != nullptr) how.name = options.name;
  how.detached = options.detached != 0;
  if (how.detached && how.placement.apart > 0)
    return absl::InvalidArgumentError(
        "a detached actor is apart from no others: it has an owner after another");
  return how;
}

// A few at once and then one a second: who tells more than a mailbox takes does so in a loop.
void LogLostTell(const absl::Status& status) {
  static Mutex mutex;
  static RateLimit rate(10, 1, RealClock().Now());
  static int64_t left_out = 0;
  int64_t more = 0;
  {
    MutexLock lock(&mutex);
    if (!rate.Take(RealClock().Now())) {
      ++left_out;
      return;
    }
    more = std::exchange(left_out, 0);
  }
  LogWarning("a call whose result nobody awaits failed: ", status.message(),
             more > 0 ? absl::StrCat("; and ", more, " more before it") : "");
}

// NULL: nobody hears of it but the log.
actors::Reply ReplyOf(gtrain_reply_function reply, void* user) {
  if (reply == nullptr) {
    return [](const absl::Status& status, absl::string_view) {
      if (!status.ok()) LogLostTell(status);
    };
  }
  return [reply, user](const absl::Status& status, absl::string_view data) {
    reply(user, static_cast<gtrain_status>(status.code()), std::string(status.message()).c_str(), data.data(),
          data.size());
  };
}

// `arguments` gives them, once all else is right.
absl::Status CallActor(gtrain_actors* actors, absl::string_view reference, int32_t method,
                       absl::FunctionRef<absl::StatusOr<std::string>()> arguments, int64_t timeout_ms,
                       gtrain_reply_function reply, void* user) {
  GT_RETURN_IF_ERROR(CheckActors(actors));
  GT_RETURN_IF_ERROR(CheckTimeout(timeout_ms));
  GT_ASSIGN_OR_RETURN(const actors::ActorRef ref, actors::ActorRef::Parse(reference));
  GT_ASSIGN_OR_RETURN(std::string taken, arguments());
  actors->cluster->Call(ref, method, std::move(taken), absl::Milliseconds(timeout_ms), ReplyOf(reply, user));
  return absl::OkStatus();
}

}  // namespace
}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::CheckHandle;
using gtrain::capi::Pack;
using gtrain::capi::View;

extern "C" {

gtrain_packer* gtrain_packer_new(void) { return new (std::nothrow) gtrain_packer; }
void gtrain_packer_free(gtrain_packer* packer) { delete packer; }
void gtrain_packer_clear(gtrain_packer* packer) {
  if (packer == nullptr) return;
  packer->packer.Clear();
  packer->out_of_memory = false;
}

gtrain_status gtrain_packer_data(const gtrain_packer* packer, const void** data, size_t* size,
                                 gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    if (packer == nullptr || data == nullptr || size == nullptr)
      return absl::InvalidArgumentError("`packer`, `data` or `size` is NULL");
    GT_RETURN_IF_ERROR(gtrain::capi::CheckPacked(*packer));
    *data = packer->packer.bytes().data();
    *size = packer->packer.bytes().size();
    return absl::OkStatus();
  });
}

void gtrain_pack_nil(gtrain_packer* packer) {
  Pack(packer, [](auto& to) { to.Nil(); });
}
void gtrain_pack_bool(gtrain_packer* packer, int value) {
  Pack(packer, [&](auto& to) { to.Bool(value != 0); });
}
void gtrain_pack_int(gtrain_packer* packer, int64_t value) {
  Pack(packer, [&](auto& to) { to.Int(value); });
}
void gtrain_pack_uint(gtrain_packer* packer, uint64_t value) {
  Pack(packer, [&](auto& to) { to.Uint(value); });
}
void gtrain_pack_float(gtrain_packer* packer, double value) {
  Pack(packer, [&](auto& to) { to.Float(value); });
}
void gtrain_pack_string(gtrain_packer* packer, const char* text, size_t size) {
  Pack(packer, [&](auto& to) { to.String(View(text, size)); });
}
void gtrain_pack_bytes(gtrain_packer* packer, const void* data, size_t size) {
  Pack(packer, [&](auto& to) { to.Bytes(View(data, size)); });
}
void gtrain_pack_numbers(gtrain_packer* packer, gtrain_dtype dtype, const void* data, size_t count) {
  Pack(packer, [&](auto& to) {
    const auto type = static_cast<gtrain::DType>(dtype);
    to.Numbers(type, View(data, count * gtrain::DTypeSize(type)));
  });
}
void gtrain_pack_array(gtrain_packer* packer, size_t count) {
  Pack(packer, [&](auto& to) { to.Array(count); });
}
void gtrain_pack_map(gtrain_packer* packer, size_t count) {
  Pack(packer, [&](auto& to) { to.Map(count); });
}

gtrain_status gtrain_unpack(gtrain_unpacker* unpacker, gtrain_value* out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::TakeNext(unpacker, out); });
}

gtrain_status gtrain_actors_open(gtrain_session* session, const gtrain_actors_options* options,
                                 gtrain_actors** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Open(session, options, out); });
}
void gtrain_actors_free(gtrain_actors* actors) { gtrain::capi::FreeHandle(actors); }

gtrain_status gtrain_actors_join(gtrain_actors* actors, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::JoinCluster(actors); });
}
gtrain_status gtrain_actors_await_turn(gtrain_actors* actors, int* drives, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    if (drives == nullptr) return absl::InvalidArgumentError("`drives` is NULL");
    GT_ASSIGN_OR_RETURN(const bool own, actors->cluster->AwaitTurn());
    *drives = own ? 1 : 0;
    return absl::OkStatus();
  });
}
gtrain_status gtrain_actors_await_over(gtrain_actors* actors, int64_t timeout_ms, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    GT_RETURN_IF_ERROR(gtrain::capi::CheckTimeout(timeout_ms));
    return actors->cluster->AwaitOver(absl::Milliseconds(timeout_ms));
  });
}
void gtrain_actors_finish(gtrain_actors* actors) {
  (void)Call(nullptr, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    actors->cluster->Finish();
    return absl::OkStatus();
  });
}
int gtrain_actors_processes(const gtrain_actors* actors) {
  return gtrain::capi::CheckActors(actors).ok() ? actors->cluster->processes() : 0;
}
gtrain_status gtrain_actors_post(gtrain_actors* actors, void (*task)(void* user), void* user,
                                 gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    if (task == nullptr) return absl::InvalidArgumentError("`task` is NULL");
    absl::AnyInvocable<void()> run = [task, user] { task(user); };
    if (actors->cluster->Post(run)) return absl::OkStatus();
    return absl::FailedPreconditionError("the actors are being freed");
  });
}

gtrain_status gtrain_actors_register(gtrain_actors* actors, const gtrain_actor_class* type,
                                     gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Register(actors, type); });
}

void gtrain_actors_spawn(gtrain_actors* actors, const char* type, const gtrain_spawn_options* options,
                         const void* arguments, size_t size, int64_t timeout_ms, gtrain_reply_function reply,
                         void* user) {
  gtrain_error error;
  const gtrain_status status = Call(&error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    GT_RETURN_IF_ERROR(gtrain::capi::CheckTimeout(timeout_ms));
    if (type == nullptr) return absl::InvalidArgumentError("`type` is NULL");
    gtrain::capi::HowToSpawn how;
    if (options != nullptr) {
      GT_ASSIGN_OR_RETURN(how, gtrain::capi::Read(*options));
    }
    std::string bytes(View(arguments, size));
    const absl::Duration timeout = absl::Milliseconds(timeout_ms);
    gtrain::actors::Reply replies = gtrain::capi::ReplyOf(reply, user);
    if (how.detached) {
      actors->cluster->SpawnDetached(how.name, type, how.options, how.placement, std::move(bytes), timeout,
                                     std::move(replies));
    } else if (!how.name.empty()) {
      actors->cluster->SpawnNamed(how.name, type, how.options, how.placement, std::move(bytes), timeout,
                                  std::move(replies));
    } else {
      actors->cluster->Spawn(type, how.options, how.placement, std::move(bytes), timeout, std::move(replies));
    }
    return absl::OkStatus();
  });
  if (status != GTRAIN_OK && reply != nullptr) reply(user, status, error.message, nullptr, 0);
}

void gtrain_actors_end_detached(gtrain_actors* actors, const void* reference, size_t reference_size,
                                int64_t timeout_ms, gtrain_reply_function reply, void* user) {
  gtrain_error error;
  const gtrain_status status = Call(&error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    GT_RETURN_IF_ERROR(gtrain::capi::CheckTimeout(timeout_ms));
    GT_ASSIGN_OR_RETURN(const gtrain::actors::ActorRef ref,
                        gtrain::actors::ActorRef::Parse(View(reference, reference_size)));
    actors->cluster->EndDetached(ref, absl::Milliseconds(timeout_ms), gtrain::capi::ReplyOf(reply, user));
    return absl::OkStatus();
  });
  if (status != GTRAIN_OK && reply != nullptr) reply(user, status, error.message, nullptr, 0);
}

void gtrain_actors_await_end(gtrain_actors* actors, const void* reference, size_t reference_size,
                             gtrain_reply_function reply, void* user) {
  if (reply == nullptr) return;
  gtrain_error error;
  const gtrain_status status = Call(&error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    GT_ASSIGN_OR_RETURN(const gtrain::actors::ActorRef ref,
                        gtrain::actors::ActorRef::Parse(View(reference, reference_size)));
    actors->cluster->Watch(ref, gtrain::capi::ReplyOf(reply, user));
    return absl::OkStatus();
  });
  if (status != GTRAIN_OK) reply(user, status, error.message, nullptr, 0);
}

// NOLINTNEXTLINE(readability-function-size)
void gtrain_actors_call(gtrain_actors* actors, const void* reference, size_t reference_size, int32_t method,
                        const void* arguments, size_t size, int64_t timeout_ms, gtrain_reply_function reply,
                        void* user) {
  gtrain_error error;
  const auto copied = [&]() -> absl::StatusOr<std::string> { return std::string(View(arguments, size)); };
  const gtrain_status status = Call(&error, [&] {
    return gtrain::capi::CallActor(actors, View(reference, reference_size), method, copied, timeout_ms, reply,
                                   user);
  });
  if (status != GTRAIN_OK && reply != nullptr) reply(user, status, error.message, nullptr, 0);
}

// NOLINTNEXTLINE(readability-function-size)
void gtrain_actors_call_packed(gtrain_actors* actors, const void* reference, size_t reference_size,
                               int32_t method, gtrain_packer* packer, int64_t timeout_ms,
                               gtrain_reply_function reply, void* user) {
  gtrain_error error;
  const auto taken = [&]() -> absl::StatusOr<std::string> {
    if (packer == nullptr) return absl::InvalidArgumentError("`packer` is NULL");
    GT_RETURN_IF_ERROR(gtrain::capi::CheckPacked(*packer));
    return packer->packer.Take();
  };
  const gtrain_status status = Call(&error, [&] {
    return gtrain::capi::CallActor(actors, View(reference, reference_size), method, taken, timeout_ms, reply,
                                   user);
  });
  if (status != GTRAIN_OK && reply != nullptr) reply(user, status, error.message, nullptr, 0);
}

void gtrain_actors_find(gtrain_actors* actors, const char* name, const char* type, int64_t timeout_ms,
                        gtrain_reply_function reply, void* user) {
  gtrain_error error;
  const gtrain_status status = Call(&error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    GT_RETURN_IF_ERROR(gtrain::capi::CheckTimeout(timeout_ms));
    if (name == nullptr || type == nullptr) return absl::InvalidArgumentError("`name` or `type` is NULL");
    actors->cluster->Find(name, type, absl::Milliseconds(timeout_ms), gtrain::capi::ReplyOf(reply, user));
    return absl::OkStatus();
  });
  if (status != GTRAIN_OK && reply != nullptr) reply(user, status, error.message, nullptr, 0);
}

void gtrain_actors_end(gtrain_actors* actors, const void* reference, size_t reference_size,
                       const char* reason) {
  (void)Call(nullptr, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckActors(actors));
    GT_ASSIGN_OR_RETURN(const gtrain::actors::ActorRef ref,
                        gtrain::actors::ActorRef::Parse(View(reference, reference_size)));
    actors->cluster->End(ref, reason == nullptr ? "" : reason);
    return absl::OkStatus();
  });
}

void gtrain_call_reply(gtrain_call* call, gtrain_status status, const char* message, int crashed,
                       const void* data, size_t size) {
  if (call == nullptr) return;
  reinterpret_cast<gtrain::actors::BegunCall*>(call)->Answer(
      absl::Status(static_cast<absl::StatusCode>(status), message == nullptr ? "" : message),
      View(data, size), crashed != 0);
}
int64_t gtrain_call_left_ms(const gtrain_call* call) {
  if (call == nullptr) return 0;
  return absl::ToInt64Milliseconds(reinterpret_cast<const gtrain::actors::BegunCall*>(call)->Left());
}
int gtrain_actors_inside(void) { return gtrain::actors::Host::Inside() ? 1 : 0; }

}  // extern "C"
