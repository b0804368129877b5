// Groups, pools, detached actors and objects as a program has them: the headers and libgtrain.so.
#include <gtrain/gtrain.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

namespace {

using gtrain::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Until `wanted` are there at once, or a minute is over.
class Meeting {
 public:
  bool Meet(int wanted) {
    ++here_;
    const auto end = std::chrono::steady_clock::now() + seconds(60);
    while (here_ < wanted && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    return here_ >= wanted;
  }

 private:
  std::atomic<int> here_ = 0;
} meeting;

// Opened once.
class Gate {
 public:
  void Open() { opened_.store(true); }
  bool WaitFor() const {
    const auto end = std::chrono::steady_clock::now() + seconds(60);
    while (!opened_ && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    return opened_;
  }

 private:
  std::atomic<bool> opened_ = false;
} gate;

struct Longer {
  std::string operator()(const std::string& one, const std::string& other) const { return one + other; }
};

class Part {
 public:
  Part() = default;
  void Set(int64_t number) { number_ = number; }
  int64_t Number() const { return number_; }
  std::vector<float> Vector(int64_t size) const {
    return std::vector<float>(static_cast<size_t>(size), static_cast<float>(number_));
  }
  gtrain::Result<int64_t> Even() const {
    if (number_ % 2 != 0) return gtrain::Status(StatusCode::kOutOfRange, "it is odd");
    return number_;
  }
  gtrain::Task<std::string> Letter() { co_return std::string(1, static_cast<char>('a' + number_)); }
  bool MeetOthers(int wanted) { return meeting.Meet(wanted); }
  bool WaitAtGate() {
    ++waited_;
    return gate.WaitFor();
  }
  int64_t Waited() const { return waited_; }
  void Throw() { throw std::runtime_error("the part is tired"); }
  gtrain::Task<int64_t> SumOf(gtrain::Object<int64_t> object) {
    const auto view = co_await object.Read();
    co_return std::accumulate(view.begin(), view.end(), int64_t{0});
  }
  gtrain::Task<gtrain::Object<float>> MakeObject(int64_t size) {
    auto draft = co_await gtrain::Cluster::Current().Create<float>(size, 2);
    std::iota(draft.span().begin(), draft.span().end(), 0.0F);
    auto owner = co_await std::move(draft).Seal();
    co_return std::move(owner).LetGoAfter(seconds(60));
  }

 private:
  int64_t number_ = 0, waited_ = 0;
};
[[maybe_unused]] constexpr auto kPart = gtrain::Actor<
    Part, gtrain::Ctor<>,
    gtrain::Methods<&Part::Set, &Part::Number, &Part::Vector, &Part::Even, &Part::Letter, &Part::MeetOthers,
                    &Part::WaitAtGate, &Part::Waited, &Part::Throw, &Part::SumOf, &Part::MakeObject,
                    gtrain::Reduces<&Part::Number, gtrain::Sum>, gtrain::Reduces<&Part::Number, gtrain::Max>,
                    gtrain::Reduces<&Part::Vector, gtrain::Sum>, gtrain::Reduces<&Part::Even, gtrain::Sum>,
                    gtrain::Reduces<&Part::Letter, Longer>>>;

gtrain::Task<> Reductions(gtrain::Cluster& cluster) {
  for (const size_t size : {1, 2, 3, 7, 20}) {
    auto parts = co_await cluster.SpawnGroup<Part>(size);
    std::vector<int64_t> numbers(size);
    std::iota(numbers.begin(), numbers.end(), 0);
    co_await parts.Scatter<&Part::Set>(numbers);
    CHECK(co_await parts.Call<&Part::Number>() == numbers);
    const int64_t sum = co_await parts.Reduce<&Part::Number, gtrain::Sum>();
    CHECK(sum == std::accumulate(numbers.begin(), numbers.end(), int64_t{0}));
    const int64_t max = co_await parts.Reduce<&Part::Number, gtrain::Max>();
    CHECK(max == static_cast<int64_t>(size) - 1);
    const auto vector = co_await parts.Reduce<&Part::Vector, gtrain::Sum>(3);
    CHECK(vector == std::vector<float>(3, static_cast<float>(sum)));
    const std::string letters = co_await parts.Reduce<&Part::Letter, Longer>();
    std::string wanted;
    for (size_t i = 0; i < size; ++i) wanted += static_cast<char>('a' + i);
    CHECK(letters == wanted);  // in the order of the group, however the tree is
    const auto even = co_await gtrain::Try(parts.Reduce<&Part::Even, gtrain::Sum>());
    CHECK(size == 1 ? even.ok() : even.status().message() == "it is odd");
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [one, other] : {std::pair(nan, 1.0), std::pair(1.0, nan)}) {
    CHECK(std::isnan(gtrain::Max()(one, other)) && std::isnan(gtrain::Min()(one, other)));
    CHECK(std::isnan(gtrain::Max()(std::vector{2.0, one}, {1.0, other})[1]));
  }
  const auto of_none = co_await gtrain::Try(gtrain::GroupRef<Part>().Reduce<&Part::Number, gtrain::Sum>());
  CHECK(of_none.status().code() == StatusCode::kInvalidArgument);
  auto two = co_await cluster.SpawnGroup<Part>(2);
  const std::vector<int64_t> three(3);
  const auto unlike = co_await gtrain::Try(two.Scatter<&Part::Set>(three));
  CHECK(unlike.status().code() == StatusCode::kInvalidArgument);
}

gtrain::Task<> Pools(gtrain::Cluster& cluster) {
  auto parts = co_await cluster.SpawnGroup<Part>(3, gtrain::Spawn().Restarts(0));
  const std::vector<int64_t> numbers = {0, 1, 2};
  co_await parts.Scatter<&Part::Set>(numbers);
  const gtrain::ActorPool<Part> pool(parts);
  std::vector<gtrain::Future<int64_t>> calls;
  for (int i = 0; i < 30; ++i) calls.push_back(pool.With(seconds(20)).Call<&Part::Number>());
  std::vector<int> by(3);
  for (auto& one : calls) ++by[static_cast<size_t>(co_await std::move(one))];
  CHECK(by[0] > 0 && by[1] > 0 && by[2] > 0);
  // Of those that are busy the least.
  std::vector<gtrain::Future<bool>> held;
  for (int i = 0; i < 8; ++i) held.push_back(pool.Call<&Part::WaitAtGate>());
  gate.Open();
  for (auto& one : held) co_await std::move(one);
  const auto waits = [&](size_t at) { return parts[at].Call<&Part::Waited>(); };
  for (const size_t at : {0, 1, 2}) {
    const int64_t waited = co_await waits(at);
    CHECK(waited >= 2 && waited <= 3);  // eight calls of three
  }
  const auto thrown = co_await gtrain::Try(parts[1].Call<&Part::Throw>());  // it ends
  CHECK(thrown.status().code() == StatusCode::kUnknown);
  CHECK((co_await parts[1].Ended()).find("it threw 1 times") != std::string::npos);
  int lost = 0;
  for (int i = 0; i < 30; ++i) {
    const auto answer = co_await gtrain::Try(pool.Call<&Part::Number>());
    lost += answer.ok() ? 0 : 1;
  }
  CHECK(lost <= 1);  // who answers at once that it is no more is not asked again
  const gtrain::ActorPool<Part> empty{gtrain::GroupRef<Part>()};
  CHECK((co_await gtrain::Try(empty.Call<&Part::Number>())).status().code() == StatusCode::kInvalidArgument);
}

gtrain::Task<> SeveralAtATime(gtrain::Cluster& cluster) {
  auto part = co_await cluster.Spawn<Part>(gtrain::Spawn().Concurrency(2));
  auto one = part.Call<&Part::MeetOthers>(2), other = part.Call<&Part::MeetOthers>(2);
  CHECK(co_await std::move(one));
  CHECK(co_await std::move(other));
  const auto none = co_await gtrain::Try(cluster.Spawn<Part>(gtrain::Spawn().Concurrency(0)));
  CHECK(none.status().code() == StatusCode::kInvalidArgument);
  const auto many = co_await gtrain::Try(cluster.Spawn<Part>(gtrain::Spawn().Concurrency(1025)));
  CHECK(many.status().code() == StatusCode::kInvalidArgument);
}

gtrain::Task<> Detached(gtrain::Cluster& cluster) {
  auto first = co_await cluster.FindOrSpawn<Part>(gtrain::Spawn("part"));
  co_await first.Call<&Part::Set>(7);
  auto second = co_await cluster.FindOrSpawn<Part>(gtrain::Spawn("part"));
  CHECK(co_await second.Call<&Part::Number>() == 7);
  const auto taken = co_await gtrain::Try(cluster.SpawnDetached<Part>(gtrain::Spawn("part")));
  CHECK(taken.status().code() == StatusCode::kAlreadyExists);
  const auto unnamed = co_await gtrain::Try(cluster.SpawnDetached<Part>(gtrain::Spawn()));
  CHECK(unnamed.status().code() == StatusCode::kInvalidArgument);
  co_await cluster.End(second);
  const auto gone = co_await gtrain::Try(cluster.Find<Part>("part"));
  CHECK(gone.status().code() == StatusCode::kNotFound);
  auto owned = co_await cluster.Spawn<Part>();
  const auto not_detached = co_await gtrain::Try(cluster.End(owned.ref()));
  CHECK(not_detached.status().code() == StatusCode::kInvalidArgument);
}

gtrain::Task<> Apart(gtrain::Cluster& cluster) {
  CHECK((co_await cluster.SpawnGroup<Part>(1, gtrain::Spawn().Strict())).size() == 1);
  const auto more = co_await gtrain::Try(cluster.SpawnGroup<Part>(2, gtrain::Spawn().Strict()));
  CHECK(more.status().code() == StatusCode::kFailedPrecondition);
  const auto alone = co_await gtrain::Try(cluster.Spawn<Part>(gtrain::Spawn().Strict()));
  CHECK(alone.status().code() == StatusCode::kInvalidArgument);
}

gtrain::Task<> Objects(gtrain::Cluster& cluster) {
  auto part = co_await cluster.Spawn<Part>();
  std::vector<int64_t> numbers(1 << 20);
  std::iota(numbers.begin(), numbers.end(), 0);
  auto object = co_await cluster.Put(numbers);
  CHECK(object.ref().size() == numbers.size());
  const int64_t sum = co_await part.Call<&Part::SumOf>(object.ref());
  CHECK(sum == (int64_t{1} << 19) * ((1 << 20) - 1));
  const gtrain::Object<int64_t> name = object;
  auto view = co_await name.Read();
  const gtrain::ObjectView<int64_t> copy = view;
  CHECK(copy.data() == view.data() && copy[5] == 5 && reinterpret_cast<uintptr_t>(copy.data()) % 64 == 0);
  object = {};
  const auto gone = co_await gtrain::Try(name.Read());
  CHECK(gone.status().code() == StatusCode::kNotFound);
  CHECK(view[numbers.size() - 1] == numbers.back());  // who has it goes on reading

  const auto made = co_await part.Call<&Part::MakeObject>(3);
  CHECK((made.shape() == std::vector<int64_t>{3, 2}));
  const auto six = co_await made.Read();
  CHECK(six.size() == 6 && six[5] == 5.0F && (six.shape() == std::vector<int64_t>{3, 2}));

  const std::array<std::byte, 2> bytes = {std::byte{1}, std::byte{2}};
  const auto two = co_await cluster.Put(bytes);
  CHECK((co_await two.ref().Read())[1] == std::byte{2});
  const std::vector<int64_t> three_by_four = {3, 4};
  const auto unlike = co_await gtrain::Try(cluster.Put(numbers, three_by_four));
  CHECK(unlike.status().code() == StatusCode::kInvalidArgument);
  const auto nobodys = co_await gtrain::Try(gtrain::Object<float>().Read());
  CHECK(nobodys.status().code() == StatusCode::kInvalidArgument);
  const auto negative = co_await gtrain::Try(cluster.Create<float>(-1));
  CHECK(negative.status().code() == StatusCode::kInvalidArgument);
  const auto large = co_await gtrain::Try(cluster.Create<float>(int64_t{1} << 40, int64_t{1} << 40));
  CHECK(large.status().code() == StatusCode::kInvalidArgument);
}

// The cluster has 3 MiB for objects.
gtrain::Task<> NoRoom(gtrain::Cluster& cluster) {
  const std::vector<float> numbers(1 << 19);
  auto first = co_await cluster.Put(numbers);
  const std::vector<int64_t> one_dimension;
  const auto full = co_await gtrain::Try(cluster.Put(numbers, one_dimension, milliseconds(30)));
  CHECK(full.status().code() == StatusCode::kResourceExhausted);
  CHECK(full.status().message().find("give its cluster more (object_bytes)") != std::string::npos);
  auto waiting = cluster.Create<float>(1 << 19);
  CHECK(!waiting.there());
  first = {};
  auto draft = co_await std::move(waiting);
  const auto longer = draft.Write(1, numbers);
  CHECK(longer.code() == StatusCode::kInvalidArgument);
  CHECK((co_await gtrain::Try(cluster.Create<float>(1 << 20))).status().code() ==
        StatusCode::kResourceExhausted);
}

void Run(gtrain::Task<> (*driver)(gtrain::Cluster&), const gtrain::ClusterOptions& options = {}) {
  auto cluster = gtrain::Cluster::Open(options);
  CHECK(cluster.ok());
  const gtrain::Status status = gtrain::internal::RunToEnd(driver(**cluster)).status();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  CHECK(status.ok());
}

}  // namespace

int main() {
  Run(Reductions);
  Run(Pools);
  Run(SeveralAtATime);
  Run(Detached);
  Run(Apart);
  Run(Objects);
  Run(NoRoom, {.object_bytes = 3 << 20});
  std::puts("ok");
  return 0;
}
