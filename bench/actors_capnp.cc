// A peer of bench_actors: calls of a capability of Cap'n Proto between two processes, a thread each.
//
//   actors_capnp tcp|unix    orders (orders.h) on standard input: sync, windowed, wide, large, tail
#include <capnp/ez-rpc.h>

#include <deque>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "bench/actors_capnp.capnp.h"
#include "bench/orders.h"

namespace gtrain::bench {
namespace {

class Server final : public Counter::Server {
  kj::Promise<void> add(AddContext context) override {
    context.getResults().setValue(value_ += context.getParams().getBy());
    return kj::READY_NOW;
  }
  kj::Promise<void> take(TakeContext context) override {
    context.getResults().setValue(value_ += context.getParams().getBytes().size() == 0 ? 0 : 1);
    return kj::READY_NOW;
  }

  int64_t value_ = 0;
};

void Serve(bool tcp, const Announce& announce) {
  const std::string address = tcp ? "127.0.0.1" : "unix-abstract:actors_capnp." + std::to_string(getpid());
  capnp::EzRpcServer server(kj::heap<Server>(), address.c_str());
  const unsigned port = server.getPort().wait(server.getWaitScope());  // it listens then
  announce(tcp ? address + ":" + std::to_string(port) : address);
  kj::NEVER_DONE.wait(server.getWaitScope());
}

kj::Promise<void> Call(Counter::Client& counter, const std::vector<kj::byte>& bytes, Figures& figures) {
  const auto begin = figures.Begin();
  const auto ended = [&figures, begin](auto&&) { figures.End(begin); };
  if (!bytes.empty()) {
    auto request = counter.takeRequest();
    request.setBytes(kj::arrayPtr(bytes.data(), bytes.size()));
    return request.send().then(ended);
  }
  auto request = counter.addRequest();
  request.setBy(1);
  return request.send().then(ended);
}

int Main(const std::string& transport) {
  Expect(transport == "tcp" || transport == "unix", "usage: actors_capnp tcp|unix");
  const std::string address =
      StartServer([&](const Announce& announce) { Serve(transport == "tcp", announce); });
  capnp::EzRpcClient client(address.c_str());
  kj::WaitScope& scope = client.getWaitScope();
  Counter::Client counter = client.getMain<Counter>();
  AnswerOrders(std::cin, std::cout, [&](const Order& order, Figures& figures) {
    const std::vector<kj::byte> bytes(order.Large() ? kLargeBytes : 0, 'x');
    std::deque<kj::Promise<void>> window;
    for (int64_t i = 0; i < order.count; ++i) {
      if (static_cast<int64_t>(window.size()) == order.UnderWay()) {
        window.front().wait(scope);
        window.pop_front();
      }
      window.push_back(Call(counter, bytes, figures));
    }
    for (; !window.empty(); window.pop_front()) window.front().wait(scope);
  });
  return 0;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(argc > 1 ? argv[1] : ""); }
