#!/usr/bin/env bash
# What a person reads who uses an actor wrongly. Right uses compile; of wrong ones, all in one file, the compiler says our
# sentence as often as it has to, and nothing compiles.
# Arguments: the folder of the headers, docs/actors.md whose example must compile, then the compilers.
set -euo pipefail
include=$1 page=$2
shift 2
right=$(cat <<'CODE'
#include <gtrain/actor.h>
struct Shard {
  explicit Shard(long n) : n_(n) {}
  long Push(std::vector<float> g, float lr) { return n_ + static_cast<long>(lr) + static_cast<long>(g.size()); }
  void Other() {}
  long Inside(std::optional<int> one, std::pair<int, int> two, std::vector<int> all) {
    return *one + two.first + static_cast<long>(all.size());
  }
  double Sum(std::span<const double> w, std::string_view name) const { return w[0] + static_cast<double>(name.size()); }
  long n_;
};
inline constexpr auto kShard =
    gtrain::Actor<Shard, gtrain::Ctor<int64_t>, gtrain::Methods<&Shard::Push, &Shard::Inside, &Shard::Sum>>;
struct Parent {
  virtual ~Parent() = default;
  long Inherited() const { return 1; }
  virtual void Virtual() = 0;
};
struct Child : Parent {
  void Virtual() override {}
  char Letter(char c, const std::vector<char>& more) volatile { return more.empty() ? c : more[0]; }
  void Lvalue() const& noexcept {}
  long Overloaded(long n) { return n; }
  long Overloaded(long n, long m) { return n + m; }
};
constexpr auto kOverloaded = static_cast<long (Child::*)(long)>(&Child::Overloaded);
inline constexpr auto kChild =
    gtrain::Actor<Child, gtrain::Ctor<>,
                  gtrain::Methods<&Child::Inherited, &Child::Virtual, &Child::Letter, &Child::Lvalue, kOverloaded>>;
void Right(gtrain::Cluster& cluster, const gtrain::Ref<Shard>& shard) {
  (void)shard.Call<&Shard::Push>(std::vector<float>{1}, 0.1f);
  (void)shard.Call<&Shard::Inside>(1, std::pair(1, 2L), std::vector<int>());
  const double w[] = {1, 2};
  (void)shard.Call<&Shard::Sum>(w, "weights");
  (void)shard.Call<&Shard::Sum>(std::vector<double>(3), std::string("weights"));
  (void)cluster.Spawn<Shard>(3);
}
void AlsoRight(const gtrain::Ref<Child>& child) {
  (void)child.Call<&Parent::Inherited>();
  (void)child.Call<&Child::Virtual>();
  (void)child.Call<&Child::Letter>('c', std::vector<char>());
  (void)child.Call<&Child::Lvalue>();
  (void)child.Call<kOverloaded>(1);
}
CODE
)
wrong=$(cat <<'CODE'
struct Opaque { virtual ~Opaque() = default; };
struct Stranger { long Value() const { return 1; } Opaque Make() { return {}; } };
void One(const gtrain::Ref<Shard>& shard) { (void)shard.Call<&Shard::Push>(0.1f, 0.1f); }
void Two(const gtrain::Ref<Shard>& shard) { (void)shard.Call<&Shard::Push>(std::vector<float>{1}); }
void Three(const gtrain::Ref<Shard>& shard) { (void)shard.Call<&Shard::Other>(); }
struct Alien { long Value() const { return 1; } };
void Four(gtrain::Cluster& cluster) { (void)cluster.Spawn<Alien>(); }
void Five(const gtrain::Ref<Alien>& alien) { (void)alien.Call<&Alien::Value>(); }
void Six(gtrain::Cluster& cluster) { (void)cluster.Spawn<Shard>(std::string("eight")); }
inline constexpr auto k7 = gtrain::Actor<Stranger, gtrain::Ctor<int, int>, gtrain::Methods<&Stranger::Value>>;
inline constexpr auto k8 = gtrain::Actor<Shard, gtrain::Ctor<long>, gtrain::Methods<&Stranger::Value>>;
void Eleven(gtrain::Cluster& cluster) { (void)cluster.Spawn<Shard>(2.5); }
void Twelve(const gtrain::Ref<Shard>& shard) {
  (void)shard.Call<&Shard::Inside>(2.5, std::pair<int, int>(), std::vector<int>());
  (void)shard.Call<&Shard::Inside>(std::optional<double>(2.5), std::pair<int, int>(), std::vector<int>());
  (void)shard.Call<&Shard::Inside>(1, std::pair<int, float>(), std::vector<int>());
  (void)shard.Call<&Shard::Inside>(1, std::pair<int, int>(), std::vector<double>());
  (void)shard.Call<&Shard::Sum>(std::vector<float>(), "weights");
  (void)shard.Call<&Alien::Value>();
}
gtrain::Task<> Thirteen(gtrain::Ref<Shard> shard) {
  const auto constant = shard.Call<&Shard::Push>(std::vector<float>(), 0.1f);
  co_await constant;
  auto future = shard.Call<&Shard::Push>(std::vector<float>(), 0.1f);
  co_await future;
  co_await gtrain::Try(future);
  co_await 5;
}
gtrain::Status Drive(gtrain::Cluster&) { return {}; }
int Fourteen(int argc, char** argv) { return gtrain::Main(argc, argv, Drive); }
gtrain::Task<gtrain::Status> Fifteen() { co_return gtrain::Status(); }
gtrain::Task<gtrain::Result<int>> Sixteen() { co_return 1; }
#pragma GCC diagnostic error "-Wunused-result"
void Ten(const gtrain::Ref<Shard>& shard) { shard.Call<&Shard::Push>(std::vector<float>{1}, 0.1f); }
CODE
)
# Classes with a method M each, and what the compiler says about it.
wrong_methods=(
  'Opaque M() { return {}; }' "gtrain: this type is no value"
  'std::vector<int*> M() { return {}; }' "gtrain: a pointer is no value"
  'void M(const float* /*w*/) {}' "gtrain: a parameter is a pointer"
  'void M(float /*w*/[3]) {}' "gtrain: a parameter is a pointer"
  'void M(const float (&/*w*/)[3]) {}' "gtrain: a parameter is a C array"
  'void M(std::vector<float>& /*w*/) {}' "gtrain: a parameter is a reference to what is not const"
  'void M(std::span<float> /*w*/) {}' "gtrain: a parameter is a view that arguments cannot have"
  'void M(std::span<const std::string> /*w*/) {}' "gtrain: a parameter is a view that arguments cannot have"
  'void M(std::vector<std::string_view> /*w*/) {}' "gtrain: a std::span or a std::string_view owns nothing"
  'gtrain::Task<> M(std::span<const float> /*w*/) { co_return; }' "gtrain: a method that is a gtrain::Task takes a view"
  'gtrain::Task<> M(const std::string_view& /*w*/) { co_return; }' "gtrain: a method that is a gtrain::Task takes a view"
  'std::string_view M() const { return {}; }' "gtrain: a method gives a view"
  'void M(NoDefault /*w*/) {}' "gtrain: a parameter has no default constructor"
  'void M(std::vector<NoDefault> /*w*/) {}' "gtrain: a value has a default constructor"
  'void M(Thirteen /*w*/) {}' "gtrain: a value may be an aggregate of up to 12 members"
  'ArrayInside M() { return {}; }' "gtrain: a C array is no value, also as a member"
  'BaseInside M() { return {}; }' "gtrain: an aggregate that has a base class is no value by itself"
  'void M(long double /*x*/) {}' "gtrain: a number of more than 8 bytes is no value"
  'void M() && {}' "gtrain: gtrain::Methods<> takes pointers to member functions"
  'static void M() {}' "gtrain: gtrain::Methods<> takes pointers to member functions"
  'virtual void M() = 0;' "gtrain: an abstract class has no actors"
  'private: void M() {}' "private"
  'void M(int) {} void M(long) {}' "auto"
)
wrong_types='
struct Opaque { virtual ~Opaque() = default; };
struct NoDefault { explicit NoDefault(int) {} void Persist(auto& archive) { archive(n); } int n; };
struct Thirteen { int a, b, c, d, e, f, g, h, i, j, k, l, m; };
struct ArrayInside { int a; int b[3]; std::string c; };
struct Inside { int a; };
struct BaseInside : Inside { int b; };
class Hidden { public: void M() {} };
class Hides : Hidden {};
inline constexpr auto kHides = gtrain::Actor<Hides, gtrain::Ctor<>, gtrain::Methods<&Hidden::M>>;'

failed=0
# wants <output> <how often at least> <text>
wants() {
  local found
  found=$({ grep -oF -- "$3" <<<"$1" || true; } | wc -l)
  if ((found < $2)); then
    echo "$compiler: \"$3\" is there $found times, and should be $2 times"
    failed=1
  fi
}
compile() {
  local all=()
  [[ $compiler != *clang* ]] || all=(-ferror-limit=0)
  "$compiler" -std=c++20 -fsyntax-only -Wall -Wextra "${all[@]}" -I"$include" -x c++ - 2>&1 <<<"$1"
}

for compiler in "$@"; do
  compile "$(sed -n '/^```cpp$/,/^```$/{/^```/d;p}' "$page")" || { echo "$compiler: the example of $page does not compile"; failed=1; }
  compile "$right" || { echo "$compiler: what is right does not compile"; failed=1; }
  if output=$(compile "$right"$'\n'"$wrong"); then
    echo "$compiler: what is wrong compiles"
    failed=1
  fi
  wants "$output" 4 "gtrain: these are not the arguments of the method"
  wants "$output" 1 "(default arguments are no part of the type of a method: give all)"
  wants "$output" 1 "gtrain: gtrain::Methods<> of this class does not list this method"
  wants "$output" 1 "gtrain: this is a method of another class than the actor's"
  wants "$output" 2 "gtrain: this class is no actor here"
  wants "$output" 1 "gtrain: these are not the arguments of gtrain::Ctor<> of this class"
  wants "$output" 4 "and a number with a fraction is given"
  wants "$output" 1 "gtrain: no constructor of this class takes the types of gtrain::Ctor<>"
  wants "$output" 1 "gtrain: gtrain::Methods<> lists a method of another class"
  wants "$output" 1 "gtrain: a future or task is taken by Try"
  wants "$output" 2 "gtrain: a future or task is taken where it is awaited"
  wants "$output" 1 "gtrain: a gtrain::Task awaits calls"
  wants "$output" 1 "gtrain: the driver of actors returns a gtrain::Task<>"
  wants "$output" 1 "gtrain: instead of a gtrain::Task<gtrain::Status> there is gtrain::Task<>"
  wants "$output" 1 "gtrain: instead of a gtrain::Task<gtrain::Result<T>> there is gtrain::Task<T>"
  wants "$output" 1 "nodiscard"
  code="#include <gtrain/actor.h>$wrong_types"
  for ((i = 0; i < ${#wrong_methods[@]}; i += 2)); do
    code+=$'\n'"#line $((i / 2 + 1)) \"method\""$'\n'
    code+="class Wrong$i { public: ${wrong_methods[i]} }; inline constexpr auto k$i = gtrain::Actor<Wrong$i, gtrain::Ctor<>, gtrain::Methods<&Wrong$i::M>>;"
  done
  output=$(compile "$code" || true)
  for ((i = 0; i < ${#wrong_methods[@]}; i += 2)); do
    # Said as often as the table has it, so that no method hears it for another one.
    often=0
    for ((j = 1; j < ${#wrong_methods[@]}; j += 2)); do
      [[ ${wrong_methods[j]} != "${wrong_methods[i + 1]}" ]] || often=$((often + 1))
    done
    wants "$output" "$often" "${wrong_methods[i + 1]}"
  done
  wants "$output" 1 "gtrain: gtrain::Methods<> lists a method of a base class that is private"
done
if [[ $failed != 0 ]]; then exit 1; fi
echo "actors_compile_test: $# compilers"
