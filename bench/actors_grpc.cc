// A peer of bench_actors: unary calls of gRPC between two processes, without TLS and without deadlines.
//
//   actors_grpc tcp|unix    orders (orders.h) on standard input: sync, windowed, wide, large, tail
//
// One call after the other is the blocking stub, many under way are a completion queue. The server is one
// thread with a completion queue, which was faster here than gRPC's synchronous server and its callbacks.
#include <grpcpp/grpcpp.h>

#include <iostream>
#include <memory>
#include <string>

#include "bench/actors_grpc.grpc.pb.h"
#include "bench/orders.h"

namespace gtrain::bench {
namespace {

// A call that the server waits for or has begun: what comes out of the queue is one of them. Deletes itself.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void GoOn() = 0;
};

template <typename Request, auto kAsk, int64_t (*kChange)(const Request&)>
class PendingOf : public Pending {
 public:
  PendingOf(Counter::AsyncService& service, grpc::ServerCompletionQueue& queue)
      : service_(service), queue_(queue), writer_(&context_) {
    (service_.*kAsk)(&context_, &request_, &writer_, &queue_, &queue_, this);
  }
  void GoOn() override {
    if (answered_) {
      delete this;
      return;
    }
    new PendingOf(service_, queue_);  // for the next one
    static int64_t value = 0;
    Value answer;
    answer.set_value(value += kChange(request_));
    answered_ = true;
    writer_.Finish(answer, grpc::Status::OK, this);
  }

 private:
  Counter::AsyncService& service_;
  grpc::ServerCompletionQueue& queue_;
  grpc::ServerContext context_;
  Request request_;
  grpc::ServerAsyncResponseWriter<Value> writer_;
  bool answered_ = false;
};

int64_t ChangeBy(const By& by) { return by.by(); }
int64_t ChangeByBytes(const Bytes& bytes) { return bytes.bytes().empty() ? 0 : 1; }
using PendingAdd = PendingOf<By, &Counter::AsyncService::RequestAdd, ChangeBy>;
using PendingTake = PendingOf<Bytes, &Counter::AsyncService::RequestTake, ChangeByBytes>;

void Serve(bool tcp, const Announce& announce) {
  const std::string address = tcp ? "127.0.0.1:" : "unix-abstract:actors_grpc." + std::to_string(getpid());
  Counter::AsyncService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(tcp ? address + "0" : address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::ServerCompletionQueue> queue = builder.AddCompletionQueue();
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  Expect(server != nullptr, "gRPC: cannot listen");
  for (int i = 0; i < 64; ++i) new PendingAdd(service, *queue);
  for (int i = 0; i < 4; ++i) new PendingTake(service, *queue);
  announce(tcp ? address + std::to_string(port) : address);
  void* tag = nullptr;
  for (bool ok = false; queue->Next(&tag, &ok);) static_cast<Pending*>(tag)->GoOn();
}

struct Call {
  grpc::ClientContext context;
  grpc::Status status;
  Value value;
  std::unique_ptr<grpc::ClientAsyncResponseReader<Value>> reader;
  Figures::Clock::time_point begin;
};

void OneByOne(Counter::Stub& counter, int64_t count) {
  By by;
  by.set_by(1);
  for (int64_t i = 0; i < count; ++i) {
    grpc::ClientContext context;
    Value value;
    Expect(counter.Add(&context, by, &value).ok(), "gRPC: a call failed");
  }
}

void Windowed(Counter::Stub& counter, const Order& order, Figures& figures) {
  By by;
  by.set_by(1);
  Bytes bytes;
  if (order.Large()) bytes.set_bytes(std::string(kLargeBytes, 'x'));
  grpc::CompletionQueue queue;
  for (int64_t made = 0, answered = 0; answered < order.count; ++answered) {
    for (; made < order.count && made - answered < order.UnderWay(); ++made) {
      auto* const call = new Call;
      call->begin = figures.Begin();
      call->reader = order.Large() ? counter.AsyncTake(&call->context, bytes, &queue)
                                   : counter.AsyncAdd(&call->context, by, &queue);
      call->reader->Finish(&call->value, &call->status, call);
    }
    void* tag = nullptr;
    bool ok = false;
    Expect(queue.Next(&tag, &ok) && ok, "gRPC: the queue ended");
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    Expect(call->status.ok(), "gRPC: a call failed");
    figures.End(call->begin);
  }
}

int Main(const std::string& transport) {
  Expect(transport == "tcp" || transport == "unix", "usage: actors_grpc tcp|unix");
  const std::string address =
      StartServer([&](const Announce& announce) { Serve(transport == "tcp", announce); });
  const std::unique_ptr<Counter::Stub> counter =
      Counter::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  AnswerOrders(std::cin, std::cout, [&](const Order& order, Figures& figures) {
    if (order.kind == "sync") OneByOne(*counter, order.count);
    if (order.kind != "sync") Windowed(*counter, order, figures);
  });
  return 0;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(argc > 1 ? argv[1] : ""); }
