#include "actors/plan/names.h"

#include <map>
#include <string>

#include "base/rng.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

NamedActor Named(const std::string& name, uint64_t owner, uint64_t id) {
  return {name, "Shard", "()", {owner, owner}, id, "reference"};
}

TEST(NameTableTest, ANameIsOneActorsUntilItIsLetGo) {
  NameTable names;
  EXPECT_TRUE(names.Put(Named("ps", 1, 7)).ok());
  EXPECT_TRUE(names.Put(Named("ps", 1, 7)).ok()) << "told twice";
  EXPECT_TRUE(absl::IsAlreadyExists(names.Put(Named("ps", 1, 8))));
  EXPECT_TRUE(absl::IsAlreadyExists(names.Put(Named("ps", 2, 7))));
  ASSERT_NE(names.Find("ps"), nullptr);
  EXPECT_EQ(names.Find("ps")->id, 7u);
  names.Drop("ps", {2, 2}, 7);  // not its own
  names.Drop("ps", {1, 1}, 8);
  EXPECT_NE(names.Find("ps"), nullptr);
  names.Drop("ps", {1, 1}, 7);
  EXPECT_EQ(names.Find("ps"), nullptr);
  EXPECT_TRUE(names.Put(Named("ps", 2, 9)).ok());
}

TEST(NameTableTest, ThereAreSoManyNames) {
  NameTable names(2);
  EXPECT_TRUE(names.Put(Named("a", 1, 1)).ok());
  EXPECT_TRUE(names.Put(Named("b", 1, 2)).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(names.Put(Named("c", 1, 3))));
  EXPECT_TRUE(names.Put(Named("b", 1, 2)).ok());
  names.DropOwner({1, 1});
  EXPECT_EQ(names.size(), 0u);
  EXPECT_TRUE(names.Put(Named("c", 1, 3)).ok());
}

// Beside a map from names to actors.
TEST(NameTableTest, DoesWhatItsModelDoes) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Rng rng(seed);
    NameTable names;
    std::map<std::string, std::pair<uint64_t, uint64_t>> model;
    for (int i = 0; i < 500; ++i) {
      const std::string name(1, static_cast<char>('a' + rng.Below(6)));
      const uint64_t owner = 1 + rng.Below(3), id = 1 + rng.Below(3);
      const auto it = model.find(name);
      switch (rng.Below(4)) {
        case 0:
        case 1: {
          const bool free = it == model.end() || it->second == std::pair(owner, id);
          EXPECT_EQ(names.Put(Named(name, owner, id)).ok(), free);
          if (free) model[name] = {owner, id};
          break;
        }
        case 2:
          names.Drop(name, {owner, owner}, id);
          if (it != model.end() && it->second == std::pair(owner, id)) model.erase(it);
          break;
        default:
          if (!rng.Chance(0.2)) break;
          names.DropOwner({owner, owner});
          std::erase_if(model, [&](const auto& one) { return one.second.first == owner; });
      }
      ASSERT_EQ(names.size(), model.size());
      for (const auto& [key, of] : model) {
        ASSERT_NE(names.Find(key), nullptr);
        EXPECT_EQ(std::pair(names.Find(key)->owner.high, names.Find(key)->id), of);
      }
    }
  }
}

TEST(NameTableTest, WhatIsAName) {
  EXPECT_TRUE(CheckName("ps/7").ok());
  EXPECT_TRUE(CheckName("größte Zahl").ok());
  EXPECT_TRUE(CheckName(std::string(255, 'x')).ok());
  for (const std::string& wrong :
       {std::string(), std::string(256, 'x'), std::string("a\nb"), std::string(1, '\0')})
    EXPECT_TRUE(absl::IsInvalidArgument(CheckName(wrong)));
}

}  // namespace
}  // namespace gtrain::actors
