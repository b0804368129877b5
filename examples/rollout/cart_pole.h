// The cart with a pole of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult
// learning control problems" (IEEE SMC 13, 1983): four numbers of state, a push to the left or the right each
// 0.02 s, a reward of 1 for each push until the pole falls, the cart is too far out, or 500 were made.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <random>

namespace gtrain::examples {

inline constexpr int kCartPoleSteps = 500;

class CartPole {
 public:
  explicit CartPole(uint64_t seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> small(-0.05, 0.05);
    for (double& one : state_) one = small(random);
  }

  // Position and speed of the cart (m, m/s), angle and speed of the pole (rad, rad/s).
  const std::array<double, 4>& state() const { return state_; }
  bool over() const { return std::abs(state_[0]) > 2.4 || std::abs(state_[2]) > 12 * kPi / 180; }

  void Push(bool right) {
    constexpr double kGravity = 9.8, kCart = 1.0, kPole = 0.1, kHalfLength = 0.5, kForce = 10, kTau = 0.02;
    const double sine = std::sin(state_[2]), cosine = std::cos(state_[2]);
    const double force = right ? kForce : -kForce;
    const double pull = (force + kPole * kHalfLength * state_[3] * state_[3] * sine) / (kCart + kPole);
    const double turn = (kGravity * sine - cosine * pull) /
                        (kHalfLength * (4.0 / 3 - kPole * cosine * cosine / (kCart + kPole)));
    const double move = pull - kPole * kHalfLength * turn * cosine / (kCart + kPole);
    state_[0] += kTau * state_[1];
    state_[1] += kTau * move;
    state_[2] += kTau * state_[3];
    state_[3] += kTau * turn;
  }

 private:
  static constexpr double kPi = 3.14159265358979323846;
  std::array<double, 4> state_{};
};

}  // namespace gtrain::examples
