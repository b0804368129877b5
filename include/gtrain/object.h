// Objects: arrays of numbers that stay where they were made, which all processes of a job read.
//
//   auto weights = co_await cluster.Put(w);             // owns them; one copy, into shared memory
//   co_await workers.Call<&Worker::Train>(weights.ref());
//   ...
//   gtrain::Task<double> Worker::Train(gtrain::Object<float> weights) {
//     const auto w = co_await weights.Read();  // no copy on the same machine, one a machine on others
//     ...                                      // w[0], w.size(), for (const float x : w)
//
// They are for arguments and results of more than some 100 KB: a descriptor and two pages each. What reads
// them keeps their memory for as long as it has the view, also when the owner has let them go.
#pragma once
#include <gtrain/object_c.h>
#include <gtrain/status.h>
#include <gtrain/task.h>
#include <gtrain/value.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gtrain {

// What an array is of.
template <typename T>
concept ObjectElement = internal::Number<T> || std::same_as<T, std::byte>;

namespace internal {

inline size_t ElementsOf(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), size_t{1},
                         [](size_t count, int64_t extent) { return count * static_cast<size_t>(extent); });
}

inline void ReleaseObject(gtrain_object* object) { gtrain_object_release(object, 0); }
using ObjectHandle = std::unique_ptr<gtrain_object, Freer<gtrain_object, ReleaseObject>>;

// A call of the C interface that gives a handle; deletes itself.
template <typename T, typename Become>
class ObjectAnswered {
 public:
  explicit ObjectAnswered(Become become) : become_(std::move(become)) {}
  Future<T> future() const { return Future<T>(outcome_); }
  static void Reply(void* user, gtrain_status status, const char* message, gtrain_object* object) {
    const std::unique_ptr<ObjectAnswered> self(static_cast<ObjectAnswered*>(user));
    if (status != GTRAIN_OK) {
      self->outcome_->Set(Status(static_cast<StatusCode>(status), message));
    } else {
      self->outcome_->Set(self->become_(ObjectHandle(object)));
    }
  }

 private:
  Become become_;
  std::shared_ptr<Outcome<T>> outcome_ = std::make_shared<Outcome<T>>();
};

}  // namespace internal

// The elements of an object, which are read and not written. Copied as a pointer is; thread-safe.
template <ObjectElement T>
class ObjectView {
 public:
  ObjectView() = default;
  ObjectView(internal::ObjectHandle object, std::vector<int64_t> shape)
      : data_(static_cast<const T*>(gtrain_object_data(object.get()))),
        size_(static_cast<size_t>(gtrain_object_size(object.get())) / sizeof(T)),
        shape_(std::move(shape)),
        object_(std::move(object)) {}

  const T* data() const { return data_; }
  size_t size() const { return size_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& operator[](size_t index) const { return data_[index]; }
  operator std::span<const T>() const { return {data_, size_}; }  // NOLINT(google-explicit-constructor)

 private:
  const T* data_ = nullptr;
  size_t size_ = 0;
  std::vector<int64_t> shape_;
  std::shared_ptr<gtrain_object> object_;
};

// Names an object. It owns nothing, is copied, and is a value: it travels in arguments and results.
template <ObjectElement T>
class Object {
 public:
  Object() = default;  // nobody's: reading it is kInvalidArgument
  Object(std::string bytes, std::vector<int64_t> shape)
      : bytes_(std::move(bytes)), shape_(std::move(shape)) {}

  const std::vector<int64_t>& shape() const { return shape_; }
  size_t size() const { return bytes_.empty() ? 0 : internal::ElementsOf(shape_); }
  // gtrain_object_read (gtrain/object_c.h) has the errors. Never blocks.
  Future<ObjectView<T>> Read(std::chrono::nanoseconds timeout = kCallTimeout) const {
    const auto become = [shape = shape_](internal::ObjectHandle object) -> Result<ObjectView<T>> {
      if (gtrain_object_size(object.get()) != internal::ElementsOf(shape) * sizeof(T))
        return Status(StatusCode::kInvalidArgument, "the object has another size than its reference says");
      return ObjectView<T>(std::move(object), shape);
    };
    if (internal::Engine() == nullptr) return internal::Failed<ObjectView<T>>(internal::NoCluster());
    using Answered = internal::ObjectAnswered<ObjectView<T>, decltype(become)>;
    auto* answered = new Answered(become);
    Future<ObjectView<T>> future = answered->future();
    gtrain_object_read(internal::Engine(), bytes_.data(), bytes_.size(), internal::Milliseconds(timeout),
                       &Answered::Reply, answered);
    return future;
  }

  // The empty vector has the type with it: objects of other elements are not taken for this one.
  void Persist(auto& archive) {
    std::vector<T> type;
    archive(bytes_, shape_, type);
  }
  bool operator==(const Object& other) const { return bytes_ == other.bytes_; }

 private:
  std::string bytes_;
  std::vector<int64_t> shape_;
};

// Owns an object, which is no more when this is gone, or its process. Moved and not copied.
template <ObjectElement T>
class ObjectOwner {
 public:
  ObjectOwner() = default;
  ObjectOwner(Object<T> ref, internal::ObjectHandle object)
      : ref_(std::move(ref)), object_(std::move(object)) {}

  const Object<T>& ref() const { return ref_; }
  operator Object<T>() const { return ref_; }  // NOLINT(google-explicit-constructor): as an Owner of actors
  // Nobody owns it any more, and it is there for so long: as a result whose reader is still to come.
  Object<T> LetGoAfter(std::chrono::nanoseconds time) && {
    gtrain_object_release(object_.release(), std::chrono::ceil<std::chrono::milliseconds>(time).count());
    return ref_;
  }

 private:
  Object<T> ref_;
  internal::ObjectHandle object_;
};

// An object that is being filled. Moved and not copied.
template <ObjectElement T>
class ObjectDraft {
 public:
  ObjectDraft() = default;
  ObjectDraft(internal::ObjectHandle object, std::vector<int64_t> shape)
      : object_(std::move(object)), shape_(std::move(shape)) {}

  T* data() { return static_cast<T*>(gtrain_object_data(object_.get())); }
  size_t size() const { return internal::ElementsOf(shape_); }
  std::span<T> span() { return {data(), size()}; }
  T& operator[](size_t index) { return data()[index]; }
  // kInvalidArgument: there are fewer elements from `at` on. Of large data faster than a loop.
  Status Write(size_t at, std::span<const T> values) {
    return internal::Call(gtrain_object_write, object_.get(), static_cast<uint64_t>(at) * sizeof(T),
                          static_cast<const void*>(values.data()), values.size_bytes());
  }
  // It is an object, and never changes from now on.
  Result<ObjectOwner<T>> Seal() && {
    std::string reference(GTRAIN_OBJECT_REFERENCE_BYTES, '\0');
    const Status sealed =
        internal::Call(gtrain_object_seal, object_.get(), static_cast<void*>(reference.data()));
    if (!sealed.ok()) return sealed;
    return ObjectOwner<T>(Object<T>(std::move(reference), std::move(shape_)), std::move(object_));
  }

 private:
  internal::ObjectHandle object_;
  std::vector<int64_t> shape_;
};

namespace internal {

template <ObjectElement T>
Future<ObjectDraft<T>> CreateObject(std::vector<int64_t> shape, std::chrono::nanoseconds timeout) {
  if (Engine() == nullptr) return Failed<ObjectDraft<T>>(NoCluster());
  uint64_t bytes = sizeof(T);
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes))
      return Failed<ObjectDraft<T>>(Status(StatusCode::kInvalidArgument, "an object of no such shape"));
  }
  const auto become = [shape = std::move(shape)](ObjectHandle object) -> Result<ObjectDraft<T>> {
    return ObjectDraft<T>(std::move(object), shape);
  };
  using Answered = ObjectAnswered<ObjectDraft<T>, decltype(become)>;
  auto* answered = new Answered(become);
  Future<ObjectDraft<T>> future = answered->future();
  gtrain_object_create(Engine(), bytes, Milliseconds(timeout), &Answered::Reply, answered);
  return future;
}

template <ObjectElement T>
Task<ObjectOwner<T>> PutObject(std::span<const T> values, std::vector<int64_t> shape,
                               std::chrono::nanoseconds timeout) {
  if (ElementsOf(shape) != values.size())
    co_return Status(StatusCode::kInvalidArgument, "the shape of an object has another number of elements");
  auto draft = co_await CreateObject<T>(std::move(shape), timeout);
  co_await draft.Write(0, values);
  co_return std::move(draft).Seal();
}

}  // namespace internal
}  // namespace gtrain
