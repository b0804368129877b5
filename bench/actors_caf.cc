// A peer of bench_actors: requests from one actor of CAF, the C++ actor framework, to another, without
// timeouts.
//
//   actors_caf here    within this process; orders (orders.h) on standard input: sync, windowed, memory, and
//                      many: COUNT actors are made, called once each, and ended
//   actors_caf tcp     of an actor in another process, published by CAF's middleman: sync, windowed, wide,
//                      large, tail
#include <caf/all.hpp>
#include <caf/io/all.hpp>
#include <future>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "bench/orders.h"

namespace gtrain::bench {
namespace {

struct State {
  int64_t value = 0;
};

caf::behavior Counter(caf::stateful_actor<State>* self, int64_t from) {
  self->state.value = from;
  return {
      [self](int64_t by) { return self->state.value += by; },
      [self](const std::vector<char>& bytes) { return self->state.value += bytes.empty() ? 0 : 1; },
  };
}

// Calls the counters in turn, as many at a time as the order says.
class Caller : public caf::event_based_actor {
 public:
  Caller(caf::actor_config& config, const Order* order, const std::vector<caf::actor>* counters,
         Figures* figures, std::promise<void>* done)
      : caf::event_based_actor(config),
        order_(*order),
        counters_(*counters),
        figures_(*figures),
        done_(*done) {}

  caf::behavior make_behavior() override {
    for (int64_t i = 0; i < order_.UnderWay(); ++i) Next();
    return {[](caf::unit_t) {}};
  }

 private:
  void Next() {
    if (made_ == order_.count) return;
    const auto begin = figures_.Begin();
    const caf::actor& counter = counters_[static_cast<size_t>(made_++) % counters_.size()];
    const auto answered = [this, begin](int64_t) {
      figures_.End(begin);
      if (++answered_ < order_.count) return Next();
      quit();
      done_.set_value();
    };
    const auto failed = [](caf::error&) { Expect(false, "CAF: a request failed"); };
    if (order_.Large()) {
      request(counter, caf::infinite, bytes_).then(answered, failed);
    } else {
      request(counter, caf::infinite, int64_t{1}).then(answered, failed);
    }
  }

  const Order& order_;
  const std::vector<caf::actor>& counters_;
  Figures& figures_;
  std::promise<void>& done_;
  const std::vector<char> bytes_ = std::vector<char>(order_.Large() ? kLargeBytes : 0, 'x');
  int64_t made_ = 0, answered_ = 0;
};

void CallAll(caf::actor_system& world, const Order& order, const std::vector<caf::actor>& counters,
             Figures& figures) {
  std::promise<void> done;
  world.spawn<Caller>(&order, &counters, &figures, &done);
  done.get_future().wait();
}

std::vector<caf::actor> Make(caf::actor_system& world, int64_t count) {
  std::vector<caf::actor> counters;
  for (int64_t i = 0; i < count; ++i) counters.push_back(world.spawn(Counter, i));
  return counters;
}

void Serve(const Announce& announce) {
  caf::actor_system_config config;
  config.load<caf::io::middleman>();
  caf::actor_system world(config);
  const auto port = world.middleman().publish(world.spawn(Counter, 0), 0, "127.0.0.1");
  Expect(static_cast<bool>(port), "CAF: cannot publish");
  announce(std::to_string(*port));
  world.await_all_actors_done();
}

void Here(caf::actor_system& world, const Order& order, Figures& figures) {
  const bool many = order.kind == "many" || order.kind == "memory";
  const std::vector<caf::actor> counters = Make(world, many ? order.count : 1);
  CallAll(world, order, counters, figures);
  if (order.kind == "memory") figures.TakeMemory(order.count);
}

int Main(const std::string& where) {
  Expect(where == "here" || where == "tcp", "usage: actors_caf here|tcp");
  const std::string port = where == "tcp" ? StartServer(Serve) : "";
  caf::actor_system_config config;
  if (where == "tcp") config.load<caf::io::middleman>();
  caf::actor_system world(config);
  std::vector<caf::actor> far;
  if (where == "tcp") {
    auto counter = world.middleman().remote_actor("127.0.0.1", static_cast<uint16_t>(std::stoi(port)));
    Expect(static_cast<bool>(counter), "CAF: cannot connect");
    far.push_back(std::move(*counter));
  }
  AnswerOrders(std::cin, std::cout, [&](const Order& order, Figures& figures) {
    if (where == "tcp") CallAll(world, order, far, figures);
    if (where == "here") Here(world, order, figures);
  });
  return 0;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(argc > 1 ? argv[1] : ""); }
