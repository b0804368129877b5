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
  long n_;
};
inline constexpr auto kShard = gtrain::Actor<Shard, gtrain::Ctor<int64_t>, gtrain::Methods<&Shard::Push>>;
void Right(gtrain::Cluster& cluster, const gtrain::Ref<Shard>& shard) {
  (void)shard.Call<&Shard::Push>(std::vector<float>{1}, 0.1f);
  (void)cluster.Spawn<Shard>(3);
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
#pragma GCC diagnostic error "-Wunused-result"
void Ten(const gtrain::Ref<Shard>& shard) { shard.Call<&Shard::Push>(std::vector<float>{1}, 0.1f); }
CODE
)
wrong_value='struct Opaque { virtual ~Opaque() = default; };
struct Stranger { Opaque Make() { return {}; } };
inline constexpr auto kMade = gtrain::Actor<Stranger, gtrain::Ctor<>, gtrain::Methods<&Stranger::Make>>;'

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
  wants "$output" 2 "gtrain: these are not the arguments of the method"
  wants "$output" 1 "gtrain: gtrain::Methods<> of this class does not list this method"
  wants "$output" 2 "gtrain: this class is no actor here"
  wants "$output" 1 "gtrain: these are not the arguments of gtrain::Ctor<> of this class"
  wants "$output" 1 "and a number with a fraction is given"
  wants "$output" 1 "gtrain: no constructor of this class takes the types of gtrain::Ctor<>"
  wants "$output" 1 "gtrain: gtrain::Methods<> lists a method of another class"
  wants "$output" 1 "nodiscard"
  output=$(compile "$right"$'\n'"$wrong_value" || true)
  wants "$output" 1 "gtrain: this type is no value"
done
if [[ $failed != 0 ]]; then exit 1; fi
echo "actors_compile_test: $# compilers"
