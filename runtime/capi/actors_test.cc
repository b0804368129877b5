// Actors as a program has them: the headers and libgtrain.so.
#include <gtrain/gtrain.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

namespace {

using gtrain::Status;
using gtrain::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Opened once.
class Gate {
 public:
  void Open() {
    opened_.store(true);
    opened_.notify_all();
  }
  bool WaitFor() const {
    const auto end = std::chrono::steady_clock::now() + seconds(60);
    while (!opened_ && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    return opened_;
  }
  void Close() { opened_.store(false); }

 private:
  std::atomic<bool> opened_ = false;
} gate;

class Counter {
 public:
  explicit Counter(int64_t from) : value_(from) {}
  int64_t Add(int64_t by) { return value_ += by; }
  int64_t Value() const { return value_; }
  void Throw() { throw std::runtime_error("the counter is tired"); }
  Status Refuse(const std::string& why) const { return Status(StatusCode::kOutOfRange, why); }
  gtrain::Result<int64_t> Half() const {
    if (value_ % 2 != 0) return Status(StatusCode::kOutOfRange, "it is odd");
    return value_ / 2;
  }
  void Nothing() const {}
  bool WaitAtGate() const { return gate.WaitFor(); }
  bool WaitsInside(gtrain::Ref<Counter> other);

 private:
  int64_t value_;
};
[[maybe_unused]] constexpr auto kCounter = gtrain::Actor<
    Counter, gtrain::Ctor<int64_t>,
    gtrain::Methods<&Counter::Add, &Counter::Value, &Counter::Throw, &Counter::Refuse, &Counter::Half,
                    &Counter::Nothing, &Counter::WaitAtGate, &Counter::WaitsInside>>;

bool Counter::WaitsInside(gtrain::Ref<Counter> other) {
  return other.Call<&Counter::Value>().Get(seconds(1)).status().code() == StatusCode::kFailedPrecondition;
}

struct Point {
  double x = 0, y = 0;
  std::string name;
  bool operator==(const Point&) const = default;
};

class Weights {
 public:
  Weights() = default;
  explicit Weights(std::vector<float> values) : values_(std::move(values)) {}
  void Persist(auto& archive) { archive(values_, version_); }
  bool operator==(const Weights&) const = default;

 private:
  std::vector<float> values_;
  int version_ = 3;
};

using Everything =
    std::tuple<bool, int8_t, uint64_t, float, std::string, std::vector<double>, std::vector<bool>,
               std::array<int32_t, 3>, std::map<std::string, std::vector<int64_t>>, std::optional<Point>,
               std::variant<int64_t, std::string, Point>, Weights, Status, std::vector<std::byte>,
               StatusCode>;

class Echo {
 public:
  Everything All(Everything everything) { return everything; }
  int8_t Small(int8_t value) const { return value; }
};
[[maybe_unused]] constexpr auto kEcho =
    gtrain::Actor<Echo, gtrain::Ctor<>, gtrain::Methods<&Echo::All, &Echo::Small>>;

// Awaits calls of its own.
class Adder {
 public:
  explicit Adder(std::vector<gtrain::Ref<Counter>> counters) : counters_(std::move(counters)) {}
  gtrain::Task<int64_t> Sum(int64_t plus) {
    running_ += 1;
    CHECK(running_ == 1);  // no other call is admitted meanwhile
    int64_t sum = plus;
    for (const auto& counter : counters_) sum += co_await counter.Call<&Counter::Value>();
    running_ -= 1;
    co_return sum;
  }
  int64_t Plain() const { return 7; }
  gtrain::Task<> Fails() {
    co_await counters_.at(0).Call<&Counter::Refuse>("by the first");
    CHECK(false);
  }
  gtrain::Task<int64_t> Slow() {
    co_await counters_.at(0).With(seconds(50)).Call<&Counter::WaitAtGate>();
    co_return 1;
  }

 private:
  std::vector<gtrain::Ref<Counter>> counters_;
  int running_ = 0;
};
[[maybe_unused]] constexpr auto kAdder =
    gtrain::Actor<Adder, gtrain::Ctor<std::vector<gtrain::Ref<Counter>>>,
                  gtrain::Methods<&Adder::Sum, &Adder::Plain, &Adder::Fails, &Adder::Slow>>;

// Says how often it is copied.
struct Copies {
  Copies() = default;
  Copies(const Copies& other) : number(other.number) { ++made; }
  Copies& operator=(const Copies&) = default;
  void Persist(auto& archive) { archive(number); }
  int number = 0;
  static inline std::atomic<int> made = 0;
};

class Parent {
 public:
  virtual ~Parent() = default;
  int64_t Inherited() { return 1; }
  int64_t AlsoInherited() { return 2; }
  virtual int64_t Virtual() const { return 3; }
};
// Methods of all kinds, and of parameters.
class Kinds : public Parent {
 public:
  Kinds(std::string_view name, std::span<const int16_t> numbers) : name_(name), size_(numbers.size()) {}
  int64_t Virtual() const override { return 4; }
  size_t Lvalue() & noexcept { return name_.size() + size_; }
  size_t Volatile() const volatile { return size_; }
  int64_t Overloaded(int64_t number) const { return number; }
  std::string Overloaded(const std::string& text) const { return text; }
  char Letter(char one, const std::vector<char>& more) const { return more.empty() ? one : more[0]; }
  double Sum(bool /*odd*/, std::span<const double> numbers, std::string_view text,
             const std::span<const std::byte>& bytes) const {
    CHECK(reinterpret_cast<uintptr_t>(numbers.data()) % alignof(double) == 0);
    return std::accumulate(numbers.begin(), numbers.end(), static_cast<double>(text.size() + bytes.size()));
  }
  int64_t Small(std::optional<int8_t> one, std::pair<uint16_t, int64_t> two) const {
    return one.value_or(0) + two.first + two.second;
  }
  gtrain::Task<size_t> Later(std::vector<float> numbers, std::unique_ptr<int64_t> one, const Copies& copies) {
    co_await gtrain::Status();
    co_return numbers.size() + static_cast<size_t>(*one) + static_cast<size_t>(copies.number);
  }

 private:
  std::string name_;
  size_t size_;
};
constexpr auto kOverloadedInteger = static_cast<int64_t (Kinds::*)(int64_t) const>(&Kinds::Overloaded);
constexpr auto kOverloadedText =
    static_cast<std::string (Kinds::*)(const std::string&) const>(&Kinds::Overloaded);
[[maybe_unused]] constexpr auto kKinds =
    gtrain::Actor<Kinds, gtrain::Ctor<std::string_view, std::span<const int16_t>>,
                  gtrain::Methods<&Kinds::Inherited, &Kinds::AlsoInherited, &Kinds::Virtual, &Kinds::Lvalue,
                                  &Kinds::Volatile, kOverloadedInteger, kOverloadedText, &Kinds::Letter,
                                  &Kinds::Sum, &Kinds::Small, &Kinds::Later>>;

gtrain::Task<> AllKinds(gtrain::Cluster& cluster) {
  auto kinds = co_await cluster.Spawn<Kinds>("kinds", std::vector<int16_t>(2));
  CHECK(co_await kinds.Call<&Kinds::Inherited>() == 1);
  CHECK(co_await kinds.Call<&Parent::AlsoInherited>() == 2);
  CHECK(co_await kinds.Call<&Kinds::Virtual>() == 4);
  CHECK(co_await kinds.Call<&Kinds::Lvalue>() == 7);
  CHECK(co_await kinds.Call<&Kinds::Volatile>() == 2);
  CHECK(co_await kinds.Call<kOverloadedInteger>(5) == 5);
  CHECK(co_await kinds.Call<kOverloadedText>("five") == "five");
  const std::vector<char> letters = {'\x80', 'c'};
  CHECK(co_await kinds.Call<&Kinds::Letter>('b', letters) == '\x80');
  // Of every length, so that heads of every length are before them.
  std::vector<double> numbers;
  for (size_t size = 0; size < 40; ++size) {
    CHECK(co_await kinds.Call<&Kinds::Sum>(true, numbers, "123", std::as_bytes(std::span("1234"))) ==
          static_cast<double>(size + 8));
    numbers.push_back(1);
  }
  CHECK(co_await kinds.Call<&Kinds::Sum>(true, std::span(numbers).first(2), std::string("1"),
                                         std::vector<std::byte>(3)) == 6);
  const double array[] = {1, 2};
  CHECK(co_await kinds.Call<&Kinds::Sum>(true, array, "", std::array<std::byte, 1>()) == 4);
  Copies copies;
  copies.number = 30;
  CHECK(co_await kinds.Call<&Kinds::Later>(std::vector<float>(7), std::make_unique<int64_t>(5), copies) ==
        42);
  CHECK(Copies::made == 0);
}

// What the type of a parameter cannot hold is an error of who calls.
gtrain::Task<> Narrow(gtrain::Cluster& cluster) {
  auto kinds = co_await cluster.Spawn<Kinds>("kinds", std::vector<int16_t>());
  const std::pair<uint16_t, int64_t> two{2, 3};
  CHECK(co_await kinds.Call<&Kinds::Small>(-128, std::pair<int, int>(65'535, 1)) == 65'408);
  CHECK(co_await kinds.Call<&Kinds::Small>(std::nullopt, two) == 5);
  const auto large = co_await gtrain::Try(kinds.Call<&Kinds::Small>(int64_t{300}, two));
  CHECK(large.status().code() == StatusCode::kInvalidArgument);
  CHECK(large.status().message() == "an argument of Small is wrong: the integer 300 does not fit into i8");
  const auto inside = co_await gtrain::Try(kinds.Call<&Kinds::Small>(std::optional<int64_t>(300), two));
  CHECK(inside.status().message() == large.status().message());
  const auto below = co_await gtrain::Try(kinds.Call<&Kinds::Small>(1, std::pair<int, int>(-1, 1)));
  CHECK(below.status().message() == "an argument of Small is wrong: the integer -1 does not fit into u16");
  const auto counter = co_await gtrain::Try(cluster.Spawn<Counter>(~uint64_t{0}));
  CHECK(counter.status().code() == StatusCode::kInvalidArgument);
  CHECK(counter.status().message() ==
        "an argument of Counter is wrong: the integer 18446744073709551615 does not fit into i64");
}

// A view looks at what was packed, wherever it is aligned.
void Views() {
  const std::vector<double> numbers(100, 1.5);
  gtrain::internal::Packed packed;
  CHECK(packed.Pack(true, numbers, std::string_view("text")).ok());
  for (const size_t off : {size_t{0}, size_t{1}}) {
    std::vector<double> buffer(packed.size() / sizeof(double) + 2);
    void* const at = reinterpret_cast<char*>(buffer.data()) + off;
    std::memcpy(at, packed.data(), packed.size());
    gtrain::Unpacking unpacking(at, packed.size());
    bool odd = false;
    gtrain::internal::Viewed<double> view;
    gtrain::internal::ViewedText text;
    unpacking(odd, view, text);
    CHECK(unpacking.End().ok());
    CHECK(view.copy.empty() == (off == 0));
    CHECK(std::equal(view.span.begin(), view.span.end(), numbers.begin(), numbers.end()));
    CHECK(text.text == "text");
  }
}

gtrain::Task<int64_t> Twice(const gtrain::Owner<Counter>& counter) {
  const int64_t once = co_await counter.Call<&Counter::Value>();
  co_return once + co_await counter.Call<&Counter::Value>();
}

gtrain::Task<> Calls(gtrain::Cluster& cluster) {
  auto counter = co_await cluster.Spawn<Counter>(40);
  CHECK(co_await counter.Call<&Counter::Add>(2) == 42);
  CHECK(co_await counter.With(seconds(2)).Call<&Counter::Half>() == 21);
  CHECK(co_await Twice(counter) == 84);
  counter.Tell<&Counter::Add>(1);
  const auto odd = co_await gtrain::Try(counter.Call<&Counter::Half>());
  CHECK(odd.status().code() == StatusCode::kOutOfRange && odd.status().message() == "it is odd");
  const auto refused = co_await gtrain::Try(counter.Call<&Counter::Refuse>("enough"));
  CHECK(refused.status().message() == "enough");
  const auto thrown = co_await gtrain::Try(counter.Call<&Counter::Throw>());
  CHECK(thrown.status().code() == StatusCode::kUnknown);
  CHECK(thrown.status().message() == "Counter threw: the counter is tired");
  CHECK(co_await counter.Call<&Counter::Value>() == 40);  // it is made anew
  auto other = co_await cluster.Spawn<Counter>(gtrain::Spawn().Restarts(0), 1);
  CHECK(co_await counter.Call<&Counter::WaitsInside>(other));
  const auto late = co_await gtrain::Try(other.With(milliseconds(20)).Call<&Counter::WaitAtGate>());
  CHECK(late.status().code() == StatusCode::kDeadlineExceeded);
  gate.Open();
  CHECK(co_await other.Call<&Counter::Value>() == 1);
  gate.Close();
}

gtrain::Task<size_t> NoneLeft(std::vector<gtrain::Future<int64_t>>* futures) {
  co_return co_await gtrain::WhenAny(*futures);
}

// The first that is there, again and again, until all were taken; a late one holds up none of the others.
gtrain::Task<> Any(gtrain::Cluster& cluster) {
  gate.Close();
  auto slow = co_await cluster.Spawn<Counter>(0);
  auto quick = co_await cluster.Spawn<Counter>(7);
  std::vector<gtrain::Future<int64_t>> futures;
  auto held = slow.With(seconds(50)).Call<&Counter::WaitAtGate>();
  futures.push_back(slow.With(seconds(50)).Call<&Counter::Value>());  // behind it
  for (int i = 0; i < 20; ++i) futures.push_back(quick.Call<&Counter::Add>(1));
  futures.push_back(quick.With(milliseconds(1)).Call<&Counter::Add>(0));
  size_t taken = 0;
  while (taken < 21) {
    const size_t first = co_await gtrain::WhenAny(futures);
    CHECK(first > 0 && first < futures.size());
    (void)co_await gtrain::Try(std::move(futures[first]));
    if (taken++ % 2 == 0) futures.erase(futures.begin() + static_cast<ptrdiff_t>(first));
  }
  gate.Open();
  CHECK(co_await gtrain::WhenAny(futures) == 0);
  CHECK(co_await std::move(futures[0]) == 0);
  co_await std::move(held);
  gate.Close();
  // Answers come while others are still being asked for, from other threads.
  for (int round = 0; round < 2000; ++round) {
    std::vector<gtrain::Future<int64_t>> racing;
    for (int i = 0; i < 4; ++i) racing.push_back((i % 2 == 0 ? quick : slow).Call<&Counter::Value>());
    for (int i = 0; i < 4; ++i) {
      const size_t first = co_await gtrain::WhenAny(racing);
      (void)co_await std::move(racing[first]);
      racing.erase(racing.begin() + static_cast<ptrdiff_t>(first));
    }
    const auto none = co_await gtrain::Try(NoneLeft(&racing));
    CHECK(none.status().code() == StatusCode::kInvalidArgument);
  }
}

gtrain::Task<int64_t> AtOnce(int64_t value) { co_return value; }

// Whatever is there already is taken without the stack growing.
gtrain::Task<> ManyAtOnce(gtrain::Cluster& cluster) {
  int64_t sum = 0;
  for (int64_t i = 0; i < 300'000; ++i) sum += co_await AtOnce(1);
  auto counter = co_await cluster.Spawn<Counter>(0);
  std::vector<gtrain::Future<int64_t>> there;
  for (int i = 0; i < 900; ++i) there.push_back(counter.Call<&Counter::Add>(1));
  for (int i = 0; i < 900; ++i) CHECK(co_await gtrain::WhenAny(there) < there.size());
  for (auto& one : there) sum += co_await std::move(one) > 0 ? 1 : 0;
  const auto failed = co_await gtrain::Try(NoneLeft(&there));
  CHECK(failed.status().code() == StatusCode::kInvalidArgument);
  CHECK(sum == 300'900);
}

// Constructors and destructors are parts of actors: they do not wait, and have no other call's time.
class Builder {
 public:
  explicit Builder(gtrain::Ref<Counter> counter) : counter_(std::move(counter)) {
    waited_ =
        counter_.Call<&Counter::Value>().Get(seconds(5)).status().code() != StatusCode::kFailedPrecondition;
    answer_.emplace(counter_.Call<&Counter::WaitAtGate>());
  }
  gtrain::Task<bool> Built() {
    const auto answer = co_await gtrain::Try(std::move(*answer_));
    co_return !waited_ && answer.ok();
  }
  gtrain::Task<> Brief() { co_await counter_.Call<&Counter::Value>(); }

 private:
  gtrain::Ref<Counter> counter_;
  bool waited_ = true;
  std::optional<gtrain::Future<bool>> answer_;
};
[[maybe_unused]] constexpr auto kBuilder = gtrain::Actor<Builder, gtrain::Ctor<gtrain::Ref<Counter>>,
                                                         gtrain::Methods<&Builder::Built, &Builder::Brief>>;

gtrain::Task<> Constructors(gtrain::Cluster& cluster) {
  gate.Close();
  auto counter = co_await cluster.Spawn<Counter>(0);
  auto slow = co_await cluster.Spawn<Counter>(0);
  auto first = co_await cluster.Spawn<Builder>(counter);
  for (int i = 0; i < 50; ++i)
    (void)co_await gtrain::Try(slow.With(milliseconds(100)).Call<&Counter::Value>());
  std::vector<gtrain::Future<gtrain::Owner<Builder>>> making;
  for (int i = 0; i < 20; ++i) making.push_back(cluster.Spawn<Builder>(counter));
  std::vector<gtrain::Owner<Builder>> builders;
  for (auto& one : making) builders.push_back(co_await std::move(one));
  const auto longer = std::chrono::steady_clock::now() + milliseconds(200);  // than calls of before had
  while (std::chrono::steady_clock::now() < longer) std::this_thread::yield();
  gate.Open();
  for (auto& one : builders) CHECK(co_await one.Call<&Builder::Built>());
  CHECK(co_await first.Call<&Builder::Built>());
  gate.Close();
}

struct Nest {
  std::vector<Nest> inner;
};
class Nested {
 public:
  void Grow() {
    Nest* last = &nest_;
    while (!last->inner.empty()) last = &last->inner[0];
    last->inner.emplace_back();
  }
  int64_t Depth(const Nest& nest) const { return nest.inner.empty() ? 0 : 1 + Depth(nest.inner[0]); }
  void Persist(auto& archive) { archive(nest_); }

 private:
  Nest nest_;
};
[[maybe_unused]] constexpr auto kNested =
    gtrain::Actor<Nested, gtrain::Ctor<>, gtrain::Methods<&Nested::Grow, &Nested::Depth>>;

// What could not be read back is not sent, and not kept.
gtrain::Task<> Deep(gtrain::Cluster& cluster) {
  auto nested = co_await cluster.Spawn<Nested>();
  Nest nest;
  for (int depth = 0; depth < 31; ++depth) {
    CHECK(co_await nested.Call<&Nested::Depth>(nest) == depth);
    Nest outer;
    outer.inner.push_back(std::move(nest));
    nest = std::move(outer);
  }
  for (int i = 0; i < 3; ++i) {
    Nest outer;
    outer.inner.push_back(std::move(nest));
    nest = std::move(outer);
  }
  const auto deep = co_await gtrain::Try(nested.Call<&Nested::Depth>(nest));
  CHECK(deep.status().code() == StatusCode::kInvalidArgument);
  CHECK(deep.status().message().find("nested more than 64 deep") != std::string::npos);
}

gtrain::Task<> Names(gtrain::Cluster& cluster) {
  auto group = co_await cluster.SpawnGroup<Counter>(3, gtrain::Spawn("counters").Restarts(1), int64_t{5});
  for (int i = 0; i < 3; ++i) {
    auto found = co_await cluster.Find<Counter>("counters/" + std::to_string(i));
    CHECK(co_await found.Call<&Counter::Add>(i) == 5 + i);
  }
  CHECK(co_await group[2].Call<&Counter::Value>() == 7);
  const auto taken = co_await gtrain::Try(cluster.Spawn<Counter>(gtrain::Spawn("counters/1"), 0));
  CHECK(taken.status().code() == StatusCode::kAlreadyExists);
  const auto another = co_await gtrain::Try(cluster.Find<Echo>("counters/1"));
  CHECK(another.status().code() == StatusCode::kFailedPrecondition);
  const auto cut = co_await gtrain::Try(cluster.Spawn<Counter>(gtrain::Spawn(std::string("a\0b", 3)), 0));
  CHECK(cut.status().code() == StatusCode::kInvalidArgument);
  const auto failed = co_await gtrain::Try(group.Call<&Counter::Refuse>("all"));
  CHECK(failed.status().message() == "all");
  CHECK((co_await cluster.SpawnGroup<Echo>(2)).size() == 2);
  const auto below = co_await gtrain::Try(cluster.Spawn<Counter>(gtrain::Spawn().OnRank(-5), 0));
  CHECK(below.status().code() == StatusCode::kInvalidArgument);
  group = {};
  const auto gone = co_await gtrain::Try(cluster.Find<Counter>("counters/1"));
  CHECK(gone.status().code() == StatusCode::kNotFound);
}

gtrain::Task<> Values(gtrain::Cluster& cluster) {
  auto echo = co_await cluster.Spawn<Echo>();
  const Everything all = {true,
                          -128,
                          ~uint64_t{0},
                          1.5f,
                          std::string("a\0b", 3),
                          {1, -2.5, 1e300},
                          {true, false, true},
                          {1, 2, 3},
                          {{"a", {1, 2}}, {"", {}}},
                          Point{1, 2, "p"},
                          Point{3, 4, "q"},
                          Weights({1, 2, 3}),
                          Status(StatusCode::kAborted, "why"),
                          {std::byte{0}, std::byte{255}},
                          StatusCode::kNotFound};
  const Everything back = co_await echo.Call<&Echo::All>(all);
  CHECK(std::get<0>(back) == std::get<0>(all));
  CHECK(std::get<4>(back) == std::get<4>(all));
  CHECK(std::get<5>(back) == std::get<5>(all));
  CHECK(std::get<6>(back) == std::get<6>(all));
  CHECK(std::get<7>(back) == std::get<7>(all));
  CHECK(std::get<8>(back) == std::get<8>(all));
  CHECK(std::get<9>(back) == std::get<9>(all));
  CHECK(std::get<10>(back) == std::get<10>(all));
  CHECK(std::get<11>(back) == std::get<11>(all));
  CHECK(std::get<12>(back).message() == "why");
  CHECK(std::get<13>(back) == std::get<13>(all));
  CHECK(std::get<14>(back) == StatusCode::kNotFound);
  CHECK(std::get<1>(back) == -128 && std::get<2>(back) == ~uint64_t{0} && std::get<3>(back) == 1.5f);
}

gtrain::Task<> Coroutines(gtrain::Cluster& cluster) {
  std::vector<gtrain::Owner<Counter>> counters;
  std::vector<gtrain::Ref<Counter>> refs;
  for (int i = 0; i < 10; ++i) {
    counters.push_back(co_await cluster.Spawn<Counter>(i));
    refs.push_back(counters.back());
  }
  auto adder = co_await cluster.Spawn<Adder>(refs);
  std::vector<gtrain::Future<int64_t>> sums;
  for (int i = 0; i < 200; ++i) sums.push_back(adder.Call<&Adder::Sum>(i));
  for (int i = 0; i < 200; ++i) CHECK(co_await std::move(sums[i]) == 45 + i);
  const auto fails = co_await gtrain::Try(adder.Call<&Adder::Fails>());
  CHECK(fails.status().message() == "by the first");
  CHECK(co_await adder.Call<&Adder::Sum>(0) == 45 + 0);
  // What it awaits has no more time than it has itself, whatever it asks for.
  const auto slow = co_await gtrain::Try(adder.With(milliseconds(100)).Call<&Adder::Slow>());
  CHECK(slow.status().code() == StatusCode::kDeadlineExceeded);
  CHECK(co_await adder.With(seconds(30)).Call<&Adder::Plain>() == 7);  // its own call was given up
  gate.Open();
  CHECK(co_await adder.Call<&Adder::Sum>(1) == 46);
  gate.Close();
}

gtrain::Task<> Groups(gtrain::Cluster& cluster) {
  auto group = co_await cluster.SpawnGroup<Counter>(8, gtrain::Spawn().Restarts(1), 5);
  CHECK(group.size() == 8);
  CHECK(co_await group[3].Call<&Counter::Add>(1) == 6);
  const auto values = co_await group.With(seconds(2)).Call<&Counter::Value>();
  CHECK((values == std::vector<int64_t>{5, 5, 5, 6, 5, 5, 5, 5}));
  co_await group.Call<&Counter::Nothing>();
  group.Tell<&Counter::Add>(1);
  gtrain::GroupRef<Counter> ref = group;
  CHECK((co_await ref.Call<&Counter::Value>())[3] == 7);
  co_await ref.Call<&Counter::Half>();  // the fourth is odd
  CHECK(false);
}

gtrain::Result<int> Halved(int number) {
  if (number % 2 != 0) return gtrain::Status(gtrain::StatusCode::kOutOfRange, "it is odd");
  return number / 2;
}
gtrain::Task<int> HalvedTwice(int number) {
  co_await gtrain::Status();
  const int half = co_await Halved(number);
  co_return co_await Halved(half);
}
gtrain::Task<> AwaitsWhatIsThere(gtrain::Cluster& /*cluster*/) {
  CHECK(co_await HalvedTwice(8) == 2);
  const auto odd = co_await gtrain::Try(HalvedTwice(6));
  CHECK(odd.status().code() == gtrain::StatusCode::kOutOfRange);
}

gtrain::Task<> EndsWithAnError(gtrain::Cluster& cluster) {
  auto counter = co_await cluster.Spawn<Counter>(3);
  co_await counter.Call<&Counter::Half>();
  CHECK(false);
}

gtrain::Task<> ThrowsItself(gtrain::Cluster& cluster) {
  auto counter = co_await cluster.Spawn<Counter>(3);
  (co_await gtrain::Try(counter.Call<&Counter::Half>())).value();
}

void Run(gtrain::Task<> (*driver)(gtrain::Cluster&)) {
  auto cluster = gtrain::Cluster::Open();
  CHECK(cluster.ok());
  const Status status = gtrain::internal::RunToEnd(driver(**cluster)).status();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  CHECK(status.ok());
}

void FromOutside() {
  auto cluster = gtrain::Cluster::Open().value();
  CHECK(gtrain::Cluster::Open().status().code() == StatusCode::kAlreadyExists);
  auto counter = cluster->Spawn<Counter>(5).Get(seconds(10)).value();
  CHECK(counter.Call<&Counter::Add>(1).Get(seconds(10)).value() == 6);
  gtrain::Ref<Counter> ref = counter;
  counter = gtrain::Owner<Counter>();  // the actor ends
  CHECK(ref.Call<&Counter::Value>().Get(seconds(10)).status().code() == StatusCode::kNotFound);
  CHECK(gtrain::Ref<Counter>().Call<&Counter::Value>().Get(seconds(10)).status().code() ==
        StatusCode::kInvalidArgument);
  // A call that nobody awaits fails in the log, a few lines of however many.
  static std::atomic<int> lines = 0;
  gtrain::SetLog([](gtrain::LogLevel, std::string_view text) {
    lines += text.find("a call whose result nobody awaits failed: actor") != std::string_view::npos ? 1 : 0;
  });
  for (int i = 0; i < 1000; ++i) ref.Tell<&Counter::Add>(1);
  gtrain::SetLog({});
  CHECK(lines >= 1 && lines <= 20);
  // What a stranger sends: the right method, other values.
  auto echo = cluster->Spawn<Echo>().Get(seconds(10)).value();
  gtrain::internal::Packed packed;
  CHECK(packed.Pack(int64_t{300}).ok());
  using Answered = gtrain::internal::Answered<int8_t, gtrain::internal::AsValue<int8_t>>;
  for (const size_t size : {packed.size(), packed.size() - 1, size_t{0}}) {
    auto* answered = new Answered({});
    gtrain::Future<int8_t> future(answered->outcome());
    gtrain_actors_call(gtrain::internal::Engine(), echo.ref().bytes().data(), echo.ref().bytes().size(), 1,
                       packed.data(), size, 1000, &Answered::Reply, answered);
    const auto result = future.Get(seconds(10));
    CHECK(result.status().code() == StatusCode::kInvalidArgument);
    if (size == packed.size())
      CHECK(result.status().message() ==
            "an argument of Small is wrong: the integer 300 does not fit into i8");
  }
}

void FailsAsItShould(gtrain::Task<> (*driver)(gtrain::Cluster&)) {
  auto cluster = gtrain::Cluster::Open().value();
  const Status status = gtrain::internal::RunToEnd(driver(*cluster)).status();
  CHECK(status.code() == StatusCode::kOutOfRange && status.message() == "it is odd");
}

}  // namespace

int main(int argc, char** argv) {
  gtrain_actor_class type{};
  decltype(kCounter)::Fill(&type);
  CHECK(std::string(type.name) == "Counter");
  CHECK(std::string(type.signature) ==
        "(i64); Add(i64) -> i64; Value() const -> i64; Throw() -> nothing; Refuse(string) const -> nothing; "
        "Half() const -> i64; Nothing() const -> nothing; WaitAtGate() const -> bool; WaitsInside({string}) "
        "-> bool");
  decltype(kKinds)::Fill(&type);
  CHECK(
      std::string(type.signature) ==
      "(string, [i16]); Inherited() -> i64; AlsoInherited() -> i64; Virtual() const -> i64; Lvalue() -> u64; "
      "Volatile() const -> u64; Overloaded(i64) const -> i64; Overloaded(string) const -> string; Letter(i8, "
      "[i8]) const -> i8; Sum(bool, [f64], string, [byte]) const -> f64; Small(i8?, (u16, i64)) const -> "
      "i64; "
      "Later([f32], i64?, {i32}) -> u64");
  Run(Calls);
  Run(AllKinds);
  Run(Narrow);
  Views();
  Run(Any);
  Run(Names);
  Run(ManyAtOnce);
  Run(Constructors);
  Run(Deep);
  Run(Values);
  Run(Coroutines);
  Run(AwaitsWhatIsThere);
  FromOutside();
  FailsAsItShould(EndsWithAnError);
  FailsAsItShould(ThrowsItself);
  FailsAsItShould(Groups);
  CHECK(gtrain::Main(argc, argv, Calls) == 0);
  CHECK(gtrain::Main(argc, argv, EndsWithAnError) == 1);
  std::puts("ok");
  return 0;
}
