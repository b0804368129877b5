// A peer of bench_actors: an echo between two processes over ZeroMQ's own sockets with CURVE on TCP, one
// message a call and one back, as a program would do by hand. Orders (orders.h) on standard input: sync,
// windowed, wide, large, tail.
#include <sys/prctl.h>
#include <unistd.h>
#include <zmq.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <vector>

#include "bench/orders.h"

namespace {

using gtrain::bench::Figures;
using gtrain::bench::Order;

// What a small call of an actor has in its frame, about.
constexpr size_t kSmall = 48;

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "actors_zmq: %s: %s\n", what, zmq_strerror(zmq_errno()));
  std::exit(1);
}

void SetText(void* socket, int option, const char* text) {
  Expect(zmq_setsockopt(socket, option, text, 40) == 0, "a key");
}

struct Keys {
  char open[41] = {}, secret[41] = {};
  Keys() { Expect(zmq_curve_keypair(open, secret) == 0, "a pair of keys"); }
};

void* Socket(void* context, int type) {
  void* const socket = zmq_socket(context, type);
  Expect(socket != nullptr, "a socket");
  // Without bounds: a ROUTER drops what it has no room for, and knows late that there is room again.
  const int none = 0;
  for (const int option : {ZMQ_LINGER, ZMQ_SNDHWM, ZMQ_RCVHWM})
    Expect(zmq_setsockopt(socket, option, &none, sizeof(none)) == 0, "an option");
  return socket;
}

// Answers each message with one byte, or as much as it has if that is little.
[[noreturn]] void Echo(const Keys& keys, int to_parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  void* const socket = Socket(zmq_ctx_new(), ZMQ_ROUTER);
  const int server = 1;
  Expect(zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &server, sizeof(server)) == 0, "CURVE");
  SetText(socket, ZMQ_CURVE_SECRETKEY, keys.secret);
  Expect(zmq_bind(socket, "tcp://127.0.0.1:*") == 0, "bind");
  char endpoint[256] = {};
  size_t size = sizeof(endpoint);
  Expect(zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, endpoint, &size) == 0, "endpoint");
  Expect(write(to_parent, endpoint, sizeof(endpoint)) == sizeof(endpoint), "pipe");
  for (;;) {
    zmq_msg_t route, body;
    zmq_msg_init(&route);
    zmq_msg_init(&body);
    Expect(zmq_msg_recv(&route, socket, 0) >= 0 && zmq_msg_recv(&body, socket, 0) >= 0, "receive");
    const size_t back = zmq_msg_size(&body) > 1024 ? 1 : zmq_msg_size(&body);
    Expect(zmq_msg_send(&route, socket, ZMQ_SNDMORE) >= 0, "send");
    Expect(zmq_send(socket, zmq_msg_data(&body), back, 0) >= 0, "send");
    zmq_msg_close(&body);
  }
}

void CarryOut(void* socket, const Order& order, Figures& figures) {
  const std::vector<char> message(order.Large() ? gtrain::bench::kLargeBytes : kSmall, 'x');
  std::vector<char> answer(2048);
  std::deque<Figures::Clock::time_point> begun;
  for (int64_t sent = 0, received = 0; received < order.count; ++received) {
    for (; sent < order.count && sent - received < order.UnderWay(); ++sent) {
      begun.push_back(figures.Begin());
      Expect(zmq_send(socket, message.data(), message.size(), 0) >= 0, "send");
    }
    Expect(zmq_recv(socket, answer.data(), answer.size(), 0) >= 0, "receive");
    figures.End(begun.front());
    begun.pop_front();
  }
}

}  // namespace

int main() {
  const Keys server, client;
  int pipe_fds[2];
  Expect(pipe(pipe_fds) == 0, "pipe");
  if (fork() == 0) Echo(server, pipe_fds[1]);
  char endpoint[256] = {};
  Expect(read(pipe_fds[0], endpoint, sizeof(endpoint)) == sizeof(endpoint), "the other process");
  void* const socket = Socket(zmq_ctx_new(), ZMQ_DEALER);
  SetText(socket, ZMQ_CURVE_SERVERKEY, server.open);
  SetText(socket, ZMQ_CURVE_PUBLICKEY, client.open);
  SetText(socket, ZMQ_CURVE_SECRETKEY, client.secret);
  Expect(zmq_connect(socket, endpoint) == 0, "connect");
  gtrain::bench::AnswerOrders(std::cin, std::cout, [socket](const Order& order, Figures& figures) {
    CarryOut(socket, order, figures);
  });
  return 0;
}
