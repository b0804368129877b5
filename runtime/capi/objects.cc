// The objects of object_c.h.
#include "actors/exec/objects.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "gtrain/object_c.h"
#include "runtime/capi/actors_handle.h"

struct gtrain_object {
  std::shared_ptr<gtrain::actors::Objects> objects;
  uint64_t id = 0;                                            // of what this process made
  std::shared_ptr<gtrain::actors::ObjectMemory> draft;        // until it is sealed
  std::shared_ptr<const gtrain::actors::ObjectMemory> bytes;  // what is there to be read
  uint64_t size = 0;
};

namespace gtrain::capi {
namespace {

using ObjectReply = gtrain_object_function;

void Fail(ObjectReply reply, void* user, const absl::Status& status) {
  reply(user, static_cast<gtrain_status>(status.code()), std::string(status.message()).c_str(), nullptr);
}

absl::Status Create(gtrain_actors* actors, uint64_t bytes, int64_t timeout_ms, ObjectReply reply,
                    void* user) {
  GT_RETURN_IF_ERROR(CheckActors(actors));
  GT_RETURN_IF_ERROR(CheckTimeout(timeout_ms));
  const std::shared_ptr<actors::Objects>& objects = actors->cluster->objects();
  objects->Create(bytes, absl::Milliseconds(timeout_ms),
                  [objects, bytes, reply, user](absl::StatusOr<actors::Objects::Draft> draft) {
                    if (!draft.ok()) return Fail(reply, user, draft.status());
                    auto made = std::make_unique<gtrain_object>();
                    made->objects = objects;
                    made->id = draft->id;
                    made->bytes = draft->memory;
                    made->draft = std::move(draft->memory);
                    made->size = bytes;
                    reply(user, GTRAIN_OK, "", made.release());
                  });
  return absl::OkStatus();
}

absl::Status Read(gtrain_actors* actors, absl::string_view reference, int64_t timeout_ms, ObjectReply reply,
                  void* user) {
  GT_RETURN_IF_ERROR(CheckActors(actors));
  GT_RETURN_IF_ERROR(CheckTimeout(timeout_ms));
  GT_ASSIGN_OR_RETURN(const actors::ObjectRef ref, actors::ParseObject(reference));
  const std::shared_ptr<actors::Objects>& objects = actors->cluster->objects();
  objects->Get(ref, absl::Milliseconds(timeout_ms),
               [objects, reply, user](absl::StatusOr<actors::Objects::Bytes> bytes) {
                 if (!bytes.ok()) return Fail(reply, user, bytes.status());
                 auto made = std::make_unique<gtrain_object>();
                 made->objects = objects;
                 made->bytes = std::move(bytes->memory);
                 made->size = bytes->size;
                 reply(user, GTRAIN_OK, "", made.release());
               });
  return absl::OkStatus();
}

absl::Status CheckDraft(const gtrain_object* object) {
  if (object == nullptr) return absl::InvalidArgumentError("the object is NULL");
  if (object->draft == nullptr)
    return absl::FailedPreconditionError("the object is no draft: it has been sealed");
  return absl::OkStatus();
}

}  // namespace
}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::View;

extern "C" {

void gtrain_object_create(gtrain_actors* actors, uint64_t bytes, int64_t timeout_ms,
                          gtrain_object_function reply, void* user) {
  if (reply == nullptr) return;
  gtrain_error error;
  const gtrain_status status =
      Call(&error, [&] { return gtrain::capi::Create(actors, bytes, timeout_ms, reply, user); });
  if (status != GTRAIN_OK) reply(user, status, error.message, nullptr);
}

void gtrain_object_read(gtrain_actors* actors, const void* reference, size_t reference_size,
                        int64_t timeout_ms, gtrain_object_function reply, void* user) {
  if (reply == nullptr) return;
  gtrain_error error;
  const gtrain_status status = Call(&error, [&] {
    return gtrain::capi::Read(actors, View(reference, reference_size), timeout_ms, reply, user);
  });
  if (status != GTRAIN_OK) reply(user, status, error.message, nullptr);
}

void* gtrain_object_data(gtrain_object* object) {
  if (object == nullptr) return nullptr;
  return object->draft != nullptr ? object->draft->data() : const_cast<char*>(object->bytes->data());
}
uint64_t gtrain_object_size(const gtrain_object* object) { return object == nullptr ? 0 : object->size; }

gtrain_status gtrain_object_write(gtrain_object* object, uint64_t at, const void* data, size_t size,
                                  gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckDraft(object));
    if (at > object->size || size > object->size - at) {
      return absl::InvalidArgumentError(
          absl::StrCat(size, " bytes from ", at, " on are not in an object of ", object->size));
    }
    return object->draft->Write(at, data, size);
  });
}

gtrain_status gtrain_object_seal(gtrain_object* object, void* reference, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(gtrain::capi::CheckDraft(object));
    if (reference == nullptr) return absl::InvalidArgumentError("`reference` is NULL");
    const gtrain::actors::ObjectRef ref = object->objects->Seal({object->id, object->draft}, object->size);
    if (ref.pid == 0) return absl::FailedPreconditionError("the cluster of this object is gone");
    object->draft.reset();
    static_assert(gtrain::actors::kObjectRefBytes == GTRAIN_OBJECT_REFERENCE_BYTES);
    std::memcpy(reference, gtrain::actors::PrintObject(ref).data(), gtrain::actors::kObjectRefBytes);
    return absl::OkStatus();
  });
}

void gtrain_object_release(gtrain_object* object, int64_t grace_ms) {
  (void)Call(nullptr, [&] {
    const std::unique_ptr<gtrain_object> gone(object);
    if (gone == nullptr) return absl::OkStatus();
    gone->draft.reset();
    gone->bytes.reset();
    if (gone->id != 0) gone->objects->Release(gone->id, absl::Milliseconds(std::max<int64_t>(0, grace_ms)));
    return absl::OkStatus();
  });
}

}  // extern "C"
