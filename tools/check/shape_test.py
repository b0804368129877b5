"""What tools/check/shape.py counts."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import shape

SOURCE = r'''
#define IF if (a && b)
namespace gtrain {
namespace {
// A comment with if and { braces.
constexpr int kTable[] = {1, 2, 3};
enum class Kind { kOne, kTwo };
struct Plain {
  int value = 0;
  bool operator==(const Plain&) const = default;
};
template <typename T>
T Twice(T value) { return value < 0 ? -value : value + value; }
}  // namespace

class Thing final : public Base {
 public:
  explicit Thing(int of) : of_{of}, text_("if (x) {") {
    if (of > 0 && of < 9) Go();
  }
  ~Thing() override;
  int of() const { return of_; }
  void Go();
  int field ABSL_GUARDED_BY(mutex_) = 0;

 private:
  struct Inner {
    void Deep();
  };
  using Fn = std::function<void(int)>;
  friend class Other;
  const int of_;
  std::string text_ = R"(while } if)";
};

Thing::~Thing() {
  for (int i = 0; i < 3; ++i) {
    const auto each = [&](char c) {
      switch (c) {
        case '{':
          return 1;
        default:
          return c == '"' || c == '\'' ? 2 : 3;
      }
    };
    each('}');
  }
}

auto Trailing(int a)
    -> std::vector<int> {
  return {a, a};
}
}  // namespace gtrain
'''


class ShapeTest(unittest.TestCase):
    def setUp(self):
        self.file = shape.File('a.cc', SOURCE)

    def test_functions(self):
        self.assertEqual([(name, complexity) for name, _, complexity in self.file.functions],
                         [('Twice', 2), ('Thing::Thing', 3), ('Thing::of', 1), ('Thing::~Thing', 5), ('Trailing', 1)])

    def test_lines(self):
        lines = {name: lines for name, lines, _ in self.file.functions}
        self.assertEqual(lines['Twice'], 1)
        self.assertEqual(lines['Thing::~Thing'], 13)

    def test_methods(self):
        self.assertEqual(self.file.classes, [('Plain', 1), ('Inner', 1), ('Thing', 4)])


if __name__ == '__main__':
    unittest.main()
