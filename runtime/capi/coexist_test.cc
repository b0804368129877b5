// libgtrain.so in one process with libtorch and gRPC (which brings the same shared abseil and its own
// threads): each still works before and after the others were used. Usage: coexist_test libgtrain.so
#include <dlfcn.h>
#include <grpcpp/grpcpp.h>
#include <gtrain/gtrain_c.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

double TorchSumOfSquares(int n);

namespace {

gtrain_error error;

void Check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s (last error: %s)\n", what, error.message);
  std::exit(1);
}

// Nothing listens there: the channel is made, tries, and reports that in time.
void UseGrpc() {
  auto channel = grpc::CreateChannel("127.0.0.1:1", grpc::InsecureChannelCredentials());
  Check(channel != nullptr, "CreateChannel");
  channel->GetState(/*try_to_connect=*/true);
  const auto deadline = std::chrono::system_clock::now() + std::chrono::milliseconds(100);
  Check(!channel->WaitForConnected(deadline), "nobody listens on port 1");
}

void UseGtrain() {
  gtrain_session* session = nullptr;
  gtrain_communicator* comm = nullptr;
  Check(gtrain_session_join(60000, &session, &error) == GTRAIN_OK, "join");
  Check(gtrain_communicator_create(session, 60000, &comm, &error) == GTRAIN_OK, "communicator");
  double x[4] = {1, 2, 3, 4};
  gtrain_request* request = nullptr;
  Check(gtrain_all_reduce(comm, x, 4, GTRAIN_FLOAT64, GTRAIN_SUM, nullptr, &request, &error) == GTRAIN_OK,
        "queue");
  Check(gtrain_request_wait(request, 60000, nullptr, &error) == GTRAIN_OK, "all-reduce");
  Check(x[3] == 4, "sum over one rank");
  gtrain_request_free(request);
  gtrain_communicator_free(comm);
  gtrain_session_free(session);
}

}  // namespace

int main(int argc, char** argv) {
  unsetenv("GTRAIN_GENERATION");
  Check(argc == 2, "usage: coexist_test libgtrain.so");
  // The way Python loads it: the same library, found again.
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  Check(library != nullptr, "dlopen");
  Check(dlsym(library, "gtrain_abi") == reinterpret_cast<void*>(&gtrain_abi), "one copy of the library");

  Check(TorchSumOfSquares(3) == 14, "torch before");
  UseGrpc();
  UseGtrain();
  UseGrpc();
  Check(TorchSumOfSquares(4) == 30, "torch after");
  Check(dlclose(library) == 0, "dlclose");
  UseGtrain();  // a second session in the same process, after the first has gone
  std::puts("ok");
  return 0;
}
