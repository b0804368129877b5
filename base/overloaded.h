// Several lambdas as one function for std::visit, chosen by the alternative's type.
#pragma once

namespace gtrain {

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

}  // namespace gtrain
