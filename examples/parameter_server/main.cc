// Asynchronous SGD with a parameter server: softmax regression on Fashion-MNIST. Workers pull the weights,
// compute the gradient of a batch and push it, each at its own pace; nobody waits for another one.
//
//   parameter_server [BATCHES [DATA_FOLDER]]      the last lines of the driver are "pushes N" and "test
//   accuracy A"
#include <gtrain/gtrain.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "examples/fashion_softmax/softmax.h"

namespace {

using gtrain::examples::kWeights;

constexpr int64_t kBatch = 32, kBatchesACall = 50;

class Server {
 public:
  std::vector<float> Pull() const { return w_; }
  gtrain::Result<int64_t> Push(const std::vector<float>& gradient, float rate) {
    if (gradient.size() != w_.size())
      return gtrain::Status(gtrain::StatusCode::kInvalidArgument, "a gradient of another model");
    for (size_t i = 0; i < w_.size(); ++i) w_[i] -= rate * gradient[i];
    return ++version_;
  }
  int64_t Version() const { return version_; }
  void Persist(auto& archive) { archive(w_, version_); }  // what is kept when its process is lost

 private:
  std::vector<float> w_ = std::vector<float>(kWeights);
  int64_t version_ = 0;
};
constexpr auto kServer =
    gtrain::Actor<Server, gtrain::Ctor<>, gtrain::Methods<&Server::Pull, &Server::Push, &Server::Version>>;

// Has a share of the samples.
class Worker {
 public:
  Worker(const std::string& folder, int64_t share, int64_t shares)
      : data_(gtrain::examples::ReadImages(folder, "train").value()), next_(share), stride_(shares) {}

  // So many batches; the result is their mean loss.
  gtrain::Task<double> Train(gtrain::Ref<Server> server, int64_t batches) {
    double loss = 0;
    for (int64_t batch = 0; batch < batches; ++batch) {
      const std::vector<float> w = co_await server.Call<&Server::Pull>();
      std::vector<float> gradient(kWeights);
      for (int64_t i = 0; i < kBatch; ++i, next_ = (next_ + stride_) % data_.count())
        loss += gtrain::examples::Accumulate(data_, next_, w, gradient);
      co_await server.Call<&Server::Push>(gradient, 0.1F / kBatch);
    }
    co_return loss / static_cast<double>(batches * kBatch);
  }

 private:
  gtrain::examples::Images data_;
  int64_t next_, stride_;
};
constexpr auto kWorker =
    gtrain::Actor<Worker, gtrain::Ctor<std::string, int64_t, int64_t>, gtrain::Methods<&Worker::Train>>;

gtrain::Task<> Drive(gtrain::Cluster& cluster, int64_t batches, std::string folder) {
  auto server = co_await cluster.Spawn<Server>(gtrain::Spawn().Restarts(1000).Keep(gtrain::Durable::kPeer));
  const int64_t count = cluster.processes();
  std::vector<gtrain::Owner<Worker>> workers;
  for (int64_t i = 0; i < count; ++i)
    workers.push_back(co_await cluster.Spawn<Worker>(gtrain::Spawn().Restarts(1000), folder, i, count));

  // One call is under way to each worker, whichever answers is asked again, and one whose process is lost is
  // asked where it is made anew.
  std::vector<gtrain::Future<double>> training;
  for (const auto& worker : workers) training.push_back(worker.Call<&Worker::Train>(server, kBatchesACall));
  for (int64_t done = 0; done < batches;) {
    const size_t i = co_await gtrain::WhenAny(training);
    const auto loss = co_await gtrain::Try(std::move(training[i]));
    if (loss.ok()) {
      done += kBatchesACall;
      std::printf("worker %zu: loss %.3f\n", i, *loss);
    } else if (loss.status().code() != gtrain::StatusCode::kUnavailable) {
      co_await loss.status();  // the driver ends with it
    } else {
      std::printf("worker %zu: %s\n", i, loss.status().ToString().c_str());
    }
    training[i] = workers[i].Call<&Worker::Train>(server, kBatchesACall);
  }
  const auto test = co_await gtrain::examples::ReadImages(folder, "t10k");
  std::printf("pushes %lld\n", static_cast<long long>(co_await server.Call<&Server::Version>()));
  std::printf("test accuracy %.4f\n",
              gtrain::examples::Accuracy(test, co_await server.Call<&Server::Pull>()));
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t batches = argc > 1 ? std::atoll(argv[1]) : 3000;
  const std::string folder = argc > 2 ? argv[2] : gtrain::examples::kFashionFolder;
  return gtrain::Main(argc, argv, [&](gtrain::Cluster& cluster) { return Drive(cluster, batches, folder); });
}
